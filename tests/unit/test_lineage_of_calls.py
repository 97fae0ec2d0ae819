"""How a call came out of an earlier one: what its record says alongside its parent."""

from __future__ import annotations

from typing import Any

import pytest

from gangline.domain.completion import Lineage
from gangline.domain.conversation import Message, ToolCall, ToolDefinition
from gangline.node.capture.ledger import Ledger
from gangline.node.capture.meaning import VolatileText
from gangline.node.capture.placing import PlaceIndex
from support.engines.conversations import Talk, arguments, restored, result, said, system, user
from support.node.proxy import MemoryJournal

SYSTEM = system("You are an agent.")
ASK, MORE = user("Fix the bug."), user("And the other one?")
CALL = ToolCall("call_k1", "run", arguments(command="ls"))
FIRST = said("Let me look around first.", CALL)
SEEN = result("call_k1", "main.py")
DONE = said("The bug in main.py is fixed.")


def _talk() -> Talk:
    """Two turns: a tool call, then an answer."""
    talk = Talk()
    talk.turn((SYSTEM, ASK), FIRST)
    talk.turn((SYSTEM, ASK, FIRST, SEEN), DONE)
    return talk


def _lineage(talk: Talk, *messages: Message, **fields: Any) -> tuple[str | None, Lineage]:
    completion = talk.turn(messages, said("next"), **fields)
    return completion.parent_id, completion.lineage


def test_a_call_that_goes_on_is_a_continuation_and_a_second_one_a_branch() -> None:
    talk = _talk()
    history = (SYSTEM, ASK, FIRST, SEEN, DONE)
    assert [one.lineage.relation for one in talk.tree] == ["root", "continuation"]
    assert _lineage(talk, *history, MORE) == (
        "c1-000002",
        Lineage(relation="continuation", origin_id="c1-000002"),
    )
    assert _lineage(talk, *history, user("Or this?")) == (
        "c1-000002",
        Lineage(relation="branch", origin_id="c1-000002"),
    )


def test_of_two_calls_made_at_once_the_first_to_be_answered_goes_on() -> None:
    talk = _talk()
    history = (SYSTEM, ASK, FIRST, SEEN, DONE)
    slow, fast = talk.ask(*history, MORE), talk.ask(*history, user("Or this?"))
    assert talk.answer(fast, said("a"))[0].lineage.relation == "continuation"
    assert talk.answer(slow, said("b"))[0].lineage.relation == "branch"


def test_calls_with_one_prompt_are_siblings_and_choices_of_one_call_are_not() -> None:
    talk = _talk()
    prompt = (SYSTEM, ASK, FIRST, SEEN, DONE, MORE)
    choices = talk.answer(talk.ask(*prompt), said("one"), said("two"))
    assert [choice.lineage.relation for choice in choices] == ["continuation", "continuation"]
    assert _lineage(talk, *prompt) == ("c1-000002", Lineage(relation="sibling", origin_id="c1-000004"))


def test_a_prompt_asked_again_after_an_abort_is_a_retry() -> None:
    talk = Talk()
    talk.answer(talk.ask(SYSTEM, ASK), said("Let me"), status="aborted")
    assert _lineage(talk, SYSTEM, ASK) == (None, Lineage(relation="retry", origin_id="c1-000001"))


def test_a_partial_reply_that_the_client_kept_is_a_truncated_turn() -> None:
    talk = Talk()
    talk.answer(talk.ask(SYSTEM, ASK), said("Let me"), status="aborted")
    assert _lineage(talk, SYSTEM, ASK, said("Let me"), MORE) == (
        None,
        Lineage(relation="changed", origin_id="c1-000001", cause="truncated_turn"),
    )


@pytest.mark.parametrize(
    ("history", "parent_id", "first_change"),
    [
        ((SYSTEM, ASK, FIRST, result("call_k1", "(cut)"), DONE), "c1-000001", 3),
        ((SYSTEM, user("Fix the bug!"), FIRST, SEEN, DONE), None, 1),
        ((SYSTEM, ASK, said("Looking.", CALL), SEEN, DONE), None, 2),
        ((SYSTEM, ASK, FIRST, SEEN, said("It is done.")), "c1-000001", 4),
        ((SYSTEM, ASK, DONE), None, 2),
        ((SYSTEM, FIRST, SEEN, DONE), None, 1),
    ],
    ids=["tool result cut", "user edited", "turn edited", "last turn edited", "turn taken out", "front taken out"],
)
def test_an_edited_history_names_the_completion_it_would_have_continued(
    history: tuple[Message, ...], parent_id: str | None, first_change: int
) -> None:
    assert _lineage(_talk(), *history, MORE) == (
        parent_id,
        Lineage(relation="changed", origin_id="c1-000002", cause="history_edited", first_change=first_change),
    )


