"""Requirements on every trainer adapter, as checks that any adapter's author can run.

    SUBJECT = Subject(convert=my_adapter.to_batch, read=rows_of_my_batch)

    @pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
    def test_my_adapter(check):
        run_check(check, SUBJECT)

`convert` is the adapter. `read` is written by its author: it converts a batch back to rows as the trainer reads it,
with the trainer's own masks and lengths. A failed check raises AssertionError with the expectation. Neither PyTorch nor
the trainer is needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from gangline.domain.completion import Certificate, LogprobKind
from gangline.domain.conversation import Message, SamplingParams, Text
from gangline.domain.errors import Failure, InvalidGroup, InvalidRequest
from gangline.domain.session import SessionResult
from gangline.domain.tokens import encode_msgpack
from gangline.domain.trajectory import Trace, Trajectory, TurnSpan
from gangline.rows.shared_prefixes import share_prefixes
from gangline.train.collecting.groups import Group
from gangline.train.trainers.contract import CONTRACT_VERSION, rows_of

B = TypeVar("B")

_PROMPT = (1, 4, 5, 6)
_GAP = (7, 8, 1)
_EXACT = Certificate(prompt_source="engine", context="first", logprobs="raw", finish_reason="stop")


@dataclass(frozen=True, kw_only=True)
class ReadRow:
    """A row read back from a batch. All lists except `prompt_ids` are [T], T = len(response_ids)."""

    task_id: str
    """Any label that distinguishes groups."""
    session_id: str
    """Any label that distinguishes sessions of a group."""
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    """Compared as float32."""
    versions: Sequence[int]
    """-1 where masked."""
    reward: float
    """Compared as float32."""


@dataclass(frozen=True, kw_only=True)
class Subject(Generic[B]):
    """An adapter, and a reader of its batches."""

    convert: Callable[[Sequence[Group], int], B]
    """(groups, sessions per group) -> batch, for a trainer whose temperature is 1."""
    read: Callable[[B], Sequence[ReadRow]]
    contract: int = CONTRACT_VERSION
    """Version of the contract for which the adapter was written."""
    one_trace_per_session: bool = False
    """The trainer takes one row per session: sessions with more rows must be refused, because a partial session is
    invalid.
    """
    one_reward_per_session: bool = False
    """The trainer takes one reward per session: sessions with several traces that have different rewards must be
    refused.
    """


Check = Callable[[Subject[Any]], None]
_CHECKS: list[Check] = []


def _check(check: Check) -> Check:
    _CHECKS.append(check)
    return check


def checks() -> list[Check]:
    return list(_CHECKS)


def run_check(check: Check, subject: Subject[Any]) -> None:
    """Raises: AssertionError with the expectation."""
    check(subject)


# Inputs of adapters.


def _trace(
    *,
    turns: Sequence[Sequence[int]],
    prompt: Sequence[int] = _PROMPT,
    versions: Sequence[Sequence[int]] | None = None,
    number: int = 0,
    **changes: Any,
) -> Trace:
    """Turns with tool output between them. versions: of each turn's tokens; None: 3."""
    ids, mask, stamps, spans = list[int](), list[int](), list[int](), list[TurnSpan]()
    for index, turn in enumerate(turns):
        gap = _GAP if index else ()
        spans.append(TurnSpan(f"c{number}-{index}", len(ids) + len(gap), len(ids) + len(gap) + len(turn)))
        ids += [*gap, *turn]
        mask += [0] * len(gap) + [1] * len(turn)
        stamps += [-1] * len(gap) + list([3] * len(turn) if versions is None else versions[index])
    # Each token has a distinct log-prob, so that a moved one is detected.
    logprobs = -0.01 * np.arange(1 + 100 * number, 1 + 100 * number + len(ids), dtype=np.float32)
    fields: dict[str, Any] = {
        "trace_id": f"trace{number}",
        "session_id": "",
        "prompt_ids": np.array(prompt, np.int32),
        "response_ids": np.array(ids, np.int32),
        "loss_mask": np.array(mask, np.int8),
        "response_logprobs": logprobs * np.array(mask, np.float32),
        "response_versions": np.array(stamps, np.int32),
        "spans": tuple(spans),
        "prompt_messages": (Message("user", (Text("count"),)),),
        "response_messages": (Message("assistant", (Text("one two"),)),),
        "finish_reason": "stop",
        "certificates": (_EXACT,) * len(spans),
    }
    return Trace(**fields | changes)


