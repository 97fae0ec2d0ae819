"""Groups as TRL's `RolloutSample`s: judged by the kit, and by TRL's own queue, dataset, planners and collator."""

from __future__ import annotations

import logging
import queue
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
from accelerate import PartialState

from gangline.domain.errors import InvalidRequest
from gangline.testing.trainer_conformance import Check, ReadRow, Subject, checks, run_check
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.masks import last_turns, outcome_weighted
from gangline.train.learning.samples import make_samples
from gangline.train.trainers.contract import TrainerRow, rows_of
from gangline.train.trainers.trl_async import samples as adapter
from gangline.train.trainers.trl_async.samples import to_rollout_samples
from support.training.samples import group, scored, session, trace
from support.training.trl_async import of_trl

pytestmark = pytest.mark.filterwarnings("ignore")  # of what TRL and its dependencies deprecate

GRPO = algorithm("grpo")


@pytest.fixture(autouse=True)
def trls_logger() -> None:
    PartialState(cpu=True)


def several() -> Group:
    """Two sessions, one of them with three traces, of several versions."""
    traces = (
        trace(turns=[(10, 11, 2), (12, 2)], versions=[5, 6]),
        trace(turns=[(12, 2)], versions=[6]),
        trace(turns=[(13, 2)], versions=[6]),
    )
    return Group("task-1", (session("s0", 1.0, *traces), session("s1", 0.0, trace(turns=[(14, 15, 2)], versions=[7]))))


Converted = list[tuple[Any, TrainerRow, int]]


def convert(groups: Sequence[Group], num_samples: int) -> Converted:
    """TRL's samples, with the labels and versions that its type has no place for."""
    return [
        (sample, row, number)
        for number, one in enumerate(groups)
        for sample, row in zip(
            to_rollout_samples(one, num_samples, GRPO, group_id=number), rows_of(one, num_samples), strict=True
        )
    ]


def read(found: Converted) -> list[ReadRow]:
    rows = list[ReadRow]()
    for sample, row, number in found:
        assert sample.group_id == number
        assert sample.input_ids.dtype == sample.completion_mask.dtype == np.int64
        assert sample.old_log_probs.dtype == np.float32
        prompt = len(row.prompt_ids)
        assert not sample.completion_mask[:prompt].any()
        rows.append(
            ReadRow(
                task_id=str(sample.group_id),
                session_id=row.session_id,
                prompt_ids=sample.input_ids[:prompt].tolist(),
                response_ids=sample.input_ids[prompt:].tolist(),
                loss_mask=sample.completion_mask[prompt:].tolist(),
                logprobs=sample.old_log_probs[prompt:].tolist(),
                versions=row.versions.tolist(),
                reward=sample.metrics["reward"],
            )
        )
    return rows


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
def test_the_adapter_keeps_the_contract(check: Check) -> None:
    run_check(check, Subject(convert=convert, read=read, contract=adapter.CONTRACT))


def test_advantages_are_the_algorithms_and_each_row_has_the_version_of_its_oldest_token() -> None:
    found = to_rollout_samples(several(), 2, GRPO, group_id=7, first_version=3)
    ours = make_samples(several(), GRPO)
    assert [one.advantage for one in found] == [float(one.advantages[0]) for one in ours]
    assert [one.model_version for one in found] == [3, 4, 4, 5]  # 5, 6, 6 and 7, where 3 counts as 1
    assert {one.group_id for one in found} == {7}
    assert found[0].metrics == {"reward": 1.0, "reward_std": 0.5, "traces_per_session": 2.0}


def test_a_token_that_is_masked_has_no_say_in_the_version() -> None:
    found = to_rollout_samples(several(), 2, GRPO, mask=lambda one: last_turns(one, 1))
    assert found[0].completion_mask.tolist() == [0] * 8 + [1, 1]
    assert [one.model_version for one in found] == [6, 6, 6, 7]


