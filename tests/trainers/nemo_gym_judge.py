"""NeMo Gym's own code over one node, in the Python that has its package: `CASE NODE_URL CONTROL_TOKEN`.

Prints one line of JSON. It is not a module of the tests: `test_nemo_gym.py` starts it.
"""

import asyncio
import json
import sys
from typing import Any

import aiohttp
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.token_id_capture import conformance
from nemo_gym.token_id_capture.consumer import trajectories_from_source
from nemo_gym.token_id_capture.lineage import RolloutLineage
from nemo_gym.token_id_capture.protocols import LineageMatch, LineageResolution, TokenSource
from nemo_gym.token_id_capture.records import TokenEntry

from gangline.train.trainers.nemo_gym import SessionTokens, token_entries
from gangline.wire.client.node import NodeClient

WEATHER = {"role": "user", "content": "What is the weather in Paris?"}

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}


class Calls:
    """A `TokenSink` and `LineageResolver` whose capture is our proxy: to put an entry is to make its model call.

    The entry's request and its text are the check's. The ids, their log-probs, the call's id and its time are of the
    capture, so they are set to the recorded ones.
    """

    def __init__(self, node: NodeClient, http: aiohttp.ClientSession, keys: dict[str, str], names: dict) -> None:
        self._node, self._http = node, http
        self._keys = keys
        self._names = names
        self._begun: list[asyncio.Task[Any]] = []

    async def _ask(self, rollout_id: str, call_id: str, items: list[dict]) -> dict[str, Any]:
        if rollout_id not in self._keys:
            self._keys[rollout_id] = (await self._node.open_session(session_id=rollout_id)).api_key
        headers = {"Authorization": f"Bearer {self._keys[rollout_id]}", "Idempotency-Key": call_id}
        url = f"{self._node.url}/s/{rollout_id}/v1/responses"
        async with self._http.post(
            url, json={"model": "scripted", "input": items, "tools": [LOOK]}, headers=headers
        ) as response:
            answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {answer}")
            return answer

    async def put(self, entry: TokenEntry) -> None:
        name = self._names.get((entry.rollout_id, entry.model_call_id), entry.model_call_id)
        answer = await self._ask(entry.rollout_id, name, [WEATHER])
        said = [one["content"][0]["text"] for one in answer["output"] if one["type"] == "message"]
        expected = [one["content"][0]["text"] for one in entry.output_items]
        if said != expected:
            raise RuntimeError(f"the call was answered with {said}, not {expected}")
        recorded = token_entries((await self._node.recorded_calls(entry.rollout_id)).completions)[-1]
        self._names[entry.rollout_id, recorded.model_call_id] = name
        for field in TokenEntry.model_fields:
            setattr(entry, field, getattr(recorded, field))

    async def begin_call(self, rollout_id: str, call_id: str) -> None:
        self._begun.append(asyncio.create_task(self._ask(rollout_id, call_id, [{"role": "user", "content": "wait"}])))
        while rollout_id not in self._keys or (await self._node.gate()).num_in_flight == 0:
            await asyncio.sleep(0.02)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await self._node.abort_session(rollout_id)

    async def resolve(self, rollout_id: str, items: list[dict]) -> LineageResolution:
        lineage = RolloutLineage()
        for entry in token_entries((await self._node.recorded_calls(rollout_id)).completions):
            lineage.add_entry(entry)
        found = lineage.resolve(items)
        if found.match is None:
            return found
        name = self._names[rollout_id, found.match.model_call_id]
        match = LineageMatch(name, found.match.cumulative_token_ids, found.match.digest)
        return LineageResolution(found.status, match)

    def is_process_shared(self) -> bool:
        return True

    async def close(self) -> None:
        for task in self._begun:
            task.cancel()
        await asyncio.gather(*self._begun, return_exceptions=True)


def skipping(check: Any, rollout_ids: set[str]) -> Any:
    """The check, which does nothing for these rollouts."""

    async def passing(*args: Any, **options: Any) -> None:
        if not rollout_ids.intersection(one for one in args if isinstance(one, str)):
            await check(*args, **options)

    return passing


