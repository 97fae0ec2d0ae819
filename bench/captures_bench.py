"""What eight ordinary clients keep of a conversation, through four other captures and ours, on one scripted engine.

A client is an agent's loop over OpenAI's SDK: it sends its messages, runs the tool, and sends them again. Clients
differ in what they send of an earlier reply. The engine (Qwen3's tokenizer and template) writes down which ids it read
and sampled at each call. A sampled token is *kept* where some row trains it behind the very ids that the engine had
read. Rows are made by each system's own code:

    ours            a node; `prefix_merging`
    openenv         OpenEnv's capture server, `GET /sessions/{id}/rollout`
    trl             the turns that OpenEnv captured, joined by TRL's asynchronous trainer (fork_threshold_tokens 1024)
    agentlightning  Agent Lightning's server and its adapter for verl, level `trajectory`
    rllm            rLLM's gateway: a row a call

Figures: `captures.SYSTEM.kept_share` and `captures.SYSTEM.rows`, means of the clients. The table is written to
docs/reference/captures.md. Needs the tokenizers of `make tools`, and the peers from PyPI.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import openai
import torch
from peer_environments import peer_python
from proxy_bench import free_port, process

from gangline.models.engine_server.app import create_app, serving
from gangline.models.engine_server.sampler import SampledToken, SampleRequest
from gangline.models.language.tokenizer import load_tokenizer
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.engines.tokenizers import qwen3_folder
from support.node.node import RunningNode, running_node

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "captures.md"
MODEL = "mock"
FORK_THRESHOLD = 1024
"""TRL's default."""
LONGEST = 16_384

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
Message = dict[str, Any]


class Row(NamedTuple):
    ids: list[int]
    mask: list[int]
    """1 where the token is trained."""


# -- the engine --------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    prompt_ids: list[int]
    sampled_ids: list[int]


class LoggedSampler(ScriptedSampler):
    """Writes down what every reply was conditioned on."""

    def __init__(self, script: Script, tokenizer: Any) -> None:
        super().__init__(script, tokenizer)
        self.calls: list[Call] = []

    async def sample(self, request: SampleRequest) -> AsyncGenerator[SampledToken]:
        call = Call(list(request.prompt_ids), [])
        if request.messages is not None and len(request.messages) > 1:  # not a probe
            self.calls.append(call)
        async for token in super().sample(request):
            call.sampled_ids.append(token.token_id)
            yield token


def run_command(command: str) -> dict[str, Any]:
    return {"name": "shell", "arguments": {"command": command}}


def script(*first: dict[str, Any]) -> Script:
    """A conversation of two user turns and five replies; `first`: the replies before the last of the first turn."""
    replies = [
        *first,
        {"thinking": "Enough.", "text": "There are two of them."},
        {"thinking": "The other one, then.", "tool_calls": [run_command("cat notes.txt")]},
        {"thinking": "That is it.", "text": "It says: buy milk."},
    ]
    rules = [{"turn": turn, **reply} for turn, reply in enumerate(replies)]
    default = {"text": "Hello."}
    return Script.model_validate({"rules": rules, "default": default, "model": MODEL, "context_length": LONGEST})


PLAIN = script(
    {"thinking": "I list the files first.", "tool_calls": [run_command("ls -l")]},
    {"thinking": "Now the other folder.", "text": "Next.", "tool_calls": [run_command("ls -l other")]},
)
ACCENTS = script(
    {"thinking": "I look for the name.", "tool_calls": [run_command("grep café menu.txt")]},
    {"thinking": "Once more.", "tool_calls": [run_command("grep naïve menu.txt")]},
)
NEWLINES = script(
    {"thinking": "I list the files first.", "text": "I begin. \n\n", "tool_calls": [run_command("ls -l")]},
    {"thinking": "Now the other folder.", "text": "Next. \n", "tool_calls": [run_command("ls -l other")]},
)
MARKERS = script(
    {
        "thinking": "The log has markers.",
        "tool_calls": [run_command("grep -c '<|im_end|>' chat.log")],
        "split": "chars",  # the letters of the marker, which would end the turn as one id
    },
    {"thinking": "Their number.", "tool_calls": [run_command("wc -l chat.log")]},
)
ODD_IDS = script(
    {"thinking": "I list the files first.", "tool_calls": [run_command("ls -l")], "split": "chars"},
    {"thinking": "Now the other folder.", "text": "Fishing.", "tool_calls": [run_command("ls -l other")]},
)


# -- clients -----------------------------------------------------------------------------------------------------------


def as_it_came(message: Message) -> Message:
    return message


def without_thinking(message: Message) -> Message:
    return {name: value for name, value in message.items() if not name.startswith("reasoning")}