def _session(
    sample: int, reward: float | None, *traces: Trace, task_id: str = "task0", **changes: Any
) -> SessionResult:
    session_id = f"{task_id}-s{sample}"
    named = tuple(
        msgspec.structs.replace(trace, session_id=session_id, trace_id=f"{session_id}/{trace.trace_id}")
        for trace in traces
    )
    trajectory = Trajectory(
        session_id=session_id, task_id=task_id, builder="prefix_merging", traces=named, num_completions=len(named)
    )
    fields: dict[str, Any] = {
        "session_id": session_id,
        "task_id": task_id,
        "node_id": "node0",
        "attempt": 1,
        "fence": 1,
        "outcome": "completed",
        "reward": reward,
        "trajectory": trajectory,
    }
    return SessionResult(**fields | changes)


def _group(*sessions: SessionResult) -> Group:
    return Group(sessions[0].task_id, sessions)


def _plain(sample: int, reward: float | None = 1.0, *, task_id: str = "task0", **changes: Any) -> SessionResult:
    """A session with distinct tokens."""
    return _session(sample, reward, _trace(turns=[(20 + sample, 2)], number=sample), task_id=task_id, **changes)


def _pair(task_id: str = "task0") -> Group:
    return _group(_plain(0, 1.0, task_id=task_id), _plain(1, 0.0, task_id=task_id))


# Checks of batches.


def _handed_over(subject: Subject[Any], *groups: Group, mask: Sequence[int] | None = None) -> None:
    """The batch contains exactly the groups' rows, in order. mask: expected in every row."""
    num_samples = len(groups[0].sessions)
    expected = [row for group in groups for row in rows_of(group, num_samples)]
    found = list(subject.read(subject.convert(groups, num_samples)))
    assert len(found) == len(expected), f"{len(expected)} rows were given, {len(found)} arrived"
    for number, (row, wanted) in enumerate(zip(found, expected, strict=True)):
        fields = {
            "prompt ids": (row.prompt_ids, wanted.prompt_ids),
            "response ids": (row.response_ids, wanted.response_ids),
            "loss mask": (row.loss_mask, wanted.loss_mask),
            "log-probs": (np.asarray(row.logprobs, np.float32), wanted.logprobs),
            "versions": (row.versions, wanted.versions),
            "reward": ([np.float32(row.reward)], [np.float32(wanted.reward)]),
        }
        for name, (got, want) in fields.items():
            assert list(got) == list(want), f"row {number}, {wanted.trace_id}: {name} {list(want)} became {list(got)}"
        assert mask is None or list(row.loss_mask) == list(mask), f"{wanted.trace_id}: the mask is {row.loss_mask}"
    for what in ("task_id", "session_id"):
        got, want = (_numbered([getattr(row, what) for row in rows]) for rows in (found, expected))
        assert got == want, f"rows that share a {what} are {want}, and arrived as {got}"


def _numbered(labels: Sequence[str]) -> list[int]:
    """Each label replaced by the index of its first occurrence."""
    return [labels.index(label) for label in labels]


def _refused(subject: Subject[Any], what: str, num_samples: int, *groups: Group) -> None:
    try:
        subject.convert(groups, num_samples)
    except (InvalidGroup, InvalidRequest):
        return
    raise AssertionError(f"{what}: it was handed over, and must be refused with InvalidGroup or InvalidRequest")


# The checks.


