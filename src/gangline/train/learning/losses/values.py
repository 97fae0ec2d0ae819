"""The critic's loss: half the larger squared error of the value and the clipped value.

Source: PPO's implementations (TRL's `ppo_trainer`, verl's `compute_value_loss`, with equal results).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gangline.train.learning.loss_settings import LossSettings
from gangline.train.learning.losses.aggregation import LossTotals, aggregate
from gangline.train.learning.losses.arrays import LossInputs


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    inputs: LossInputs,
    settings: LossSettings,
    *,
    clip: float | None,
    totals: LossTotals | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The scalar loss, 0 without trained tokens, and its metrics.

    values, old_values, returns: [N] of trained tokens, as `inputs`. Averaged like the policy's loss, but every token
    has weight 1 whatever its mask weight, because a value is an expectation.
    """
    if len(values) == 0:
        return values.sum(), {}
    errors = (values - returns).square()
    metrics = {"value_clipped": 0.0}
    if clip is not None:
        clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
        metrics["value_clipped"] = float((clipped > errors).double().mean())
        errors = torch.maximum(errors, clipped)
    return 0.5 * aggregate(errors, inputs, settings, totals), metrics
