"""Groups: whole or not, worth training on or not, fresh or not; and the buffer that keeps them."""

from __future__ import annotations

import logging
import math
import re
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest

from gangline.domain.completion import Certificate, Constraint, LogprobKind, VersionSpan
from gangline.domain.conversation import SamplingParams
from gangline.domain.errors import EvaluatorError, HarnessError, InvalidGroup
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.train.collecting.admission import StalenessSettings, is_fresh, lag_histogram, lag_of, version_spans
from gangline.train.collecting.buffer import BufferState, ReplayBuffer
from gangline.train.collecting.degenerates import DegenerateSettings, repetition, why_degenerate, without_degenerates
from gangline.train.collecting.groups import (
    Group,
    ValiditySettings,
    judge_group,
    tokens_left_out,
    trainable_traces,
    why_invalid,
)
from support.training.samples import EXACT, group, session, trace

SHRINK = ValiditySettings(on_invalid="shrink", min_valid=2)
BROKEN = EvaluatorError("the disk of the node is full.").failure()


def test_a_whole_group_is_kept() -> None:
    whole = group(1.0, 0.0, 0.0)
    verdict = judge_group("task-1", whole.sessions, 3)
    assert verdict.action == "keep"
    assert verdict.group == whole
    assert verdict.reasons == {}


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (session("s9", None, outcome="infra_error", failure=BROKEN), "infra_error: the disk of the node is full"),
        (session("s9", 0.0, outcome="infra_error", failure=BROKEN), "infra_error"),
        (session("s9", None, outcome="cancelled"), "cancelled"),
        (session("s9", 0.0, outcome="no_model_call"), "no_model_call"),
        (session("s9", None, failure=BROKEN), "evaluator failed"),
        (session("s9", None), "no reward"),
        (session("s9", 1.0, trajectory=None), "no trace"),
        (session("s9", 1.0, trace(untrainable="log-probs were missing")), "no trace"),
        (session("s9", 1.0, trace(loss_mask=np.zeros(3, np.int8))), "no trace"),
    ],
)
def test_what_makes_a_session_invalid(broken: object, why: str) -> None:
    assert why in (why_invalid(broken) or "")  # type: ignore[arg-type]


@pytest.mark.parametrize("outcome", ["agent_timeout", "turn_limit", "agent_error"])
def test_what_the_agent_did_is_trained_on(outcome: str) -> None:
    failure = HarnessError("it ended with 1.").failure() if outcome == "agent_error" else None
    assert why_invalid(session("s0", 0.0, outcome=outcome, failure=failure)) is None


def test_a_group_that_is_not_whole_is_refused_by_name() -> None:
    with pytest.raises(InvalidGroup, match=r"2 of 3 sessions of task-1 are valid \(s1: it has no reward\)"):
        judge_group("task-1", group(1.0, None, 0.0).sessions, 3)
    with pytest.raises(InvalidGroup, match="the others have no result"):
        judge_group("task-1", group(1.0, 0.0).sessions, 3)


def accepted(num: int, fraction: float, completed: int, others: str = "agent_timeout", **given: Any) -> str:
    """What happens to a group of `num` sessions: the published bridge's rule is `completed >= ceil(num * fraction)`."""
    settings = ValiditySettings(on_invalid="shrink", min_completed_fraction=fraction)
    sessions = [
        session(f"s{at}", float(at % 2), outcome="completed" if at < completed else others) for at in range(num)
    ]
    return judge_group("task-1", sessions, num, settings, **given).action


@pytest.mark.parametrize("num", [2, 8, 10, 16])
@pytest.mark.parametrize("fraction", [0.0, 0.07, 0.25, 0.55, 0.6, 0.7, 1.0])
@pytest.mark.parametrize("others", ["agent_timeout", "cancelled", "agent_error"])
def test_a_group_needs_its_share_of_sessions_that_did_their_work(num: int, fraction: float, others: str) -> None:
    required = math.ceil(Fraction(str(fraction)) * num)
    for completed in range(num + 1):
        has_two = completed >= 2 or others != "cancelled"
        is_kept = completed >= required and has_two
        assert accepted(num, fraction, completed, others) == ("keep" if is_kept else "drop"), completed


def test_the_share_is_of_all_sessions_where_some_are_enough() -> None:
    assert accepted(8, 0.5, 6, "cancelled", enough=6) == "keep"
    assert accepted(8, 0.5, 5, "cancelled", enough=6) == "keep", "one usable session had no reward"
    assert accepted(8, 0.5, 3, "agent_timeout", enough=6) == "drop"
    with pytest.raises(InvalidGroup, match=r"task-1 ends with 2 of 8 sessions.*asks for 4"):
        accepted(8, 0.5, 8, enough=2)


def test_limits_of_a_session_are_no_failure_of_its_work() -> None:
    assert accepted(4, 1.0, 2, "turn_limit") == "keep"


@pytest.mark.parametrize("on_invalid", ["refuse", "resubmit"])
def test_a_share_without_shrinking_is_refused(on_invalid: Any) -> None:
    with pytest.raises(ValueError, match="set on_invalid to shrink"):
        ValiditySettings(on_invalid=on_invalid, min_completed_fraction=0.5)