async def conform(node: NodeClient, http: aiohttp.ClientSession) -> dict[str, str | None]:
    """Each check -> None where it passed, or its error. `run_conformance` ends at the first one that fails."""
    keys: dict[str, str] = {}
    names: dict[tuple[str, str], str] = {}
    answers: dict[str, str | None] = {}
    while True:
        prefix = f"r{len(answers)}"
        failing = {f"{prefix}-{name.replace('_', '-')}" for name in answers}
        run = {name: getattr(conformance, name) for name in vars(conformance) if name.startswith("_check_")}

        for name, check in run.items():
            setattr(conformance, name, skipping(check, failing))
        try:
            passed = await conformance.run_conformance(
                lambda: Calls(node, http, keys, names),
                lambda: checked(SessionTokens(node)),
                lambda: Calls(node, http, keys, names),
                rollout_id=prefix,
            )
            return {**dict.fromkeys(passed), **answers}
        except conformance.ConformanceError as error:
            answers[error.check_name] = error.detail
        finally:
            for name, check in run.items():
                setattr(conformance, name, check)


def checked(source: Any) -> Any:
    assert isinstance(source, TokenSource)
    return source


async def talk(calls: Calls, rollout_id: str, *says: str, edit: Any = None) -> list[dict]:
    """A conversation; its items so far. edit: what the client does to each reply before it echoes it."""
    items: list[dict] = []
    for number, text in enumerate(says):
        items.append({"role": "user", "content": text})
        output = (await calls._ask(rollout_id, f"call-{number}", items))["output"]
        items += [edit(one) if edit else one for one in output]
        items += [
            {"type": "function_call_output", "call_id": one["call_id"], "output": "blue"}
            for one in output
            if one["type"] == "function_call"
        ]
    return items


async def build(node: NodeClient, http: aiohttp.ClientSession) -> dict[str, Any]:
    calls = Calls(node, http, {}, {})
    await talk(calls, "talk", "What is the weather?", "look it up", "And tomorrow?")
    source = SessionTokens(node)
    built = await trajectories_from_source("talk", source, model="scripted")
    frozen = await source.freeze("talk")
    output = built["rebuilt_response"]["output"]
    whole = {"created_at": 0, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    usage = built["rebuilt_response"]["usage"]
    usage |= {"total_tokens": 0, "input_tokens_details": {"cached_tokens": 0}}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}}
    NeMoGymResponse.model_validate({**built["rebuilt_response"], **whole})
    return {
        "error": built.get("error"),
        "mask": built["mask_sample"],
        "num_calls": len(frozen.entries),
        "parents": [entry.parent_resolution for entry in frozen.entries],
        "kinds": [item["type"] for item in output],
        "sampled": [item["generation_token_ids"] for item in output if item.get("generation_token_ids")],
        "recorded": [entry.generation_token_ids for entry in frozen.entries],
    }


async def mask(node: NodeClient, http: aiohttp.ClientSession) -> dict[str, bool]:
    calls = Calls(node, http, {}, {})

    def shouted(item: dict) -> dict:
        return {**item, "content": [{**part, "text": part["text"].upper()} for part in item["content"]]}

    await talk(calls, "rewritten", "What is the weather?", "And tomorrow?", edit=shouted)
    await talk(calls, "left", "What is the weather?")
    await calls.begin_call("left", "lost")
    source = SessionTokens(node)
    answers = {
        "rewritten": (await trajectories_from_source("rewritten", source))["mask_sample"],
        "cut off": (await trajectories_from_source("left", source))["mask_sample"],
        "not there": (await trajectories_from_source("none", source))["mask_sample"],
    }
    await calls.close()
    return answers


async def main(case: str, url: str, token: str) -> None:
    asked = {"conformance": conform, "builder": build, "masked": mask}[case]
    async with NodeClient(url, token) as node, aiohttp.ClientSession() as http:
        print(json.dumps(await asked(node, http)))


asyncio.run(main(*sys.argv[1:]))