def rewritten(message: Message) -> Message:
    return _with_arguments(message, lambda arguments: json.dumps(arguments, ensure_ascii=False, indent=2))


def escaped(message: Message) -> Message:
    return _with_arguments(message, json.dumps)


def stripped(message: Message) -> Message:
    return message | {"content": (message.get("content") or "").strip()}


def _with_arguments(message: Message, write: Callable[[Any], str]) -> Message:
    calls = [
        call | {"function": call["function"] | {"arguments": write(json.loads(call["function"]["arguments"]))}}
        for call in message.get("tool_calls") or ()
    ]
    return message | ({"tool_calls": calls} if calls else {})


@dataclass(frozen=True)
class Client:
    label: str
    script: Script = PLAIN
    echo: Callable[[Message], Message] = as_it_came
    """What it sends of a reply later."""
    dates: bool = False
    """Its system text says when the call was made."""

    async def converse(self, url: str, key: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as model:
            messages: list[Any] = [{"role": "system", "content": self._system(0)}]
            for said in ("How many files are there?", "And what is in the other one?"):
                messages.append({"role": "user", "content": said})
                while await self._step(model, messages):
                    pass

    async def _step(self, model: openai.AsyncOpenAI, messages: list[Any]) -> bool:
        """One call; whether the agent continues by itself."""
        if self.dates:
            messages[0] = {"role": "system", "content": self._system(len(messages))}
        tools: Any = [SHELL]
        asked = model.chat.completions.create(model=MODEL, messages=messages, tools=tools, temperature=1.0)
        reply = (await asked).choices[0].message.model_dump(exclude_none=True)
        messages.append(self.echo(reply))
        for call in reply.get("tool_calls") or ():
            output = f"total {len(messages)}\n-rw-r--r-- notes.txt\n"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
        return bool(reply.get("tool_calls"))

    def _system(self, number: int) -> str:
        return f"You are an agent. It is 09:{number:02}." if self.dates else "You are an agent."


CLIENTS = (
    Client("sends replies back as they came"),
    Client("leaves out the thinking", echo=without_thinking),
    Client("writes arguments anew", echo=rewritten),
    Client("escapes letters beyond ASCII", ACCENTS, escaped),
    Client("strips white space", NEWLINES, stripped),
    Client("has the end of turn in an argument", MARKERS),
    Client("samples ids that no tokenizer chooses", ODD_IDS),
    Client("tells the time in its system text", dates=True),
)


# -- systems -----------------------------------------------------------------------------------------------------------

Converse = Callable[[str, str], Awaitable[None]]
"""Takes the URL and the key that the agent is given."""


async def ours(node: RunningNode, converse: Converse) -> list[Row]:
    opened = await node.client.open_session()
    await converse(f"{node.url}/s/{opened.session_id}/v1", opened.api_key)
    result = await node.client.finalize(opened.session_id)
    traces = () if result.trajectory is None else result.trajectory.traces
    return [
        Row([*one.prompt_ids.tolist(), *one.response_ids.tolist()], [0] * len(one.prompt_ids) + one.loss_mask.tolist())
        for one in traces
    ]


async def openenv(url: str, converse: Converse) -> tuple[list[Row], list[dict[str, Any]]]:
    """Its rows, and its turns."""
    async with aiohttp.ClientSession(url) as http:
        session_id = (await _json(http.post("/sessions", json={})))["session_id"]
        await converse(f"{url}/v1", session_id)
        document = await _json(http.get(f"/sessions/{session_id}/rollout"))
        turns = (await _json(http.get(f"/sessions/{session_id}/trace_entries")))["entries"]
    rows = [Row(one["input_ids"], one["loss_mask"]) for one in document["sequences"] if one["trainable"]]
    return rows, turns


def by_trl(turns: Sequence[dict[str, Any]]) -> list[Row]:
    # TRL's own function, which no other name gives.
    from trl.experimental.async_grpo.async_rollout_worker import (  # noqa: PLC0415
        TurnRecord,
        _chain_to_sequences,  # pyright: ignore[reportPrivateUsage]
    )

    records = [
        TurnRecord(one["prompt_token_ids"], one["completion_token_ids"], one["per_token_logps"]) for one in turns
    ]
    sequences, _ = _chain_to_sequences(records, "r", FORK_THRESHOLD)
    return [Row(one.input_ids, one.completion_mask) for one in sequences]


async def agentlightning(url: str, session: str, converse: Converse) -> list[Row]:
    await converse(f"{url}/proxy/rollout/{session}/attempt/0/mode/train/openai/v1", "none")
    async with aiohttp.ClientSession(url) as http:
        events = await _json(http.get(f"/api/rollouts/{session}/events?format=triplet"))
    return await asyncio.to_thread(_by_agentlightning, [one["data"] for one in events])


def _by_agentlightning(requests: Sequence[dict[str, Any]]) -> list[Row]:
    """Its adapter needs verl and no part of its server; it is loaded from its own environment."""
    python = peer_python("agentlightning", "agentlightning==1.0.2", (3, 12))
    assert python is not None
    (site,) = (python.parent.parent / "lib").glob("python3.*/site-packages")
    sys.path.append(str(site))
    try:
        from agentlightning.verl.agl_rollout_manager import CompletedRollout, Triplet  # noqa: PLC0415  # pyright: ignore
        from agentlightning.verl.rollout_adapter import RolloutAdapter  # noqa: PLC0415  # pyright: ignore
    finally:
        sys.path.remove(str(site))
    triplets = [
        Triplet(
            prompt={"token_ids": one["prompt_token_ids"]},
            response={"token_ids": one["response_token_ids"], "log_probs": one["response_log_probs"]},
            reward=None,
            metadata={},
        )
        for one in requests
    ]
    done = CompletedRollout(
        rollout_id="r", data_id="d", step=0, sample_idx_in_step=0, enqueue_time=0.0, final_reward=1.0, triplets=triplets
    )
    adapter = RolloutAdapter(
        max_prompt_length=LONGEST,
        max_response_length=LONGEST,
        device=torch.device("cpu"),
        pad_token_id=0,
        trace_aggregator_level="trajectory",
    )
    batch = adapter.get_train_data_batch([done])[0].batch
    rows: list[Row] = []
    for ids, attended, trained in zip(batch["input_ids"], batch["attention_mask"], batch["response_mask"], strict=True):
        mask = torch.cat([torch.zeros(len(ids) - len(trained), dtype=trained.dtype), trained])
        is_there = attended.bool()
        rows.append(Row(ids[is_there].tolist(), mask[is_there].tolist()))
    return rows


async def rllm(url: str, session: str, converse: Converse, num_calls: Callable[[], int]) -> list[Row]:
    await converse(f"{url}/sessions/{session}/v1", "none")
    async with aiohttp.ClientSession(url) as http:
        traces: list[Any] = []
        for _ in range(50):  # it writes in the background
            await _json(http.post("/admin/flush"))
            traces = await _json(http.get(f"/sessions/{session}/traces"))
            if len(traces) == num_calls():
                break
            await asyncio.sleep(0.1)
    return [
        Row(
            [*one["prompt_token_ids"], *one["completion_token_ids"]],
            [0] * len(one["prompt_token_ids"]) + [1] * len(one["completion_token_ids"]),
        )
        for one in traces
    ]


async def _json(asked: Any) -> Any:
    async with asked as response:
        assert response.status < 300, await response.text()
        return await response.json()


# -- the judge ---------------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    kept: int
    """Sampled tokens that some row trains behind the ids that the engine had read."""
    sampled: int
    strange: int
    """Trained tokens behind ids that the engine never read."""
    rows: int
    row_tokens: int


def judge(calls: Sequence[Call], rows: Sequence[Row]) -> Verdict:
    kept: set[tuple[int, int]] = set()
    strange = 0
    for row in rows:
        trained = {at for at, one in enumerate(row.mask) if one}
        for number, call in enumerate(calls):
            start = len(call.prompt_ids)
            if row.ids[:start] != call.prompt_ids:
                continue
            for at, token in enumerate(call.sampled_ids):
                if row.ids[start + at : start + at + 1] != [token]:
                    break
                if start + at in trained:
                    kept.add((number, at))
        true = {
            len(calls[number].prompt_ids) + at
            for number, at in kept
            if row.ids[: len(calls[number].prompt_ids) + at]
            == [*calls[number].prompt_ids, *calls[number].sampled_ids[:at]]
        }
        strange += len(trained - true)
    sampled = sum(len(call.sampled_ids) for call in calls)
    return Verdict(len(kept), sampled, strange, len(rows), sum(len(row.ids) for row in rows))


# -- everything --------------------------------------------------------------------------------------------------------

SYSTEMS = ("ours", "openenv", "trl", "agentlightning", "rllm")
LABELS = {
    "ours": "Gangline",
    "openenv": "OpenEnv 0.10.0",
    "trl": "TRL 1.16.0 behind it",
    "agentlightning": "Agent Lightning 1.0.2",
    "rllm": "rLLM's gateway 0.1.0",
}
Table = dict[tuple[str, str], Verdict]
"""By system and client."""


@asynccontextmanager
async def engine(replies: Script) -> AsyncGenerator[tuple[str, LoggedSampler]]:
    sampler = LoggedSampler(replies, load_tokenizer(qwen3_folder()))
    try:
        async with serving(create_app(sampler)) as url:
            yield url, sampler
    finally:
        await sampler.close()


def started(stack: ExitStack, name: str, requirement: str, program: str, version: tuple[int, int], url: str) -> str:
    python = peer_python(name, requirement, version)
    if python is None:
        raise RuntimeError(f"{requirement} could not be installed")
    port = free_port()
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    stack.enter_context(process(python, f"peers/{program}", url, port, folder, 1, port=port))
    return f"http://127.0.0.1:{port}"


async def measure(client: Client) -> dict[str, Verdict]:
    found: dict[str, Verdict] = {}
    async with engine(client.script) as (url, sampler):

        async def converse(at: str, key: str) -> None:
            sampler.calls.clear()
            await client.converse(at, key)

        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            async with running_node(Path(folder), url) as node:
                rows = await ours(node, converse)
                found["ours"] = judge(sampler.calls, rows)
            to_thread = asyncio.to_thread
            at = await to_thread(started, stack, "openenv", "openenv==0.10.0", "openenv_capture.py", (3, 10), url)
            rows, turns = await openenv(at, converse)
            found["openenv"] = judge(sampler.calls, rows)
            found["trl"] = judge(sampler.calls, by_trl(turns))
            at = await to_thread(
                started, stack, "agentlightning", "agentlightning==1.0.2", "agent_lightning.py", (3, 12), url
            )
            rows = await agentlightning(at, "s0", converse)
            found["agentlightning"] = judge(sampler.calls, rows)
            at = await to_thread(started, stack, "rllm", "rllm-model-gateway==0.1.0", "rllm_gateway.py", (3, 10), url)
            rows = await rllm(at, "s0", converse, lambda: len(sampler.calls))
            found["rllm"] = judge(sampler.calls, rows)
    return found


def run() -> dict[str, dict[str, Any]]:
    """Measure; returns figure name -> {value, unit, note}. A minute, without the installation of the peers."""
    table: Table = {}
    for client in CLIENTS:
        for system, verdict in asyncio.run(measure(client)).items():
            table[system, client.label] = verdict
            print(f"    {client.label}: {system} {verdict}", file=sys.stderr)
    PAGE.write_text(page(table), encoding="utf-8")
    figures: dict[str, dict[str, Any]] = {}
    for system in SYSTEMS:
        mine = [table[system, client.label] for client in CLIENTS]
        figures[f"captures.{system}.kept_share"] = {
            "value": round(sum(one.kept / one.sampled for one in mine) / len(mine), 4),
            "unit": "share",
            "note": f"{LABELS[system]}; eight clients, the least {min(one.kept / one.sampled for one in mine):.2f}",
        }
        figures[f"captures.{system}.rows"] = {
            "value": round(sum(one.rows for one in mine) / len(mine), 2),
            "unit": "rows",
            "note": f"a conversation of five calls; {sum(one.row_tokens for one in mine)} tokens in all eight",
        }
    return figures


def page(table: Table) -> str:
    """docs/reference/captures.md"""

    def cell(verdict: Verdict) -> str:
        share = f"{100 * verdict.kept / verdict.sampled:.0f} %, {verdict.rows}"
        return share if not verdict.strange else f"{share} ({verdict.strange} strange)"

    lines = [
        f"| {client.label} | " + " | ".join(cell(table[system, client.label]) for system in SYSTEMS) + " |"
        for client in CLIENTS
    ]
    tokens = {system: sum(table[system, client.label].row_tokens for client in CLIENTS) for system in SYSTEMS}
    return "\n".join(
        [
            "<!-- Made by `python bench/run.py captures`. -->\n",
            "# What captures keep\n",
            f"Measured on {datetime.now(UTC).date().isoformat()}. {_METHOD}\n",
            "| the client | " + " | ".join(LABELS[system] for system in SYSTEMS) + " |",
            "|---|" + "---|" * len(SYSTEMS),
            *lines,
            "| tokens of all rows | " + " | ".join(f"{tokens[system]:,}" for system in SYSTEMS) + " |",
            "",
            f"{_ROWS}\n",
        ]
    )


_METHOD = """Eight clients talk to one scripted engine through five captures: five calls, three of them
with a tool, two user turns, in Qwen3's tokenizer and template. A cell is the share of the sampled tokens that some row
trains behind the very ids that the engine had read, and the number of rows that this took. *Strange* are trained tokens
behind ids that the engine never read."""
_ROWS = """Each system's rows are made by its own code: OpenEnv's capture server (`/sessions/{id}/rollout`); its turns,
joined by TRL's asynchronous trainer with `fork_threshold_tokens` at its default of 1,024; Agent Lightning's server and
its adapter for verl at level `trajectory` (its default makes a row of each call); rLLM's gateway, which hands over
calls, here a row each. TRL takes small differences for context, and no longer trains what was sampled there. Each
further row costs a trainer the whole conversation before it once more."""