@_check
def was_written_for_this_contract(subject: Subject[Any]) -> None:
    assert subject.contract == CONTRACT_VERSION, f"it keeps version {subject.contract}, this is {CONTRACT_VERSION}"


@_check
def hands_over_every_token(subject: Subject[Any]) -> None:
    _handed_over(subject, _pair())


@_check
def keeps_tool_output_out_of_the_mask(subject: Subject[Any]) -> None:
    three = _trace(turns=[(10, 11, 2), (12, 2), (13, 14, 15, 2)])
    two = _trace(turns=[(2,), (16, 2)], number=1)
    _handed_over(subject, _group(_session(0, 1.0, three), _session(1, 0.0, two)))


@_check
def keeps_a_turn_of_which_a_part_is_not_trained_on(subject: Subject[Any]) -> None:
    """Including a mask that begins or ends with 0."""
    trace = _trace(turns=[(10, 11, 12, 13, 2)])
    mask = np.array([0, 1, 1, 0, 0], np.int8)
    versions = np.where(mask == 1, trace.response_versions, -1).astype(np.int32)
    logprobs = (trace.response_logprobs * mask).astype(np.float32)
    partly = msgspec.structs.replace(trace, loss_mask=mask, response_versions=versions, response_logprobs=logprobs)
    _handed_over(subject, _group(_session(0, 1.0, partly), _plain(1, 0.0)))


@_check
def keeps_rows_of_different_lengths(subject: Subject[Any]) -> None:
    prompt = range(30, 60)
    lengths = [[(2,)], [range(10, 25), range(40, 51)], [range(10, 15)]]
    traces = [_trace(prompt=prompt, turns=turns, number=number) for number, turns in enumerate(lengths)]
    _handed_over(subject, _group(*(_session(sample, 0.5 * sample, trace) for sample, trace in enumerate(traces))))


@_check
def keeps_ids_that_look_like_padding(subject: Subject[Any]) -> None:
    """Id 0, and the end-of-turn id, at both ends of prompt and response."""
    odd = _trace(prompt=(0, 0, 2, 4, 0), turns=[(0, 2, 0), (2, 2, 0, 0)])
    even = _trace(prompt=(0, 0, 2, 4, 0), turns=[(0,)], number=1)
    _handed_over(subject, _group(_session(0, 1.0, odd), _session(1, 0.0, even)))


@_check
def keeps_a_token_that_was_certain(subject: Subject[Any]) -> None:
    """A log-prob of 0.0 does not mean masked; one of -60 does not mean padding."""
    trace = _trace(turns=[(10, 11, 2)])
    sure = msgspec.structs.replace(trace, response_logprobs=np.array([0.0, -60.0, 0.0], np.float32))
    _handed_over(subject, _group(_session(0, 1.0, sure), _plain(1, 0.0)))


@_check
def keeps_the_versions_of_tokens(subject: Subject[Any]) -> None:
    """Including weights that changed within a turn, and version 0."""
    two = _trace(turns=[(10, 11, 2), (12, 2)], versions=[(0, 0, 1), (1, 2)])
    one = _trace(turns=[(10, 2)], versions=[(2, 2)], number=1)
    _handed_over(subject, _group(_session(0, 1.0, two), _session(1, 0.0, one)))


@_check
def keeps_rewards_as_they_are(subject: Subject[Any]) -> None:
    """Negative, zero, fractions; rewards are neither shaped nor compared here."""
    rewards = (-1.5, 0.0, 0.1, 1.0)
    _handed_over(subject, _group(*(_plain(sample, reward) for sample, reward in enumerate(rewards))))


@_check
def keeps_the_rewards_that_traces_have_of_their_own(subject: Subject[Any]) -> None:
    """If a process evaluator rewarded traces separately, their own rewards arrive, not the session's."""
    own = _trace(turns=[(10, 2)], reward=0.25)
    other = _session(1, 0.0, _trace(turns=[(12, 2)], number=2))
    several = _group(_session(0, 1.0, own, _trace(turns=[(11, 2)], number=1, reward=0.75)), other)
    if subject.one_reward_per_session:
        _refused(subject, "a session whose traces have their own rewards", 2, several)
    if subject.one_reward_per_session or subject.one_trace_per_session:
        _handed_over(subject, _group(_session(0, 1.0, own), other))
    else:
        _handed_over(subject, several)


