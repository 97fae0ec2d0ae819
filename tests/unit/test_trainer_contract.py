"""The contract with trainers: the kit finds broken adapters, and gates open again whatever happens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gangline.domain.errors import InvalidGroup, NodeError, ServerUnavailable
from gangline.domain.node_views import GateMode, GateState
from gangline.testing.trainer_conformance import ReadRow, Subject, checks, run_check
from gangline.train.collecting.groups import Group
from gangline.train.trainers.contract import TrainerRow, require_whole, rows_of, updating
from support.training.fakes import gate_state
from support.training.samples import group, session

Rows = list[TrainerRow]


def convert(groups: Sequence[Group], num_samples: int) -> Rows:
    return [row for group in groups for row in rows_of(group, num_samples)]


def read(rows: Rows) -> list[ReadRow]:
    return [
        ReadRow(
            task_id=row.task_id,
            session_id=row.session_id,
            prompt_ids=row.prompt_ids.tolist(),
            response_ids=row.response_ids.tolist(),
            loss_mask=row.loss_mask.tolist(),
            logprobs=row.logprobs.tolist(),
            versions=row.versions.tolist(),
            reward=row.reward,
        )
        for row in rows
    ]


def failures(subject: Subject[Any]) -> list[str]:
    """Names of the checks that fail."""
    found = list[str]()
    for check in checks():
        try:
            run_check(check, subject)
        except AssertionError:
            found.append(check.__name__)
    return found


def test_an_adapter_that_hands_rows_over_as_they_are_conforms() -> None:
    assert failures(Subject(convert=convert, read=read)) == []


def each(**changes: Callable[[TrainerRow], Any]) -> Callable[[Sequence[Group], int], Rows]:
    """An adapter that changes these fields of every row."""

    def broken(groups: Sequence[Group], num_samples: int) -> Rows:
        rows = convert(groups, num_samples)
        return [dataclasses.replace(row, **{name: do(row) for name, do in changes.items()}) for row in rows]

    return broken


def ordered(key: Callable[[TrainerRow], Any]) -> Callable[[Sequence[Group], int], Rows]:
    return lambda groups, num_samples: sorted(convert(groups, num_samples), key=key)


def without_asking(groups: Sequence[Group], _num_samples: int) -> Rows:
    """Passes groups on that are not whole."""
    found = Rows()
    for one in groups:
        rated = [session for session in one.sessions if session.reward is not None and session.trajectory is not None]
        for session_ in rated:
            found += rows_of(Group(one.task_id, (session_,)), 1) if session_.outcome == "completed" else []
    return found


def one_a_session(groups: Sequence[Group], num_samples: int) -> Rows:
    """Keeps the last trace of each."""
    return list({(row.task_id, row.session_id): row for row in convert(groups, num_samples)}.values())


def in_place(groups: Sequence[Group], num_samples: int) -> Rows:
    rows = convert(groups, num_samples)
    for row in rows:
        row.response_ids[row.loss_mask == 0] = 0
    return rows


def hot(one: Group, num_samples: int) -> Rows:
    try:
        return rows_of(one, num_samples)
    except InvalidGroup:
        return rows_of(one, num_samples, temperature=0.7)


def from_spans(row: TrainerRow) -> NDArray[np.int8]:
    """A mask of everything that was sampled."""
    mask = np.zeros(len(row.response_ids), np.int8)
    for span in row.trace.spans:
        mask[span.start : span.end] = 1
    return mask


def without_padding(values: Any) -> Any:
    return np.trim_zeros(values, "b")


BROKEN: dict[str, tuple[Callable[[Sequence[Group], int], Rows], str]] = {
    "loses the last token": (
        each(
            response_ids=lambda row: row.response_ids[:-1],
            loss_mask=lambda row: row.loss_mask[:-1],
            logprobs=lambda row: row.logprobs[:-1],
            versions=lambda row: row.versions[:-1],
        ),
        "hands_over_every_token",
    ),
    "loses the first id of the prompt": (each(prompt_ids=lambda row: row.prompt_ids[1:]), "hands_over_every_token"),
    "shifts the mask by one": (
        each(loss_mask=lambda row: np.roll(row.loss_mask, 1)),
        "keeps_tool_output_out_of_the_mask",
    ),
    "trains on tool output": (
        each(loss_mask=lambda row: np.ones_like(row.loss_mask)),
        "keeps_tool_output_out_of_the_mask",
    ),
    "shifts log-probs by one": (each(logprobs=lambda row: np.roll(row.logprobs, 1)), "hands_over_every_token"),
    "gives no log-probs": (each(logprobs=lambda row: np.zeros_like(row.logprobs)), "hands_over_every_token"),
    "takes the mask from log-probs": (
        each(loss_mask=lambda row: (row.logprobs != 0).astype(np.int8)),
        "keeps_a_token_that_was_certain",
    ),
    "clamps log-probs": (each(logprobs=lambda row: row.logprobs.clip(-20)), "keeps_a_token_that_was_certain"),
    "gives a row the version of its end": (
        each(versions=lambda row: np.where(row.loss_mask == 1, row.versions[-1], -1)),
        "keeps_the_versions_of_tokens",
    ),
    "finds the end by padding": (
        each(response_ids=lambda row: without_padding(row.response_ids)),
        "keeps_ids_that_look_like_padding",
    ),
    "sorts by id": (ordered(lambda row: (row.task_id, row.session_id)), "keeps_the_order_of_groups_and_sessions"),
    "sorts by length": (ordered(lambda row: -len(row.response_ids)), "keeps_rows_of_different_lengths"),
    "sorts by reward": (ordered(lambda row: row.reward), "keeps_the_order_of_groups_and_sessions"),
    "clips rewards": (each(reward=lambda row: max(row.reward, 0.0)), "keeps_rewards_as_they_are"),
    "gives every trace its session's reward": (
        each(reward=lambda row: row.session_reward),
        "keeps_the_rewards_that_traces_have_of_their_own",
    ),
    "joins groups of one prompt": (
        each(task_id=lambda row: str(row.prompt_ids)),
        "keeps_groups_apart_that_have_the_same_tokens",
    ),
    "takes traces for sessions": (
        each(session_id=lambda row: row.trace_id),
        "hands_over_every_trace_of_a_session_or_none",
    ),
    "keeps one trace of each session": (one_a_session, "hands_over_every_trace_of_a_session_or_none"),
    "forgets the shared beginning": (
        each(prompt_ids=lambda row: row.prompt_ids[-4:]),
        "writes_shared_prompts_out",
    ),
    "drops a group of one reward": (
        lambda groups, num_samples: convert([one for one in groups if one.is_informative], num_samples),
        "hands_over_a_group_of_one_reward",
    ),
    "passes a short group": (without_asking, "refuses_a_group_that_is_not_whole"),
    "passes a short group at the end": (
        lambda groups, num_samples: convert(groups[:1], num_samples) + without_asking(groups[1:], num_samples),
        "refuses_a_batch_for_one_group_that_is_not_whole",
    ),
    "takes log-probs of any temperature": (
        lambda groups, num_samples: [row for one in groups for row in hot(one, num_samples)],
        "refuses_log_probs_that_are_not_the_trainers_kind",
    ),
    "trains on turns with log-probs of another distribution": (
        each(loss_mask=from_spans),
        "masks_turns_that_were_not_sampled_from_what_their_log_probs_are_of",
    ),
    "writes into the group": (in_place, "leaves_groups_as_they_were"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_kit_finds_an_adapter_that(what: str) -> None:
    adapter, check = BROKEN[what]
    assert check in failures(Subject(convert=adapter, read=read))


def test_the_kit_finds_an_adapter_that_says_one_trace_and_drops_the_others() -> None:
    subject = Subject(convert=one_a_session, read=read, one_trace_per_session=True)
    assert failures(subject) == ["hands_over_every_trace_of_a_session_or_none"]


def test_the_kit_finds_an_adapter_of_another_contract() -> None:
    assert failures(Subject(convert=convert, read=read, contract=0)) == ["was_written_for_this_contract"]


def test_a_refusal_counts_sessions_and_says_what_is_wrong_with_which() -> None:
    counts = r"valid_sessions=1 group_sessions=3 \(s1: it has no reward\)"
    with pytest.raises(InvalidGroup, match=rf"task-1 was refused before the trainer saw it: {counts}"):
        require_whole(group(1.0, None), 3)
    twice = Group("task-1", (session("s0", 1.0), session("s0", 1.0)))
    with pytest.raises(InvalidGroup, match=r"valid_sessions=0 group_sessions=2 \(s0: it is there 2 times"):
        require_whole(twice, 2)


class FakeGate:
    def __init__(self, said: list[str], name: str, *, drains: bool = True, answers: bool = True) -> None:
        self._said, self._name, self._drains, self._answers = said, name, drains, answers

    async def pause(self, mode: GateMode = "drain", lease_s: float = 600.0) -> GateState:
        if not self._answers:
            raise ServerUnavailable(f"{self._name} does not answer.")
        self._said.append(f"{self._name} pause {mode} {lease_s:g}")
        return gate_state(is_drained=self._drains)

    async def resume(self) -> GateState:
        self._said.append(f"{self._name} resume")
        return gate_state()

    async def set_version(self, version: int) -> GateState:
        if not self._answers:
            raise ServerUnavailable(f"{self._name} does not answer.")
        self._said.append(f"{self._name} version {version}")
        return gate_state()


async def test_weights_are_loaded_while_every_gate_is_closed() -> None:
    said = list[str]()
    async with updating([FakeGate(said, "a"), FakeGate(said, "b")], 7, lease_s=60):
        assert sorted(said) == ["a pause drain 60", "b pause drain 60"]
        said.clear()
    for name in "ab":
        assert [one for one in said if one[0] == name] == [f"{name} version 7", f"{name} resume"]


async def test_gates_open_with_the_old_version_when_loading_failed() -> None:
    said = list[str]()
    with pytest.raises(RuntimeError, match="out of memory"):
        async with updating([FakeGate(said, "a")], 7):
            raise RuntimeError("out of memory")
    assert said == ["a pause drain 600", "a resume"]


@pytest.mark.parametrize(
    ("fault", "error", "why"),
    [
        ({"drains": False}, NodeError, "still in flight after 60 s"),
        ({"answers": False}, ServerUnavailable, "b does not answer"),
    ],
    ids=["a node that does not drain", "a node that does not answer"],
)
async def test_nothing_is_loaded_with_a_gate_open(fault: dict[str, bool], error: type[Exception], why: str) -> None:
    said, loaded = list[str](), False
    with pytest.raises(error, match=why):
        async with updating([FakeGate(said, "a"), FakeGate(said, "b", **fault)], 7, lease_s=60):
            loaded = True
    assert not loaded
    assert {"a resume", "b resume"} <= set(said)
