"""Any conversation, any client, any template: what becomes a row is what the engine saw and sampled, each token once.

From placing to the audit, without sockets: a session over an engine that remembers what it was conditioned on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import Message, ModelCall, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.errors import EngineRefused
from gangline.domain.task import CaptureSpec
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.rows.audit import audit
from gangline.rows.builders.per_request import PerRequestBuilder
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from support.engines.families import FAMILIES, Family, FamilyEngine, Turn, families, family
from support.node.proxy import MemoryJournal
from support.training.agent_loop import checked_rows

Echo = Callable[[Message], Message]

NUM_EXAMPLES = 60

SHELL = ToolDefinition("shell", "Run.", {"type": "object", "properties": {"command": {"type": "string"}}})
OTHER = ToolDefinition("other", "Look.", {"type": "object", "properties": {"path": {"type": "string"}}})
MARKERS = ["<|im_end|>", "<|eot_id|>", "<|end|>", "<|user|>", "</tool_call>", "<|im_end|>\n<|im_start|>user\nx"]

_texts = st.one_of(
    st.sampled_from(["Hello.", "the fishing command", "a  b\n\n1", " x ", "caf\u00e9 \u65e5\u672c \U0001f600", "\n"]),
    st.sampled_from(MARKERS).map(lambda marker: f"say {marker} now"),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=12),
)
_arguments = st.sampled_from(
    ['{"command": "ls"}', '{"command":"ls -l"}', '{"command": "cat caf\\u00e9"}', '{ "command" : "x",  "n": 1.0 }']
    + [json.dumps({"command": f"grep '{marker}'"}) for marker in MARKERS[:3]]
)


# -- clients ---------------------------------------------------------------------------------------------------------


def _parts(message: Message, change: Callable[[object], object | None]) -> Message:
    changed = [change(part) for part in message.parts]
    return Message("assistant", tuple(part for part in changed if part is not None))  # pyright: ignore


def _as_it_is(message: Message) -> Message:
    return message


def _without_thinking(message: Message) -> Message:
    return _parts(message, lambda part: None if isinstance(part, Thinking) else part)


def _trimmed(message: Message) -> Message:
    return _parts(message, lambda p: msgspec.structs.replace(p, text=p.text.strip()) if isinstance(p, Text) else p)


def _rewritten(message: Message) -> Message:
    def rewrite(part: object) -> object:
        if not isinstance(part, ToolCall):
            return part
        return msgspec.structs.replace(part, arguments=json.dumps(json.loads(part.arguments), indent=1))

    return _parts(message, rewrite)


def _without_ids(message: Message) -> Message:
    return _parts(message, lambda p: msgspec.structs.replace(p, call_id="c") if isinstance(p, ToolCall) else p)


def _repaired(message: Message) -> Message:
    return Message("assistant", (Text("Repaired."), *(p for p in message.parts if isinstance(p, ToolCall))))


ECHOES: tuple[Echo, ...] = (_as_it_is, _without_thinking, _trimmed, _rewritten, _without_ids, _repaired)


# -- models ----------------------------------------------------------------------------------------------------------


@st.composite
def turns(draw: st.DrawFn, of: Family, has_tools: bool) -> Turn:
    calls_tool = has_tools and draw(st.booleans())
    calls = draw(st.lists(_arguments, min_size=1, max_size=2 if of.parallel_calls else 1)) if calls_tool else []
    turn = Turn(
        text="" if calls_tool else draw(_texts),
        thinking=draw(st.sampled_from(["", "Hm.", "List it first.\n\nThen read."])) if of.has_thinking else "",
        calls=tuple(("shell", arguments) for arguments in calls),
        split=draw(st.booleans()),
    )
    how = draw(st.sampled_from(["usual"] * 6 + ["cut", "stop string", "empty", "no log-probs", "other end"]))
    if how == "cut":
        return replace(turn, finish="length", calls=())
    if how == "stop string":
        return replace(turn, stop_reason="STOP", calls=(), text=turn.text or "x")
    if how == "empty":
        return replace(turn, raw="", text="", thinking="", calls=())
    if how == "other end" and of.name == "llama31":
        return replace(turn, end="<|eom_id|>")
    return replace(turn, logprob=float("nan")) if how == "no log-probs" else turn


# -- conversations ---------------------------------------------------------------------------------------------------


@dataclass
class Client:
    """An agent that continues, goes back, asks alongside, and changes its tools."""

    data: st.DataObject
    engine: FamilyEngine
    session: ModelSession
    echo: Echo
    tools: tuple[ToolDefinition, ...]
    history: list[Message] = field(default_factory=lambda: [Message("user", (Text("Go."),))])
    earlier: list[list[Message]] = field(default_factory=list[list[Message]])

    async def step(self) -> None:
        kind = self.data.draw(st.sampled_from(["on"] * 6 + ["back", "beside", "tools", "choices", "again"]), "step")
        if kind == "back" and self.earlier:
            self.history = list(self.data.draw(st.sampled_from(self.earlier)))
            return
        if kind == "tools" and self.tools:
            self.tools = self.data.draw(st.sampled_from([(SHELL,), (SHELL, OTHER)]))
        history = [Message("user", (Text("Give a title."),))] if kind == "beside" else self.history
        message = await self._ask(history, 2 if kind == "choices" else 1)
        if message is None or kind in ("beside", "again"):
            return
        self.earlier.append(list(self.history))
        self.history += [self.echo(message), *self._follows(message)]

    async def _ask(self, history: Sequence[Message], num_choices: int) -> Message | None:
        turn = self.data.draw(turns(self.engine.family, bool(self.tools)), "turn")
        self.engine.turns = [turn]
        call = ModelCall(
            dialect="d", model="m", messages=tuple(history), tools=self.tools, num_choices=num_choices,
            stream=self.data.draw(st.booleans()),
        )  # fmt: skip
        try:
            reply = await self.session.start_call(call).reply()
        except EngineRefused:  # some templates refuse some texts
            return None
        return reply.choices[-1].message

    def _follows(self, message: Message) -> list[Message]:
        calls = [part for part in message.parts if isinstance(part, ToolCall)]
        outputs = [self.data.draw(_texts, "output") for _ in calls]
        follows = [
            Message("tool", (ToolResult(call.call_id, (Text(output),)),))
            for call, output in zip(calls, outputs, strict=True)
        ]
        if not calls or self.data.draw(st.integers(0, 5)) == 0:
            follows.append(Message("user", (Text(self.data.draw(_texts, "user")),)))
        return follows


async def _converse(data: st.DataObject, of: Family) -> tuple[FamilyEngine, list[Completion]]:
    engine = FamilyEngine(of, [Turn()], takes_prompt_ids=data.draw(st.sampled_from([True, True, True, False])))
    journal = MemoryJournal()
    thinking = data.draw(st.sampled_from(["follow_template", "retain"]), "policy")
    spec = SessionSpec(session_id="s1", attempt=1, key="key", capture=CaptureSpec(thinking=thinking))
    session = ModelSession(spec, engine, journal)
    client = Client(
        data=data,
        engine=engine,
        session=session,
        echo=data.draw(st.sampled_from(ECHOES), "client"),
        tools=(SHELL,) if of.has_tools and data.draw(st.booleans()) else (),
    )
    for _ in range(data.draw(st.integers(2, 7), "steps")):
        await client.step()
    await session.fence("done")
    return engine, journal.completions


@families
@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_rows_are_what_the_engine_saw_and_sampled_whatever_the_client_does(name: str, data: st.DataObject) -> None:
    engine, completions = asyncio.run(_converse(data, family(name)))
    checked_rows(completions, engine.seen)
    tree = CompletionTree(completions)
    for completion, seen in zip(completions, engine.seen, strict=True):
        certificate = completion.certificate
        assert tree.prompt_ids(completion).tolist() == seen.prompt_ids
        assert completion.sampled_ids.tolist() == seen.sampled_ids
        assert (certificate.context == "diverged") == (certificate.cause is not None)
        if engine.takes_prompt_ids and completion.parent_id is not None:
            # Whatever was not stitched says why.
            assert (certificate.prompt_source == "stitched") != (certificate.fallback is not None)
        if certificate.prompt_source == "stitched":
            assert certificate.context == "exact"


@pytest.mark.parametrize(
    "builder", [PerRequestBuilder(), PrefixMergingBuilder(PrefixMergingConfig(on_divergence="splice"))]
)
@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_builder_passes_the_audit_on_them(builder: PrefixMergingBuilder, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(FAMILIES)), "family")
    _, completions = asyncio.run(_converse(data, family(name)))
    built = builder.build(CompletionTree(completions), session_id="s1", task_id="t1")
    assert audit(built, completions).violations == ()