@_check
def hands_over_a_group_of_one_reward(subject: Subject[Any]) -> None:
    """Whether it is worth training on has already been decided."""
    _handed_over(subject, _group(_plain(0, 1.0), _plain(1, 1.0), _plain(2, 1.0)))


@_check
def keeps_the_order_of_groups_and_sessions(subject: Subject[Any]) -> None:
    """Nothing is sorted: not by id, length or reward."""
    late = _group(_plain(2, 0.0, task_id="task9"), _plain(0, 1.0, task_id="task9"), _plain(1, 0.5, task_id="task9"))
    early = _group(_plain(1, 1.0, task_id="task1"), _plain(2, 1.0, task_id="task1"), _plain(0, 0.0, task_id="task1"))
    _handed_over(subject, late, early)


@_check
def keeps_groups_apart_that_have_the_same_tokens(subject: Subject[Any]) -> None:
    _handed_over(subject, _pair("task0"), _pair("task1"))


@_check
def leaves_out_traces_that_must_not_be_trained_on(subject: Subject[Any]) -> None:
    good = _trace(turns=[(10, 2)], number=1)
    zeros: dict[str, Any] = {"loss_mask": np.zeros(2, np.int8), "response_logprobs": np.zeros(2, np.float32)}
    unsure = _trace(turns=[(12, 2)], versions=[(-1, -1)], untrainable="its context is not exact", **zeros)
    masked = _trace(turns=[(13, 2)], versions=[(-1, -1)], number=2, **zeros)
    _handed_over(subject, _group(_session(0, 1.0, unsure, good, masked), _plain(1, 0.0)))


@_check
def hands_over_every_trace_of_a_session_or_none(subject: Subject[Any]) -> None:
    several = [
        _trace(turns=[(10, 11, 2), (12, 2)]),
        _trace(prompt=(1, 9), turns=[(13, 2)], number=1),
        _trace(prompt=(1, 9, 9), turns=[(14, 2)], number=2),
    ]
    group = _group(_session(0, 1.0, *several), _plain(3, 0.0))
    if subject.one_trace_per_session:
        _refused(subject, "a session of several traces", 2, group)
    else:
        _handed_over(subject, group)


@_check
def writes_shared_prompts_out(subject: Subject[Any]) -> None:
    """A row of the `tree` builder has only the end of its prompt."""
    first = _trace(turns=[(10, 11, 2)], untrainable="it is there for its prompt", loss_mask=np.zeros(3, np.int8))
    second = _trace(prompt=(*_PROMPT, 10, 11, 2, 7), turns=[(12, 2)], number=1)
    session = _session(0, 1.0, first, second)
    trajectory = session.trajectory
    assert trajectory is not None
    shared = msgspec.structs.replace(trajectory, traces=tuple(share_prefixes(trajectory.traces)))
    assert shared.traces[1].shared_prefix is not None
    other = _session(1, 0.0, _trace(prompt=(*_PROMPT, 10, 11, 2, 7), turns=[(13, 2)]))
    _handed_over(subject, _group(msgspec.structs.replace(session, trajectory=shared), other))


@_check
def refuses_a_group_that_is_not_whole(subject: Subject[Any]) -> None:
    down = Failure(boundary="engine", code="engine_unavailable", message="it is down", retryable=True)
    nothing = _trace(turns=[(10, 2)], loss_mask=np.zeros(2, np.int8))
    for what, sessions in {
        "a session is missing": [],
        "a session has no reward": [_plain(2, None)],
        "a fault of ours ended a session": [_plain(2, None, outcome="infra_error", failure=down)],
        "a cancelled session": [_plain(2, 1.0, outcome="cancelled")],
        "a session without a model call": [_plain(2, 1.0, outcome="no_model_call")],
        "a session has no trajectory": [_plain(2, 1.0, trajectory=None)],
        "a session has no trace to train on": [_session(2, 1.0, nothing)],
        "a session is there twice": [_plain(1, 0.0)],
        "a session too many": [_plain(2), _plain(3)],
    }.items():
        _refused(subject, what, 3, Group("task0", (_plain(0), _plain(1, 0.0), *sessions)))