def test_a_group_that_is_dropped_for_its_share_says_whose_work_was_not_done() -> None:
    settings = ValiditySettings(on_invalid="shrink", min_completed_fraction=1.0)
    sessions = [session("s0", 1.0), session("s1", 0.0, outcome="agent_timeout"), session("s2", None)]
    assert judge_group("task-1", sessions, 3, settings).reasons == {
        "s1": "it ended as agent_timeout",
        "s2": "it has no reward",
    }


def test_a_group_shrinks_only_so_far() -> None:
    verdict = judge_group("task-1", group(1.0, None, 0.0).sessions, 3, SHRINK)
    assert verdict.action == "keep"
    assert verdict.group.rewards == (1.0, 0.0)
    assert verdict.reasons == {"s1": "it has no reward"}
    assert judge_group("task-1", group(1.0, None, None).sessions, 3, SHRINK).action == "drop"


def test_a_group_is_run_again() -> None:
    settings = ValiditySettings(on_invalid="resubmit")
    assert judge_group("task-1", group(1.0, None).sessions, 2, settings).action == "resubmit"


def certified(logprobs: LogprobKind, constraint: Constraint | None = None, **sampling: Any) -> Certificate:
    return msgspec.structs.replace(EXACT, logprobs=logprobs, constraint=constraint, sampling=SamplingParams(**sampling))


NOT_AS_SAMPLED = {
    "sampled with top_p 0.9: set capture.sampling.top_p.override: 1": certified("processed", top_p=0.9),
    "sampled with top_k 20: set capture.sampling.top_k.override: -1": certified("temperature_scaled", top_k=20),
    "presence_penalty 0.5, frequency_penalty 1: set capture.sampling.presence_penalty.override: 0": certified(
        "processed", presence_penalty=0.5, frequency_penalty=1.0
    ),
    "sampled greedily": certified("processed", temperature=0.0),
    "let the agent leave tool_choice at auto": certified("processed", "tool_choice"),
    "let the agent ask for plain text": certified("raw", "response_format"),
    "start vLLM with --logprobs-mode processed_logprobs": certified("raw", temperature=0.7),
    "log-probs missing": certified("missing"),
}
AS_SAMPLED = [
    certified("processed", temperature=0.7, top_p=1.0, top_k=-1),
    certified("temperature_scaled", temperature=0.7, top_k=0),
    certified("raw"),
    certified("raw", temperature=1.0, presence_penalty=0.0),
]


@pytest.mark.parametrize("held", AS_SAMPLED, ids=str)
def test_turns_whose_log_probs_are_of_what_they_were_drawn_from_are_trained_on(held: Certificate) -> None:
    one = session("s0", 1.0, trace(certificates=(held,)))
    assert trainable_traces(one) == list(one.trajectory.traces)  # type: ignore[union-attr]
    assert tokens_left_out([one]) == {}


@pytest.mark.parametrize("why", NOT_AS_SAMPLED)
def test_a_turn_that_was_drawn_from_another_distribution_is_masked(why: str) -> None:
    side_call = trace(turns=[(10, 2), (11, 12, 2)], versions=[3, 4], certificates=(NOT_AS_SAMPLED[why], EXACT))
    (masked,) = trainable_traces(session("s0", 1.0, side_call))
    assert masked.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert masked.response_logprobs.tolist() == [0.0] * 4 + [-0.5] * 3
    assert masked.response_versions.tolist() == [-1] * 4 + [4] * 3
    (reason,) = tokens_left_out([session("s0", 1.0, side_call), session("s1", 0.0)])
    assert why in reason
    assert tokens_left_out([session("s0", 1.0, side_call)] * 2) == {reason: 4}


@pytest.mark.parametrize("on_invalid", ["refuse", "shrink", "resubmit"])
@pytest.mark.parametrize("why", NOT_AS_SAMPLED)
def test_a_group_with_nothing_but_such_turns_is_an_error_that_names_the_way_out(why: str, on_invalid: str) -> None:
    """Another try would give the same, and a run would collect for ever."""
    sessions = [session(f"s{number}", 1.0, trace(certificates=(NOT_AS_SAMPLED[why],))) for number in range(2)]
    with pytest.raises(InvalidGroup, match=re.escape(why)):
        judge_group("task-1", sessions, 2, ValiditySettings.model_validate({"on_invalid": on_invalid}))


def test_one_session_of_such_turns_is_one_that_is_not_valid() -> None:
    only = session("s1", 1.0, trace(certificates=(certified("processed", top_p=0.9),)))
    verdict = judge_group("task-1", [session("s0", 1.0), only, session("s2", 0.0)], 3, SHRINK)
    assert verdict.action == "keep"
    assert "none of its tokens can be trained on: sampled with top_p 0.9" in verdict.reasons["s1"]


