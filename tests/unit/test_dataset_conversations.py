"""The main conversation of sessions shaped as real harnesses shape theirs, and its OpenAI form."""

from __future__ import annotations

import pytest

from gangline.domain.conversation import Image, Message, Text, ToolCall, ToolDefinition, ToolResult, message_text
from gangline.rows.conversations.chat import chat_messages, chat_tools, conversation_digest
from gangline.rows.conversations.conversation import Conversation, main_conversation
from support.engines.conversations import Talk, result, said, system, user
from support.store.recorded import TOOLS, work

SYSTEM = system("You are an agent. It is 2026-11-21 10:00.")
ASK = user("Fix the failing test in the parser module.")
SUMMARY = "So far: the parser drops the last token; parser.py line 40 was changed; one test still fails."


def found(talk: Talk) -> Conversation:
    conversation = main_conversation(talk.tree)
    assert conversation is not None
    return conversation


def texts(talk: Talk) -> list[str]:
    return [message_text(message) for message in found(talk).messages]


def test_it_is_the_whole_history_and_ends_with_the_last_turn() -> None:
    talk = Talk()
    history = work(talk, 2, SYSTEM, ASK)
    conversation = found(talk)
    assert list(conversation.messages) == history
    assert (conversation.num_prompt_messages, conversation.num_turns, conversation.tools) == (2, 3, TOOLS)
    assert conversation.last.completion_id == list(talk.tree)[-1].completion_id
    assert conversation.num_tokens == talk.tree.num_context_ids(conversation.last.completion_id)


def test_side_calls_and_calls_that_were_given_up_are_left_out() -> None:
    talk = Talk()
    talk.turn((system("You write titles."), user("Title for: fix")), said("Parser"))
    history = work(talk, 1, SYSTEM, ASK, ending="")
    talk.answer(talk.ask(*history, tools=TOOLS), said("Half an ans"), status="aborted")
    talk.turn(history, said("Done."), tools=TOOLS)
    assert texts(talk) == [message_text(one) for one in (*history, said("Done."))]


def test_of_several_choices_the_first_is_the_end() -> None:
    talk = Talk()
    talk.answer(talk.ask(SYSTEM, ASK), said("One."), said("Two."))
    assert texts(talk)[-1] == "One."


@pytest.mark.parametrize("in_the_conversation", [True, False], ids=["asked in the conversation", "asked aside"])
def test_a_conversation_is_joined_over_a_compaction(in_the_conversation: bool) -> None:
    talk = Talk()
    before = work(talk, 2, SYSTEM, ASK, ending="")
    if in_the_conversation:
        talk.turn([*before, user("Summarise.")], said(SUMMARY), tools=TOOLS)
    else:
        talk.turn([system("You summarise."), *before[1:], user("Summarise.")], said(SUMMARY))
    opening = (system("You are an agent. It is 2026-11-21 10:31."), ASK, user(f"So far:\n\n{SUMMARY}\nGo on."))
    after = work(talk, 1, *opening, word="later")
    assert texts(talk) == [message_text(one) for one in (*before, *after[2:])]
    assert found(talk).num_turns == 4


def test_two_compactions_are_joined() -> None:
    talk, whole, opening = Talk(), list[Message](), (SYSTEM, ASK)
    for part in range(3):
        history = work(talk, 2, *opening, word=f"part {part}", ending="")
        whole += history if part == 0 else history[2:]
        summary = f"Part {part}: {SUMMARY}"
        if part < 2:
            talk.turn([*history, user("Summarise.")], said(summary), tools=TOOLS)
            opening = (SYSTEM, ASK, user(f"So far:\n\n{summary}\nGo on."))
    whole_texts = [message_text(one) for one in whole]
    assert texts(talk) == whole_texts[:-1]  # it ends with a turn, not with its tool's output


def test_a_client_that_drops_old_turns_loses_none_here() -> None:
    talk = Talk()
    history = work(talk, 3, SYSTEM, ASK, ending="")
    talk.turn([SYSTEM, ASK, *history[6:]], said("Done."), tools=TOOLS)
    assert texts(talk) == [message_text(one) for one in (*history, said("Done."))]


def test_a_client_that_clears_old_results_shows_them_as_they_were_first() -> None:
    talk = Talk()
    history = work(talk, 2, SYSTEM, ASK, ending="")
    call = history[2].parts[-1]
    assert isinstance(call, ToolCall)
    talk.turn([*history[:3], result(call.call_id, "[cleared]"), *history[4:]], said("Done."), tools=TOOLS)
    assert texts(talk) == [message_text(one) for one in (*history, said("Done."))]


def test_a_session_without_an_answer_has_none() -> None:
    talk = Talk()
    talk.answer(talk.ask(SYSTEM, ASK), said("Hal"), status="aborted")
    assert main_conversation(talk.tree) is None
    assert main_conversation(()) is None


def test_messages_are_openais() -> None:
    call = ToolCall("call_1", "run", '{"command": "ls"}')
    talk = (
        Message("developer", (Text("Be brief."),)),
        Message("user", (Text("Look"), Text("here"))),
        said("", call, thinking="I look."),
        Message("user", (ToolResult("call_1", (Text("a.py"),), is_error=True), Text("Go on."))),
        said("Done."),
    )
    empty = dict.fromkeys(("reasoning_content", "tool_calls", "tool_call_id", "name"))
    function = {"name": "run", "arguments": '{"command": "ls"}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    assert chat_messages(talk) == [
        {**empty, "role": "system", "content": "Be brief."},
        {**empty, "role": "user", "content": "Look\nhere"},
        {**empty, "role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": calls},
        {**empty, "role": "tool", "content": "Error: a.py", "tool_call_id": "call_1"},
        {**empty, "role": "user", "content": "Go on."},
        {**empty, "role": "assistant", "content": "Done."},
    ]
    assert chat_tools([ToolDefinition("run", "Run it.")]) == [
        {"type": "function", "function": {"name": "run", "description": "Run it."}}
    ]


def test_the_digest_ignores_ids_of_calls_and_nothing_else() -> None:
    def digest(call_id: str, command: str) -> bytes:
        call = ToolCall(call_id, "run", command)
        return conversation_digest(chat_messages((ASK, said("ok", call), result(call_id, "out"))))

    assert digest("a", "ls") == digest("b", "ls")
    assert digest("a", "ls") != digest("a", "pwd")


def test_an_image_is_seen() -> None:
    from gangline.tasks.datasets.selection import Recorded, Selection, judged
    from support.store.recorded import session_of

    talk = Talk()
    talk.turn((Message("user", (Image("https://a/b.png"),)),), said("A cat."))
    made = session_of(talk.tree, "t", 0, 1.0)
    assert judged(Selection(), Recorded(made, None), found(talk)).why == "has images"