def test_what_trls_rows_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="other than by 0 and 1"):
        to_rollout_samples(several(), 2, GRPO, mask=lambda one: outcome_weighted(one, 0.5))
    turns = Group("task-1", (session("s0", 1.0, scored(1.0, 0.0)), session("s1", 0.0, scored(0.5, 0.5))))
    with pytest.raises(InvalidRequest, match="different advantages, and TRL takes one a row"):
        to_rollout_samples(turns, 2, algorithm("grpo", {"turn_credit.weight": 0.5}))


def test_a_row_that_trl_would_drop_is_refused_or_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidRequest, match=r"s0/0 has 10 tokens, and token_budget is 9"):
        to_rollout_samples(several(), 2, GRPO, token_budget=9)
    with caplog.at_level(logging.WARNING):
        found = to_rollout_samples(several(), 2, GRPO, token_budget=9, long_rows="leave_out")
    assert [len(one.input_ids) for one in found] == [5, 5, 6]
    assert "trl.row_left_out trace_id=s0/0 tokens=10" in caplog.text


# TRL's own way from the queue to a batch.


def dataset(samples: Sequence[Any], version: int, *, max_staleness: int = 1) -> tuple[Any, dict[str, list[Any]]]:
    waiting = queue.Queue[Any]()
    for one in samples:
        waiting.put(one)
    metrics = defaultdict[str, list[Any]](list)
    make = of_trl("async_grpo_trainer").RolloutQueueDataset

    def no_more(_: float) -> None:
        raise StopAsyncIteration

    return make(waiting, lambda: version, no_more, 1.0, metrics, max_staleness, poll_interval_s=0.01), metrics


def trained_in(batch: dict[str, Any]) -> list[tuple[int, float, float]]:
    """(token, log-prob, advantage) of each loss term, in the order of TRL's row."""
    chosen = batch["token_index"][0] >= 0
    places = batch["token_index"][0][chosen]
    terms = (batch[name][0][chosen].tolist() for name in ("old_log_probs", "advantages"))
    return list(zip(batch["shift_labels"][0][places].tolist(), *terms, strict=True))


@pytest.mark.parametrize("planner", ["by number", "by tokens"])
def test_every_trained_token_reaches_trls_batch_once(planner: str) -> None:
    found = to_rollout_samples(several(), 2, GRPO)
    source, metrics = dataset(found, version=6)
    trainer = of_trl("async_grpo_trainer")
    if planner == "by number":
        rows = next(iter(trainer.FixedCountBatcher(source, 1, len(found))))
    else:
        long = trace(turns=[range(30, 51)], versions=[6])
        source.queue.put(to_rollout_samples(Group("long", (session("s0", 1.0, long),)), 1, GRPO)[0])  # does not fit
        rows = next(iter(trainer.TokenBudgetBatcher(source, 1, 24, metrics)))
    batch = trainer.DataCollatorForRollout(0, 1, metrics=metrics)([rows])
    expected = [
        (int(token), float(logprob), pytest.approx(one.advantage))
        for one in found
        for token, logprob, is_trained in zip(one.input_ids, one.old_log_probs, one.completion_mask, strict=True)
        if is_trained
    ]
    assert trained_in(batch) == expected
    assert not metrics["sample/dropped_stale_total"]


@pytest.mark.parametrize(("version", "lags"), [(6, [1, 0, 0, -1]), (7, [1, 1, 0]), (8, [1]), (9, [])])
def test_trls_own_rule_drops_the_stale_rows_of_a_group_and_keeps_the_others(version: int, lags: list[int]) -> None:
    """Rows of versions 5, 6, 6 and 7; the second group is there so that the queue has something to give."""
    found = to_rollout_samples(several(), 2, GRPO)
    fresh = to_rollout_samples(group(1.0, 0.0), 2, GRPO, first_version=1 - version)
    source, metrics = dataset([*found, *fresh], version=version)
    taken: list[Any] = list(islice(iter(source), len(lags) + len(fresh)))
    kept = [one for one in found if version - one.model_version <= 1]
    assert [one["advantage"] for one in taken] == [one.advantage for one in [*kept, *fresh]]
    assert len(metrics["sample/dropped_stale_total"]) == len(found) - len(lags)
    assert metrics["sample/staleness_mean"][: len(lags)] == lags