@pytest.mark.parametrize(
    ("first", "fields", "cause", "first_change"),
    [
        (system("You are a poet."), {}, "system_changed", 0),
        (SYSTEM, {"tools": (ToolDefinition("run"),)}, "tools_changed", None),
        (SYSTEM, {"template_kwargs": {"enable_thinking": False}}, "template_changed", None),
        (SYSTEM, {"model": "n"}, "model_changed", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_stands_before_the_messages_is_told_apart(
    first: Message, fields: dict[str, Any], cause: Any, first_change: int | None
) -> None:
    for talk in (_talk(), restored(_talk().tree)):
        assert _lineage(talk, first, ASK, FIRST, SEEN, DONE, MORE, **fields) == (
            None,
            Lineage(relation="changed", origin_id="c1-000002", cause=cause, first_change=first_change),
        )


def test_a_system_message_that_came_or_went_is_a_changed_system() -> None:
    origin, reminder = {"relation": "changed", "origin_id": "c1-000002", "cause": "system_changed"}, system("Hurry.")
    history = (ASK, FIRST, SEEN, DONE, MORE)
    assert _lineage(_talk(), *history) == (None, Lineage(**origin))
    assert _lineage(_talk(), SYSTEM, reminder, *history) == (None, Lineage(**origin, first_change=1))


def test_a_first_call_under_another_system_text_is_a_root() -> None:
    assert _lineage(_talk(), system("You write titles."), ASK) == (None, Lineage())


def test_a_reply_that_is_said_by_chance_makes_no_origin() -> None:
    talk = Talk()
    talk.turn((SYSTEM, ASK), said("OK"))
    assert _lineage(talk, system("You classify."), user("Is it late?"), said("OK"), user("Is it dark?")) == (
        None,
        Lineage(),
    )


def test_a_reply_that_the_client_begins_is_no_echo() -> None:
    talk = _talk()
    assert _lineage(talk, SYSTEM, ASK, said("{")) == (None, Lineage())


def test_after_a_change_the_conversation_goes_on_from_the_changed_call() -> None:
    talk = _talk()
    changed = (SYSTEM, user("Fix the bug!"), FIRST, SEEN, DONE, MORE)
    third = talk.turn(changed, said("Fixed as well."))
    assert third.lineage.relation == "changed"
    assert _lineage(talk, *changed, said("Fixed as well."), user("Thanks")) == (
        "c1-000003",
        Lineage(relation="continuation", origin_id="c1-000003"),
    )


def _dated(time: str) -> Message:
    return system(f"You are an agent.\nThe current time is 2026-11-21 {time}.\nBe brief.")


def test_volatile_system_text_keeps_the_conversation_and_the_first_text_is_pinned() -> None:
    talk = Talk()
    talk.turn((_dated("10:00:01"), ASK), FIRST)
    place = talk.ask(_dated("10:00:09"), ASK, FIRST, SEEN).place
    assert (place.parent_id, place.num_shared) == ("c1-000001", 3)
    assert place.pinned == ((0, _dated("10:00:01")),)
    assert talk.ask(_dated("10:00:01"), ASK, FIRST, SEEN).place.pinned == ()


def test_what_is_volatile_is_the_tasks_word() -> None:
    talk = Talk(Ledger("s", 1, MemoryJournal(), volatile=VolatileText([r"mood: \w+"])))
    talk.turn((system("mood: good 10:00"), ASK), FIRST)
    assert talk.ask(system("mood: bad 10:00"), ASK, FIRST, SEEN).place.parent_id == "c1-000001"
    lineage = talk.ask(system("mood: bad 10:01"), ASK, FIRST, SEEN).place.lineage
    assert (lineage.cause, lineage.origin_id) == ("system_changed", "c1-000001")


def test_text_of_a_user_is_never_volatile() -> None:
    talk = Talk()
    talk.turn((SYSTEM, user("It is 10:00.")), FIRST)
    assert talk.ask(SYSTEM, user("It is 10:01."), FIRST, SEEN).place.parent_id is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x-anthropic-billing-header: cch=1f; v=2\nYou", "x-anthropic-billing-header: cch=2;\nYou"),
        ("Today's date: Saturday, 21 November 2026\nYou", "Today's date: Sunday, 22 November 2026\nYou"),
        ("now 2026-11-21T10:00:00.123Z", "now 2026-11-22T11:00:00+01:00"),
        ("at 9:59 PM go", "at 10:00 PM go"),
    ],
)
def test_the_usual_rules_leave_out_billing_lines_dates_and_times(one: str, other: str) -> None:
    rules = VolatileText()
    assert rules.without(one) == rules.without(other)
    assert rules.found_in(system(one))
    assert not rules.found_in(user(one))


def test_a_restored_index_tells_what_the_lost_one_told() -> None:
    talk = _talk()
    talk.answer(talk.ask(SYSTEM, ASK, FIRST, SEEN, DONE, MORE), said("Let"), status="aborted")
    index = PlaceIndex(talk.tree)
    for completion in talk.tree:
        index.restore(completion)
    call = talk.ask(SYSTEM, ASK, FIRST, result("call_k1", "x"), DONE, MORE).call
    assert index.place(call) == talk.ledger.index_of(None).place(call)
    again = restored(talk.tree)
    assert _lineage(again, SYSTEM, ASK, FIRST, SEEN, DONE, MORE)[1].relation == "retry"
