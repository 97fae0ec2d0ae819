"""Drift of a call: its first token or message that differs, and what was recorded there."""

from __future__ import annotations

import pytest

from gangline.domain.completion import Lineage
from gangline.domain.conversation import Message, Text
from gangline.server.web.drift import call_drift, drifts
from gangline.server.web.outline import OpenedSession, open_session
from gangline.server.web.tokens import recorded_texts
from support.page.sessions import Talk, working_session


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def opened(talk: Talk) -> OpenedSession:
    return open_session(talk.result(0.0))


def test_the_first_token_that_differs_is_in_an_earlier_calls_reply() -> None:
    talk = Talk()
    first = talk.call((user("Go."),), (Text("one two"),), prompt=" Go.", sampled=" one two")
    second = talk.call((user("On."),), (Text("three"),), prompt=" On.", sampled=" three", after=first)
    talk.call((user("Stop."),), (Text("four"),), prompt=" 2 On. three", sampled=" four", after=second, diverged_at=2)
    session = opened(talk)
    drift = call_drift(session, 2, recorded_texts(session.calls))
    assert drift.tokens is not None
    assert (drift.tokens.first, drift.tokens.in_call, drift.tokens.is_sampled) == (2, 0, True)
    assert drift.tokens.num_context_ids == 5
    go, on, two = (int(talk.ids(word)[0]) for word in (" Go.", " On.", " 2"))
    assert drift.tokens.alike.text == f"[{go}] one", "an id whose text nobody recorded is shown as the id"
    assert drift.tokens.recorded.text == f" two[{on}] three"
    assert drift.tokens.prompted.text == f"[{two}][{on}] three"
    assert (drift.cause, drift.parent, drift.prompt_source, drift.change) == ("bpe_merge", 1, "engine", None)
    assert (drift.num_known_messages, drift.sent) == (4, (user("Stop."),))
    assert [drifts(line) for line in session.outline.calls] == [False, False, True]


def test_long_stretches_are_cut_and_counted() -> None:
    talk = Talk()
    words = "".join(f" w{index}" for index in range(300))
    first = talk.call((user(words),), (Text("ok"),), prompt=words, sampled=" ok")
    talk.call((user("Go."),), (Text("ok"),), prompt=words[:500], sampled=" ok", after=first, diverged_at=100)
    drift = call_drift(opened(talk), 1, {})
    assert drift.tokens is not None
    stretches = (drift.tokens.alike, drift.tokens.recorded, drift.tokens.prompted)
    assert [(len(one.ids), one.num_left_out) for one in stretches] == [
        (16, 84),
        (64, 301 - 164),
        (64, len(talk.ids(words[:500])) - 64),
    ]


def test_a_changed_message_is_shown_as_it_was_and_as_it_was_sent() -> None:
    talk = Talk()
    first = talk.call((user("One."),), (Text("ok"),), prompt=" One.", sampled=" ok")
    edited = Lineage(relation="changed", origin_id=first.completion_id, cause="history_edited", first_change=0)
    sent = (user("Two."), Message("assistant", (Text("ok"),)), user("Go on."))
    talk.call(sent, (Text("yes"),), prompt=" Two. ok Go on.", sampled=" yes", lineage=edited)
    talk.call((user("More."),), (Text("yes"),), prompt=" More.", sampled=" yes", after=talk.calls[1])
    drift = call_drift(opened(talk), 1, {})
    assert drift.change is not None
    assert (drift.change.origin, drift.change.index) == (0, 0)
    assert (drift.change.recorded, drift.change.sent) == (user("One."), user("Two."))
    assert (drift.cause, drift.tokens, drift.sent) == ("history_edited", None, sent)


def test_an_exact_call_has_no_drift() -> None:
    session = open_session(working_session())
    drift = call_drift(session, 1, {})
    assert (drift.tokens, drift.change, drift.cause) == (None, None, None)
    with pytest.raises(IndexError):
        call_drift(session, 5, {})
