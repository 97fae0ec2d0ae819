"""Estimates of a divergence from sampled tokens. Source: Schulman, Approximating KL divergence."""

from __future__ import annotations

from torch import Tensor

from gangline.train.learning.losses.arrays import MOST_LOG_RATIO


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Per token. Raises: ValueError if the estimator is unknown."""
    difference = logprobs - reference_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            away = (-difference).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
            return away.exp() - away - 1
        case _:
            raise ValueError(f"unknown KL estimator {estimator!r}; known: k1, k2, k3.")