@_check
def refuses_a_batch_for_one_group_that_is_not_whole(subject: Subject[Any]) -> None:
    """A batch of the others would be too small."""
    short = Group("task1", (_plain(0, task_id="task1"),))
    _refused(subject, "the last group is short", 2, _pair("task0"), short)


def _certified(kind: LogprobKind, **changes: Any) -> Certificate:
    return msgspec.structs.replace(_EXACT, logprobs=kind, **changes)


def _turns_certified(*certificates: Certificate) -> Group:
    """Two sessions of two turns, whose turns have these certificates."""
    traces = [_trace(turns=[(10, 2), (11, 2)]), _trace(turns=[(12, 2), (13, 2)], number=1)]
    certified = [msgspec.structs.replace(trace, certificates=certificates) for trace in traces]
    return _group(*(_session(sample, float(sample), trace) for sample, trace in enumerate(certified)))


_WARM = SamplingParams(temperature=1.0)
_NOT_AS_SAMPLED: dict[str, Certificate] = {
    "without log-probs": _certified("missing"),
    "with top_p": _certified("processed", sampling=SamplingParams(top_p=0.9)),
    "with top_k": _certified("temperature_scaled", sampling=SamplingParams(top_k=20)),
    "with a penalty": _certified("raw", sampling=SamplingParams(presence_penalty=0.5)),
    "greedily": _certified("processed", sampling=SamplingParams(temperature=0.0)),
    "by a forced tool": _certified("processed", constraint="tool_choice"),
    "by a grammar": _certified("raw", constraint="response_format"),
    "at a temperature that raw log-probs do not know": _certified("raw", sampling=SamplingParams(temperature=0.7)),
}


@_check
def refuses_log_probs_that_are_not_the_trainers_kind(subject: Subject[Any]) -> None:
    """Log-probs at another temperature come from another distribution, so every ratio would be wrong."""
    cool = _certified("processed", sampling=SamplingParams(temperature=0.7))
    _handed_over(subject, _turns_certified(_certified("raw", sampling=_WARM), _certified("processed", sampling=_WARM)))
    _refused(subject, "all turns at another temperature", 2, _turns_certified(cool, cool))
    _refused(subject, "a turn at another temperature", 2, _turns_certified(_EXACT, cool))


@_check
def masks_turns_that_were_not_sampled_from_what_their_log_probs_are_of(subject: Subject[Any]) -> None:
    """A side call with top-p, or a forced tool, does not affect the other turns; a trace of only such turns is
    refused.
    """
    for what, certificate in _NOT_AS_SAMPLED.items():
        _handed_over(subject, _turns_certified(_EXACT, certificate), mask=[1, 1, 0, 0, 0, 0, 0])
        _handed_over(subject, _turns_certified(certificate, _EXACT), mask=[0, 0, 0, 0, 0, 1, 1])
        _refused(subject, f"all turns sampled {what}", 2, _turns_certified(certificate, certificate))


@_check
def leaves_groups_as_they_were(subject: Subject[Any]) -> None:
    """Converting the same groups again gives the same batch: a batch that could not be sent is converted once more."""
    group = _group(_session(0, 1.0, _trace(turns=[(10, 2), (11, 2)])), _plain(1, 0.0))
    before = [encode_msgpack(session) for session in group.sessions]
    subject.convert([group], 2)
    assert [encode_msgpack(session) for session in group.sessions] == before, "converting changed the group"
    _handed_over(subject, group)
