"""Ids of calls: ours go to the client, the engine's or the model's own go back to where they came from."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gangline.domain.conversation import Message, ModelCall, Text, ToolCall, ToolResult
from gangline.domain.node_views import TemplateFacts
from gangline.models.engines.contract import EngineReply, EngineRequest
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from support.engines.families import FamilyEngine, Turn, family
from support.engines.pooled import pooled
from support.node.proxy import MemoryJournal

PRINTS = TemplateFacts(prints_call_ids=True, call_ids="any")
ASKED = Message("user", (Text("look"),))


class Remembers(FamilyEngine):
    asked: list[tuple[Message, ...]]

    async def chat(self, request: EngineRequest) -> EngineReply:
        self.asked = [*getattr(self, "asked", []), request.call.messages]
        return await super().chat(request)


def ids(messages: Sequence[Message]) -> list[str]:
    return [part.call_id for message in messages for part in message.parts if isinstance(part, (ToolCall, ToolResult))]


async def answered(session: ModelSession, messages: tuple[Message, ...], *, stream: bool = False) -> Message:
    call = ModelCall(dialect="openai_chat", model="m", messages=messages, stream=stream)
    return (await session.start_call(call).reply()).choices[0].message


def results(reply: Message) -> Message:
    calls = [part for part in reply.parts if isinstance(part, ToolCall)]
    return Message("tool", tuple(ToolResult(call.call_id, (Text("out"),)) for call in calls))


TURNS = [Turn(calls=(("shell", "{}"), ("shell", "{}"))), Turn(text="done")]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_is_sent_its_own_ids_and_the_client_and_the_record_have_ours(stream: bool) -> None:
    engine, journal = Remembers(family("qwen3"), TURNS, template=PRINTS), MemoryJournal()
    session = ModelSession(SessionSpec(session_id="s", attempt=1, key="k"), await pooled(engine), journal)
    reply = await answered(session, (ASKED,), stream=stream)
    await answered(session, (ASKED, reply, results(reply)), stream=stream)
    await session.fence("over")
    assert ids(engine.asked[1]) == ["engine-0", "engine-1"] * 2
    assert all(one.startswith("call_") for one in ids([reply]))
    first, second = journal.completions
    assert first.metadata["engine_call_ids"] == dict(zip(ids([reply]), ["engine-0", "engine-1"], strict=True))
    assert ids([first.response]) == ids([reply]) == ids(second.new_messages)
    assert (second.parent_id, second.certificate.context) == (first.completion_id, "exact")


async def test_a_session_that_goes_on_from_its_journal_still_knows_them() -> None:
    engine, journal = Remembers(family("qwen3"), TURNS, template=PRINTS), MemoryJournal()
    spec = SessionSpec(session_id="s", attempt=1, key="k")
    session = ModelSession(spec, await pooled(engine), journal)
    reply = await answered(session, (ASKED,))
    await session.fence("the node died")
    again = ModelSession(spec, await pooled(engine), journal, completions=list(journal.completions))
    await answered(again, (ASKED, reply, results(reply)))
    await again.fence("over")
    assert ids(engine.asked[-1]) == ["engine-0", "engine-1"] * 2


async def test_ids_that_the_session_did_not_give_go_as_they_came() -> None:
    engine = Remembers(family("qwen3"), [Turn(text="done")], template=PRINTS)
    session = ModelSession(SessionSpec(session_id="s", attempt=1, key="k"), await pooled(engine), MemoryJournal())
    foreign = Message("assistant", (ToolCall("toolu_1", "shell", "{}"),))
    await answered(session, (ASKED, foreign, results(foreign)))
    await session.fence("over")
    assert ids(engine.asked[0]) == ["toolu_1", "toolu_1"]


async def test_where_no_prompt_shows_ids_nothing_is_kept_or_changed() -> None:
    engine, journal = Remembers(family("qwen3"), TURNS, template=TemplateFacts(prints_call_ids=False)), MemoryJournal()
    session = ModelSession(SessionSpec(session_id="s", attempt=1, key="k"), await pooled(engine), journal)
    reply = await answered(session, (ASKED,))
    await answered(session, (ASKED, reply, results(reply)))
    await session.fence("over")
    assert ids(engine.asked[1]) == ids([reply]) * 2
    assert "engine_call_ids" not in journal.completions[0].metadata
