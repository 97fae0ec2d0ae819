"""Averages the losses of tokens (`loss.aggregation`), over a whole batch or a part of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gangline.train.learning.loss_settings import LossSettings
from gangline.train.learning.losses.arrays import LossInputs, counts, num_present, sums


@dataclass(frozen=True)
class LossTotals:
    """The divisors of a micro-batch's loss: totals of the whole batch, so that the losses of its parts add up."""

    num_tokens: int
    """Trained tokens."""
    num_traces: int
    """With a trained token."""
    num_sessions: int
    """With a trained token."""


def aggregate(losses: Tensor, inputs: LossInputs, settings: LossSettings, totals: LossTotals | None) -> Tensor:
    """losses: [N] of the trained tokens, as `inputs`. totals: totals of the whole batch if `inputs` is a part of it."""
    match settings.aggregation:
        case "token_mean":
            return losses.sum() / (len(losses) if totals is None else totals.num_tokens)
        case "fixed_length":
            num = num_present(inputs.traces) if totals is None else totals.num_traces
            return losses.sum() / (num * settings.fixed_length)
        case "sequence_mean":
            num = None if totals is None else totals.num_traces
            return _mean_of_means(losses, inputs.traces, num)
        case "session_mean":
            sessions = inputs.traces if inputs.sessions is None else inputs.sessions[inputs.traces]
            return _mean_of_means(losses, sessions, None if totals is None else totals.num_sessions)


def _mean_of_means(losses: Tensor, labels: Tensor, num: int | None) -> Tensor:
    means = sums(losses, labels) / counts(labels).clamp(min=1)
    return means.sum() / (num_present(labels) if num is None else num)
