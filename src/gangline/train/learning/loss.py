"""The loss: a clipped policy gradient with settings (`LossSettings`), over flat arrays of tokens.

Tokens of all traces are in one array [N], shared by padded, packed and tree batches; `traces` maps each token to its
trace. Only tokens with a weight take part: other values in the arrays, including NaN, change neither loss nor gradient.
Matches TRL's and verl's functions where they compute the same.

With pi the policy in training, pi_old the trainer's policy at the start of the update, and mu the sampling policy as
the engine reported it: `ratio = pi / pi_old`, `correction = min(pi_old / mu, cap)`. If pi_old is not given, it is mu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gangline.train.learning.loss_settings import LossSettings
from gangline.train.learning.losses.aggregation import LossTotals, aggregate
from gangline.train.learning.losses.arrays import MOST_LOG_RATIO, LossInputs, trace_means
from gangline.train.learning.losses.corrections import correction_weights, kept_tokens
from gangline.train.learning.losses.divergences import kl_estimate
from gangline.train.learning.losses.surrogates import token_losses

__all__ = ["LossInputs", "LossResult", "LossTotals", "policy_loss"]


@dataclass(frozen=True)
class LossResult:
    loss: Tensor
    """Scalar."""
    metrics: dict[str, float]
    """Means over this micro-batch's trained tokens."""


def policy_loss(inputs: LossInputs, settings: LossSettings, totals: LossTotals | None = None) -> LossResult:
    """Loss to minimise, 0 without trained tokens. totals: totals of the whole batch if `inputs` is a part of it.

    Micro-batches must not split a trace, nor a session under `session_mean`. Raises: ValueError if a KL penalty is set
    and there are no reference log-probs.
    """
    if settings.kl.coefficient > 0 and inputs.reference_logprobs is None:
        raise ValueError("a KL penalty needs reference_logprobs: compute them, or set kl.coefficient to 0.")
    if settings.entropy > 0 and inputs.entropies is None:
        raise ValueError("an entropy bonus needs entropies: compute them, or set entropy to 0.")
    if settings.distillation is not None and inputs.teacher_logprobs is None:
        raise ValueError("distillation needs teacher_logprobs: ask the teacher, or leave out loss.distillation.")
    trained = _taught(_only_trained(inputs), settings)
    if len(trained.logprobs) == 0:
        return LossResult(inputs.logprobs[:0].sum(), {})
    old = trained.behaviour_logprobs if trained.old_logprobs is None else trained.old_logprobs
    log_ratio = (trained.logprobs - old).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    if settings.ratio_level == "sequence":
        log_ratio = _of_sequence(log_ratio, trained)
    correction = _correction(old - trained.behaviour_logprobs, trained, settings)
    losses = token_losses(log_ratio, trained, settings) * correction
    if settings.kl.coefficient > 0 and trained.reference_logprobs is not None:
        kl = kl_estimate(trained.logprobs, trained.reference_logprobs, settings.kl.estimator)
        losses = losses + settings.kl.coefficient * kl
    if settings.entropy > 0 and trained.entropies is not None:
        losses = losses - settings.entropy * trained.entropies
    metrics = _ratio_metrics(log_ratio.detach().exp(), correction, trained, settings) | _distances(
        old, trained, settings
    )
    return LossResult(aggregate(losses * trained.weights, trained, settings, totals), metrics)


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
        teacher_logprobs=pick(inputs.teacher_logprobs),
        entropies=pick(inputs.entropies),
    )


def _taught(inputs: LossInputs, settings: LossSettings) -> LossInputs:
    """With the teacher's part in the advantages. It uses the policy in training, of which the ratio makes it an
    estimate, and no gradient flows through it.
    """
    if settings.distillation is None or inputs.teacher_logprobs is None:
        return inputs
    towards = settings.distillation.coefficient * (inputs.teacher_logprobs - inputs.logprobs.detach())
    return replace(inputs, advantages=settings.distillation.reward_weight * inputs.advantages + towards)


def _of_sequence(log_ratio: Tensor, inputs: LossInputs) -> Tensor:
    """The trace's mean as value, with the token's own gradient, so advantages may differ by token. Source: GSPO,
    4.3.
    """
    return log_ratio - log_ratio.detach() + trace_means(log_ratio, inputs.traces).detach()


def _correction(log_weights: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    weights = correction_weights(log_weights, inputs.traces, settings.correction)
    if settings.rejection is None:
        return weights
    return weights * kept_tokens(log_weights, inputs.traces, settings.rejection)


def _ratio_metrics(ratio: Tensor, correction: Tensor, inputs: LossInputs, settings: LossSettings) -> dict[str, float]:
    with torch.no_grad():
        up, down = inputs.advantages > 0, inputs.advantages < 0
        both = settings.clipping == "weights"
        low = (ratio < 1 - settings.clip_low) & (down | both)
        high = (ratio > 1 + settings.clip_high) & (up | both)
        weights = ratio * correction
        # All weights can be 0: a masking correction may put every token outside its bounds.
        share = weights.sum() ** 2 / (weights.square().sum() * len(weights)).clamp(min=torch.finfo(weights.dtype).tiny)
        return {
            "ratio_mean": float(ratio.mean()),
            "ratio_max": float(ratio.max()),
            "clipped_low": float(low.double().mean()),
            "clipped_high": float(high.double().mean()),
            "correction_mean": float(correction.mean()),
            "correction_zero": float((correction == 0).double().mean()),
            "effective_sample_share": float(share),
        }


def _distances(old: Tensor, inputs: LossInputs, settings: LossSettings) -> dict[str, float]:
    """Divergences of the policy in training from the other policies, and its entropy, if given."""
    with torch.no_grad():
        found = {
            "old_kl": float(kl_estimate(inputs.logprobs, old, "k3").mean()),
            # Tokens were drawn from the behaviour policy: KL(behaviour || policy).
            "behaviour_kl": float(kl_estimate(inputs.behaviour_logprobs, inputs.logprobs, "k3").mean()),
        }
        if inputs.reference_logprobs is not None:
            kl = kl_estimate(inputs.logprobs, inputs.reference_logprobs, settings.kl.estimator)
            found["reference_kl"] = float(kl.mean())
        if inputs.teacher_logprobs is not None:
            # Tokens were drawn from about this policy: KL(policy || teacher).
            found["teacher_kl"] = float(kl_estimate(inputs.logprobs, inputs.teacher_logprobs, "k1").mean())
        if inputs.entropies is not None:
            found["entropy"] = float(inputs.entropies.mean())
        return found
