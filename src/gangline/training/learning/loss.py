"""The one loss: a clipped policy gradient with settings (`LossSettings`), over flat arrays of tokens.

Tokens of all traces stand in one array [N], so that padded, packed and tree batches share it; `traces` says which trace
a token is of. Only tokens with a weight take part: other values in the arrays, NaN included, change neither loss nor
gradient. Equal to TRL's and verl's own functions where they do the same.

With pi the policy in training, pi_old the trainer's policy at the start of the update, and mu the policy that sampled,
as the engine reported it: `ratio = pi / pi_old`, `correction = min(pi_old / mu, cap)`. Where pi_old is not given, it is
mu.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.training.learning.loss_settings import CorrectionSettings, LossSettings

__all__ = ["LossInputs", "LossResult", "LossTotals", "kl_estimate", "policy_loss"]

_MOST_LOG_RATIO = 20.0
"""exp(20) is clipped away by any setting; exp(800) would be infinite."""


@dataclass(frozen=True)
class LossInputs:
    """Arrays are [N], floating unless said otherwise. Log-probs are natural."""

    logprobs: Tensor
    """Log-probs of the policy in training; gradients go through these."""
    behaviour_logprobs: Tensor
    """As the engine reported them when it sampled."""
    advantages: Tensor
    weights: Tensor
    """0 where a token is not trained on; else it multiplies the token's loss, 1 usually."""
    traces: Tensor
    """int64, 0 to the number of traces - 1."""
    sessions: Tensor | None = None
    """[traces] int64: which session a trace is of. None: each is one of its own. Only for `session_mean`."""
    old_logprobs: Tensor | None = None
    """Log-probs of the trainer's policy at the start of the update."""
    reference_logprobs: Tensor | None = None
    """Log-probs of the reference model; needed with a KL penalty."""


@dataclass(frozen=True)
class LossTotals:
    """The divisors of a micro-batch's loss: the whole batch's numbers, so that its parts' losses add up."""

    num_tokens: int
    """Trained tokens."""
    num_traces: int
    """With a trained token."""
    num_sessions: int
    """With a trained token."""


@dataclass(frozen=True)
class LossResult:
    loss: Tensor
    """Scalar."""
    metrics: dict[str, float]
    """Means over this micro-batch's trained tokens."""


