"""Flat arrays of tokens, and sums over their traces."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_LOG_RATIO = 20.0
"""exp(20) is clipped by every setting; exp(800) would be infinite."""


@dataclass(frozen=True)
class LossInputs:
    """Arrays are [N] and floating-point unless stated otherwise. Log-probs are natural."""

    logprobs: Tensor
    """Log-probs of the policy in training, through which gradients flow."""
    behaviour_logprobs: Tensor
    """As reported by the engine when it sampled."""
    advantages: Tensor
    weights: Tensor
    """0 if the token is not trained on; otherwise multiplies the token's loss, usually 1."""
    traces: Tensor
    """int64, 0 to the number of traces - 1."""
    sessions: Tensor | None = None
    """[traces] int64: each trace's session. None: each trace is its own session. Only for `session_mean`."""
    old_logprobs: Tensor | None = None
    """Log-probs of the trainer's policy at the start of the update."""
    reference_logprobs: Tensor | None = None
    """Log-probs of the reference model, needed for a KL penalty."""
    teacher_logprobs: Tensor | None = None
    """Log-probs of the teacher, needed for distillation."""
    entropies: Tensor | None = None
    """Nats, of the distributions that the tokens were drawn from; needed for an entropy bonus."""


def sums(values: Tensor, labels: Tensor) -> Tensor:
    """[largest label + 1]"""
    return values.new_zeros(int(labels.max()) + 1).index_add(0, labels, values)


def counts(labels: Tensor) -> Tensor:
    return torch.bincount(labels)


def num_present(labels: Tensor) -> int:
    return int((counts(labels) > 0).sum())


def trace_means(values: Tensor, traces: Tensor) -> Tensor:
    """[N]: the mean over each token's trace."""
    return (sums(values, traces) / counts(traces).clamp(min=1))[traces]
