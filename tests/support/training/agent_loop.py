"""An agent on the Chat route that echoes what it was told, edited as a client would; and what is true of its rows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.trajectory import Trajectory
from gangline.rows.audit import audit
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder
from support.engines.families import Conditioned, FamilyEngine, Turn, family
from support.node.proxy import Proxied, proxied_engine

Edit = Callable[[dict[str, Any]], dict[str, Any]]
Kind = tuple[str, str, str | None]

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
FIRST: Kind = ("engine", "first", None)
STITCHED: Kind = ("stitched", "exact", None)


def as_it_is(message: dict[str, Any]) -> dict[str, Any]:
    return message


@dataclass
class Agent:
    """`messages` is the whole history that it sends."""

    running: Proxied
    engine: FamilyEngine
    edit: Edit = as_it_is
    output: str = "out"
    tools: Sequence[dict[str, Any]] | None = None
    messages: list[dict[str, Any]] = field(default_factory=lambda: [{"role": "user", "content": "What is here?"}])

    @property
    def completions(self) -> list[Completion]:
        return self.running.journal.completions

    @property
    def kinds(self) -> list[Kind]:
        return [(c.certificate.prompt_source, c.certificate.context, c.certificate.cause) for c in self.completions]

    async def post(self, **fields: Any) -> tuple[int, Any]:
        body = {"model": "m", "messages": self.messages} | ({"tools": self.tools} if self.tools else {}) | fields
        headers = {"Authorization": f"Bearer {self.running.session.key}"}
        url = f"{self.running.base_url}/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as client, client.post(url, json=body) as response:
            is_stream = body.get("stream")
            return response.status, await response.text() if is_stream else await response.json()

    async def call(self, **fields: Any) -> dict[str, Any]:
        """Ask once, and take the (edited) answer into the history, with results of its calls."""
        status, answer = await self.post(**fields)
        assert status == 200, answer
        message = self.edit(answer["choices"][0]["message"])
        self.messages.append(message)
        for call in message.get("tool_calls") or ():
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self.output})
        return message

    async def run(self, num_calls: int, then: str | None = None, **fields: Any) -> list[Completion]:
        """`then` is said by the user before each further call, where no tool was called."""
        for number in range(num_calls):
            if number and then is not None and self.messages[-1]["role"] == "assistant":
                self.messages.append({"role": "user", "content": then})
            await self.call(**fields)
        return self.completions

    def suffix(self, number: int) -> str:
        """The text that call `number` has over its parent's context."""
        return self.engine.family.tokenizer().decode(self.completions[number].prompt_suffix_ids.tolist())

    def rows(self) -> Trajectory:
        """Built, audited, and held against what the engine saw."""
        return checked_rows(self.completions, self.engine.seen)


@asynccontextmanager
async def agent(name: str, turns: Sequence[Turn], **options: Any) -> AsyncGenerator[Agent, None]:
    """`options`: of the agent, of the engine (`takes_prompt_ids`, `renders` ...), the rest of the session."""
    of_engine = {
        key: options.pop(key)
        for key in ("takes_prompt_ids", "renders", "template", "coerces_arguments")
        if key in options
    }
    of_agent = {key: options.pop(key) for key in ("edit", "output", "tools", "messages") if key in options}
    engine = FamilyEngine(family(name), turns, **of_engine)
    async with proxied_engine(engine, **options) as running:
        yield Agent(running, engine, **of_agent)


def checked_rows(completions: Sequence[Completion], seen: Sequence[Conditioned]) -> Trajectory:
    """Rows of `prefix_merging`, in which three truths hold: tokens, contexts, exactly once.

    seen: what the engine was conditioned on and sampled, in the order of the records.
    """
    built = PrefixMergingBuilder().build(CompletionTree(completions), session_id="s1", task_id="t1")
    assert audit(built, completions).violations == ()
    assert len(seen) == len(completions)
    truth = {completion.completion_id: one for completion, one in zip(completions, seen, strict=True)}
    spans = [span.completion_id for trace in built.traces for span in trace.spans]
    assert sorted(spans) == sorted(truth)
    for trace in built.traces:
        row = np.concatenate([trace.prompt_ids, trace.response_ids]).tolist()
        num_prompt = len(trace.prompt_ids)
        in_turns = np.zeros(len(trace.response_ids), bool)
        for span in trace.spans:
            one = truth[span.completion_id]
            assert row[: num_prompt + span.start] == one.prompt_ids
            assert trace.response_ids[span.start : span.end].tolist() == one.sampled_ids
            in_turns[span.start : span.end] = True
            if trace.loss_mask[span.start : span.end].any():
                assert trace.loss_mask[span.start : span.end].all()
                wanted = np.array(one.logprobs, np.float32)
                assert np.array_equal(trace.response_logprobs[span.start : span.end], wanted)
        assert not trace.loss_mask[~in_turns].any()
    return built
