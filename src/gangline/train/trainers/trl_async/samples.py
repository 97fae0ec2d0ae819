"""Converts groups to TRL's `RolloutSample`s with computed advantages.

Laws, in addition to the contract (`gangline.train.trainers.contract`): a row that TRL would drop for its length is
refused, or left out and logged. A row has the version of its own oldest trained token, so TRL drops old rows and
keeps the group's other rows, with advantages over the whole group.

Source: trl 1.16.0, experimental/async_grpo (`RolloutSample`, `RolloutQueueDataset`, `TokenBudgetBatcher`, `TreeRow`,
`compute_loss`), which is experimental in TRL.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Literal

import numpy as np

from gangline.domain.errors import InvalidRequest
from gangline.grading.transcript import chat_messages
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import Algorithm
from gangline.train.learning.masks import all_sampled
from gangline.train.learning.samples import Mask, Sample, make_samples
from gangline.train.trainers.contract import TrainerRow, rows_of

_log = logging.getLogger(__name__)

CONTRACT = 3
"""Version of the contract with trainers that this adapter fulfils."""

LongRows = Literal["refuse", "leave_out"]


def to_rollout_samples(
    group: Group,
    num_samples: int,
    algorithm: Algorithm,
    *,
    group_id: int = 0,
    first_version: int = 1,
    temperature: float = 1.0,
    token_budget: int = 0,
    long_rows: LongRows = "refuse",
    mask: Mask = all_sampled,
) -> list[Any]:
    """TRL's `RolloutSample` for each trace, in the order of sessions and traces.

    num_samples: sessions of the group. first_version: policy version that TRL counts as 1. token_budget: TRL's limit,
    above which it would drop a row; 0 or less: no limit. Prompt and response are concatenated in `input_ids`,
    `completion_mask` and `old_log_probs` [T]. TRL averages and logs `metrics`.

    Raises: InvalidGroup if the group is incomplete or of another temperature; InvalidRequest if a row is too long, if
    its tokens have unequal advantages or weights, which TRL's type cannot represent, or if the algorithm needs more
    than this group.
    """
    make = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker").RolloutSample
    algorithm.require_group_advantages("TRL", one_by_one=True)
    rows = rows_of(group, num_samples, temperature=temperature)
    samples = make_samples(group, algorithm, mask)
    found = [
        (row, sample)
        for row, sample in zip(rows, samples, strict=True)
        if sample.weights.any() and _fits(row, token_budget, long_rows)
    ]
    metrics = {"reward_std": group.deviation, "traces_per_session": len(rows) / num_samples}
    return [
        make(
            prompt=chat_messages(row.trace.prompt_messages),
            completion=chat_messages(row.trace.response_messages),
            input_ids=np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64),
            completion_mask=_whole(row, _zeros_and_ones(row, sample), np.int64),
            old_log_probs=_whole(row, row.logprobs, np.float32),
            advantage=_one_advantage(row, sample),
            model_version=int(row.versions[sample.weights != 0].min()) - first_version + 1,
            group_id=group_id,
            metrics={"reward": row.reward, **metrics},
        )
        for row, sample in found
    ]


def _fits(row: TrainerRow, token_budget: int, long_rows: LongRows) -> bool:
    """Raises: InvalidRequest."""
    length = len(row.prompt_ids) + len(row.response_ids)
    if token_budget <= 0 or length <= token_budget:
        return True
    if long_rows == "refuse":
        raise InvalidRequest(
            f"{row.trace_id} has {length} tokens, and token_budget is {token_budget}: TRL would drop it. Raise "
            "token_budget, leave such sessions out as they are collected (`DegenerateSettings.max_tokens`), or set "
            "long_rows to leave_out."
        )
    _log.warning("trl.row_left_out trace_id=%s tokens=%d token_budget=%d", row.trace_id, length, token_budget)
    return False


def _zeros_and_ones(row: TrainerRow, sample: Sample) -> Any:
    """[T] for the response. Raises: InvalidRequest."""
    if not np.isin(sample.weights, (0.0, 1.0)).all():
        raise InvalidRequest(
            f"the mask weighs tokens of {row.trace_id} other than by 0 and 1, and TRL's rows have no weights. Use "
            "another mask."
        )
    return sample.weights


def _one_advantage(row: TrainerRow, sample: Sample) -> float:
    """Raises: InvalidRequest."""
    values = np.unique(sample.advantages[sample.weights != 0])
    if len(values) > 1:
        raise InvalidRequest(
            f"tokens of {row.trace_id} have {len(values)} different advantages, and TRL takes one a row: leave out "
            "turn_credit, compare=roles and coalitions."
        )
    return float(values[0])


def _whole(row: TrainerRow, response: Any, dtype: Any) -> Any:
    """[T] for prompt and response."""
    return np.concatenate([np.zeros(len(row.prompt_ids)), response]).astype(dtype)
