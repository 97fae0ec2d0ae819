"""Token weights that correct for the difference between the sampling policy and the trainer's old policy.

Sources: truncated importance sampling; masked importance sampling (IcePop, arXiv 2510.18855, by token); rejection by a
divergence, as verl's `rollout_rs`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gangline.train.learning.loss_settings import CorrectionSettings, RejectionSettings
from gangline.train.learning.losses.arrays import MOST_LOG_RATIO, counts, sums
from gangline.train.learning.losses.divergences import kl_estimate


def correction_weights(log_weights: Tensor, traces: Tensor, settings: CorrectionSettings) -> Tensor:
    """[N], without gradient. log_weights: old minus behaviour log-probs."""
    log_weights = log_weights.detach().clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    if settings.level == "none":
        return torch.ones_like(log_weights)
    if settings.level == "sequence":
        log_weights = sums(log_weights, traces).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)[traces]
    weights = log_weights.exp()
    if settings.mode == "truncate":
        return weights.clamp(min=settings.floor, max=settings.cap)
    return torch.where((weights >= (settings.floor or 0.0)) & (weights <= settings.cap), weights, 0.0)


def kept_tokens(log_weights: Tensor, traces: Tensor, settings: RejectionSettings) -> Tensor:
    """[N] bool: False if the token, or its whole trace, is too far from the policy that sampled it."""
    log_weights = log_weights.detach().clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    level, _, estimator = settings.by.rpartition("_")
    # Estimators of KL(behaviour || old), from tokens of the behaviour policy.
    found = kl_estimate(torch.zeros_like(log_weights), log_weights, estimator)
    match level:
        case "sequence_sum":
            found = sums(found, traces)[traces]
        case "sequence_mean":
            found = (sums(found, traces) / counts(traces).clamp(min=1))[traces]
        case "sequence_max":
            largest = found.new_full((int(traces.max()) + 1,), float("-inf"))
            found = largest.scatter_reduce(0, traces, found, "amax")[traces]
        case _:
            pass
    return (found <= settings.most) & (found >= (-settings.most if settings.least is None else settings.least))
