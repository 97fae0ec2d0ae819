"""Advantages by the optimal token baseline, from the scores of a whole step's batches (`credit.token_baseline`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gangline.train.learning.advantages import batch_advantages
from gangline.train.learning.algorithms import Algorithm
from gangline.train.learning.compute.head import TokenScores
from gangline.train.learning.credit.token_baseline import Energies, optimal_advantages, returns_of_traces
from gangline.train.learning.losses.corrections import correction_weights
from gangline.train.learning.packing import Batch


def with_optimal_baseline(
    batches: Sequence[Batch], scores: Sequence[TokenScores], algorithm: Algorithm, *, is_corrected: bool
) -> list[Batch]:
    """The batches with their advantages. scores: before the first update, with `square_sums`. is_corrected: whether the
    loss weighs tokens by their difference from the engine's policy.
    """
    if not batches:
        return []
    every = [sample for batch in batches for sample in batch.samples]
    numbers = {one: at for at, one in enumerate(dict.fromkeys(sample.session_id for sample in every))}
    tasks = {one: at for at, one in enumerate(dict.fromkeys(sample.task_id for sample in every))}
    task_of = {sample.session_id: tasks[sample.task_id] for sample in every}
    found = [
        _energies(batch, one, numbers, algorithm, is_corrected=is_corrected)
        for batch, one in zip(batches, scores, strict=True)
    ]
    tokens = Energies(*(np.concatenate(one) for one in zip(*found, strict=True)))
    advantages = batch_advantages(
        optimal_advantages(tokens, [task_of[number] for number in numbers]), algorithm.advantage
    )
    ends = np.cumsum([len(one.returns) for one in found])
    parts = np.split(advantages, ends[:-1])
    return [replace(batch, advantages=mine) for batch, mine in zip(batches, parts, strict=True)]


def _energies(
    batch: Batch, scores: TokenScores, numbers: dict[str, int], algorithm: Algorithm, *, is_corrected: bool
) -> Energies:
    assert scores.square_sums is not None
    logprobs = scores.logprobs.double().cpu()
    energies = 1 - 2 * logprobs.exp() + scores.square_sums.double().cpu()
    if is_corrected and len(logprobs):
        away = logprobs - torch.from_numpy(batch.behaviour_logprobs)
        energies = energies * correction_weights(away, torch.from_numpy(batch.traces), algorithm.loss.correction) ** 2
    sessions = np.array([numbers[sample.session_id] for sample in batch.samples], dtype=np.int64)
    return Energies(returns_of_traces(batch.rewards, batch.traces), energies.numpy(), sessions[batch.traces])