@pytest.mark.parametrize(("rewards", "warned"), [((0.5, 0.5), True), ((0.5, 0.500001), True), ((0.5, 0.6), False)])
def test_rewards_that_hardly_differ_are_warned_of(
    rewards: tuple[float, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        verdict = judge_group("task-1", group(*rewards).sessions, 2)
    assert verdict.group.is_informative is not warned
    assert bool(caplog.records) is warned


def test_versions_as_runs() -> None:
    stamps = trace(turns=[(10, 2), (11, 2), (12,)], versions=[3, 3, 5]).response_versions
    assert version_spans(stamps) == (VersionSpan(3, 0, 2), VersionSpan(3, 4, 6), VersionSpan(5, 8, 9))
    assert version_spans(np.empty(0, np.int32)) == ()


def test_the_lag_is_of_the_oldest_token_or_of_the_start() -> None:
    traces = [trace(turns=[(10,), (11,)], versions=[4, 6]), trace(versions=[3])]
    assert lag_of(traces, 7) == 4
    assert lag_of(traces, 7, "start") == 3
    assert lag_of([trace(loss_mask=np.zeros(3, np.int8))], 7) == 0
    assert lag_histogram(traces, 7) == {1: 1, 3: 1, 4: 3}


def test_only_fresh_traces_are_admitted() -> None:
    traces = [trace(turns=[(10,), (11,)], versions=[4, 6])]
    assert is_fresh(traces, 6, StalenessSettings(max_lag=2))
    assert not is_fresh(traces, 7, StalenessSettings(max_lag=2))
    assert not is_fresh([trace(versions=[-1])], 0, StalenessSettings(max_lag=100))


def looping(num_turns: int, *actions: str) -> list[object]:
    calls = [actions[index % len(actions)] for index in range(num_turns)]
    return [trace(turns=[(10,)] * num_turns, calls=calls)]


@pytest.mark.parametrize(
    ("reward", "num_turns", "actions", "is_loop"),
    [
        (0.0, 21, ("ls",), True),
        (0.0, 21, ("edit", "test", "look"), True),
        (0.0, 20, ("ls",), False),
        (1.0, 21, ("ls",), False),
        (0.0, 21, tuple(map(str, range(21))), False),
    ],
)
def test_a_loop_is_long_worth_nothing_and_repeats_itself(
    reward: float, num_turns: int, actions: tuple[str, ...], is_loop: bool
) -> None:
    one = session("s0", reward, *looping(num_turns, *actions))  # type: ignore[arg-type]
    assert ((why_degenerate(one, DegenerateSettings()) or "").startswith("a loop")) is is_loop


def test_repetition_counts_actions_done_before() -> None:
    one = session("s0", 0.0, *looping(4, "edit", "test"))  # type: ignore[arg-type]
    assert repetition(one) == 0.5
    assert repetition(session("s0", 0.0)) == 0.0


def test_what_is_too_long_or_unreadable_goes_if_asked() -> None:
    unread = trace(certificates=(msgspec.structs.replace(EXACT, parse="failed"),))
    found = Group(
        "task-1", (session("s0", 1.0), session("s1", 0.0, unread), session("s2", 0.0, trace(turns=[(10,) * 9])))
    )
    left, reasons = without_degenerates(found, DegenerateSettings(max_tokens=8, drop_unparsed=True))
    assert [one.session_id for one in left.sessions] == ["s0"]
    assert reasons == {"s1": "tool calls that could not be read", "s2": "too long: 12 ids, 8 are allowed"}
    assert without_degenerates(found, DegenerateSettings())[1] == {}


def aged(task_id: str, version: int) -> Group:
    return Group(
        task_id, (session("s0", 1.0, trace(versions=[version])), session("s1", 0.0, trace(versions=[version])))
    )


def test_the_buffer_gives_the_oldest_once() -> None:
    buffer = ReplayBuffer(10, StalenessSettings(max_lag=1))
    assert all(buffer.add(aged(name, 0)) for name in "abc")
    assert not buffer.add(aged("a", 0))
    assert buffer.take(4, 0) is None
    assert [one.task_id for one in buffer.take(2, 0) or []] == ["a", "b"]
    assert not buffer.add(aged("a", 0))
    assert len(buffer) == 1


def test_the_buffer_gives_a_group_as_often_as_it_may() -> None:
    buffer = ReplayBuffer(10, StalenessSettings(), max_uses=2)
    buffer.add(aged("a", 0))
    assert [len(buffer.take(1, 0) or []) for _ in range(3)] == [1, 1, 0]


def test_the_buffer_drops_what_is_stale_and_what_is_too_much() -> None:
    buffer = ReplayBuffer(2, StalenessSettings(max_lag=1))
    for version, name in enumerate("abc"):
        buffer.add(aged(name, version))
    assert [one.task_id for one in buffer.take(1, 3) or []] == ["c"]
    assert len(buffer) == 0


def test_a_restored_buffer_refuses_what_was_trained_on() -> None:
    buffer = ReplayBuffer(10, StalenessSettings())
    for name in "ab":
        buffer.add(aged(name, 0))
    buffer.take(1, 0)
    kept = decode_msgpack(encode_msgpack(buffer.state), BufferState)
    again = ReplayBuffer(10, StalenessSettings())
    again.restore(kept)
    assert not again.add(aged("a", 0))
    assert again.add(aged("b", 0))