def policy_loss(inputs: LossInputs, settings: LossSettings, totals: LossTotals | None = None) -> LossResult:
    """Loss to minimise, 0 without trained tokens. totals: of the whole batch when `inputs` is a part of it.

    A trace must not be cut by micro-batches, nor a session under `session_mean`.
    Raises: ValueError when a KL penalty is set and there are no reference log-probs.
    """
    if settings.kl.coefficient > 0 and inputs.reference_logprobs is None:
        raise ValueError("a KL penalty needs reference_logprobs: compute them, or set kl.coefficient to 0.")
    trained = _only_trained(inputs)
    if len(trained.logprobs) == 0:
        return LossResult(inputs.logprobs[:0].sum(), {})
    old = trained.behaviour_logprobs if trained.old_logprobs is None else trained.old_logprobs
    log_ratio = (trained.logprobs - old).clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO)
    if settings.ratio_level == "sequence":
        log_ratio = _of_sequence(log_ratio, trained)
    ratio = log_ratio.exp()
    correction = _correction(old - trained.behaviour_logprobs, trained, settings.correction)
    losses = _surrogate(ratio, trained, settings) * correction
    metrics = _metrics(ratio.detach(), correction, old, trained, settings)
    if settings.kl.coefficient > 0 and trained.reference_logprobs is not None:
        kl = kl_estimate(trained.logprobs, trained.reference_logprobs, settings.kl.estimator)
        metrics["reference_kl"] = float(kl.detach().mean())
        losses = losses + settings.kl.coefficient * kl
    return LossResult(_aggregate(losses * trained.weights, trained, settings, totals), metrics)


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Per token. Source: Schulman, Approximating KL divergence."""
    difference = logprobs - reference_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            away = (-difference).clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO)
            return away.exp() - away - 1
        case _:
            raise ValueError(f"unknown KL estimator {estimator!r}; known: k1, k2, k3.")


def _only_trained(inputs: LossInputs) -> LossInputs:
    keep = inputs.weights != 0

    def pick(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[keep]

    return LossInputs(
        logprobs=inputs.logprobs[keep],
        behaviour_logprobs=inputs.behaviour_logprobs[keep],
        advantages=inputs.advantages[keep],
        weights=inputs.weights[keep],
        traces=inputs.traces[keep],
        sessions=inputs.sessions,
        old_logprobs=pick(inputs.old_logprobs),
        reference_logprobs=pick(inputs.reference_logprobs),
    )


def _of_sequence(log_ratio: Tensor, inputs: LossInputs) -> Tensor:
    """Value of the trace's mean, gradient of the token's own: so advantages may differ by token. Source: GSPO, 4.3."""
    mean = (_sums(log_ratio, inputs.traces) / _counts(inputs.traces).clamp(min=1)).detach()
    return log_ratio - log_ratio.detach() + mean[inputs.traces]


def _surrogate(ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    if settings.clipping == "weights":
        return -clipped.detach() * inputs.advantages * inputs.logprobs
    losses = torch.maximum(-inputs.advantages * ratio, -inputs.advantages * clipped)
    if settings.dual_clip is None:
        return losses
    return torch.where(inputs.advantages < 0, torch.minimum(losses, -inputs.advantages * settings.dual_clip), losses)


def _correction(log_weights: Tensor, inputs: LossInputs, settings: CorrectionSettings) -> Tensor:
    log_weights = log_weights.detach().clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO)
    match settings.level:
        case "none":
            return torch.ones_like(log_weights)
        case "token":
            return log_weights.exp().clamp(max=settings.cap)
        case "sequence":
            whole = _sums(log_weights, inputs.traces).clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO)
            return whole.exp().clamp(max=settings.cap)[inputs.traces]


def _aggregate(losses: Tensor, inputs: LossInputs, settings: LossSettings, totals: LossTotals | None) -> Tensor:
    match settings.aggregation:
        case "token_mean":
            return losses.sum() / (len(losses) if totals is None else totals.num_tokens)
        case "fixed_length":
            num = _num_present(inputs.traces) if totals is None else totals.num_traces
            return losses.sum() / (num * settings.fixed_length)
        case "sequence_mean":
            num = None if totals is None else totals.num_traces
            return _mean_of_means(losses, inputs.traces, num)
        case "session_mean":
            sessions = inputs.traces if inputs.sessions is None else inputs.sessions[inputs.traces]
            return _mean_of_means(losses, sessions, None if totals is None else totals.num_sessions)


def _mean_of_means(losses: Tensor, labels: Tensor, num: int | None) -> Tensor:
    means = _sums(losses, labels) / _counts(labels).clamp(min=1)
    return means.sum() / (_num_present(labels) if num is None else num)


def _sums(values: Tensor, labels: Tensor) -> Tensor:
    sums = values.new_zeros(int(labels.max()) + 1)
    return sums.index_add(0, labels, values)


def _counts(labels: Tensor) -> Tensor:
    return torch.bincount(labels)


def _num_present(labels: Tensor) -> int:
    return int((_counts(labels) > 0).sum())


def _metrics(
    ratio: Tensor, correction: Tensor, old: Tensor, inputs: LossInputs, settings: LossSettings
) -> dict[str, float]:
    with torch.no_grad():
        up, down = inputs.advantages > 0, inputs.advantages < 0
        both = settings.clipping == "weights"
        low = (ratio < 1 - settings.clip_low) & (down | both)
        high = (ratio > 1 + settings.clip_high) & (up | both)
        weights = ratio * correction
        return {
            "ratio_mean": float(ratio.mean()),
            "ratio_max": float(ratio.max()),
            "clipped_low": float(low.double().mean()),
            "clipped_high": float(high.double().mean()),
            "correction_mean": float(correction.mean()),
            "effective_sample_share": float(weights.sum() ** 2 / (weights.square().sum() * len(weights))),
            "old_kl": float(kl_estimate(inputs.logprobs, old, "k3").mean()),
        }
