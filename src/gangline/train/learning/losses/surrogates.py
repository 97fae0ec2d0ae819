"""Losses of tokens from their ratio and advantage, [N]: one function for each value of `loss.clipping`.

Sources: PPO (arXiv 1707.06347) with dual clip (1912.09729), CISPO (2506.13585), GPG (2504.02546), GMPO (2507.20673),
SAPO (2511.20347), DPPO (2602.04879), Clip-Cov and KL-Cov (2505.22617), DRO (2405.19107). Equal to verl's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gangline.train.learning.loss_settings import Clipping, LossSettings
from gangline.train.learning.losses.arrays import LossInputs, trace_means

Surrogate = Callable[[Tensor, LossInputs, LossSettings], Tensor]
"""log_ratio [N], inputs, settings -> losses [N]."""


def token_losses(log_ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    """log_ratio: [N] of the policy in training over the old policy, per token or per trace (`ratio_level`)."""
    return _SURROGATES[settings.clipping](log_ratio, inputs, settings)


def _clipped(log_ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    losses = torch.maximum(-inputs.advantages * ratio, -inputs.advantages * clipped)
    if settings.dual_clip is None:
        return losses
    return torch.where(inputs.advantages < 0, torch.minimum(losses, -inputs.advantages * settings.dual_clip), losses)


def _weights(log_ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    ratio = log_ratio.exp().clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -ratio.detach() * inputs.advantages * inputs.logprobs


def _plain(log_ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    return -inputs.advantages * inputs.logprobs


def _geometric(log_ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    sign = inputs.advantages.sign()
    clipped = log_ratio.clamp(-settings.clip_low, settings.clip_high)
    nearer = sign * torch.minimum(sign * log_ratio, sign * clipped)
    return -trace_means(inputs.advantages, inputs.traces) * trace_means(nearer, inputs.traces).exp()


def _soft(log_ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    steepness = torch.where(inputs.advantages > 0, settings.soft.up, settings.soft.down)
    return -torch.sigmoid(steepness * (log_ratio.exp() - 1)) * (4 / steepness) * inputs.advantages


def _divergence_tv(log_ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    moved = inputs.logprobs.exp() - (inputs.logprobs - log_ratio).exp()
    kept = torch.where(inputs.advantages > 0, moved <= settings.clip_high, moved >= -settings.clip_low)
    return _within(kept, log_ratio, inputs, settings)


def _divergence_kl(log_ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    """The divergence between two outcomes: this token, or any other."""
    now, old = inputs.logprobs.exp(), (inputs.logprobs - log_ratio).exp()
    divergence = -old * log_ratio + (1 - old) * ((1 - old + 1e-8) / (1 - now + 1e-8)).log()
    kept = torch.where(
        inputs.advantages > 0,
        (divergence <= settings.clip_high) | (now <= old),
        (divergence <= settings.clip_low) | (now >= old),
    )
    return _within(kept, log_ratio, inputs, settings)


def _within(kept: Tensor, log_ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    weights = log_ratio.exp().clamp(max=settings.divergence_cap) * kept
    return -weights.detach() * inputs.advantages * inputs.logprobs


def _covariance(log_ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Randomly chosen tokens with a large covariance of advantage and log-prob have no gradient."""
    ratio = log_ratio.exp()
    losses = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    chosen = settings.covariance
    found = _covariances(inputs)
    candidates = ((found > chosen.least) & (found < chosen.most) & (clipped <= losses)).nonzero()[:, 0]
    num = max(int(chosen.share * len(found)), 1)
    kept = torch.ones_like(losses)
    kept[candidates[torch.randperm(len(candidates))[:num].to(candidates.device)]] = 0.0
    return torch.maximum(losses, clipped) * kept


def _covariance_kl(log_ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Tokens with the largest covariance are penalised for moving; nothing is clipped."""
    chosen = settings.covariance
    num = max(int(chosen.share * len(log_ratio)), 1)
    penalty = torch.zeros_like(log_ratio)
    penalty[_covariances(inputs).topk(num).indices] = chosen.penalty
    return -inputs.advantages * log_ratio.exp() + penalty * log_ratio.abs()


def _covariances(inputs: LossInputs) -> Tensor:
    logprobs = inputs.logprobs.detach()
    return (inputs.advantages - inputs.advantages.mean()) * (logprobs - logprobs.mean())


def _quadratic(log_ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    return -inputs.advantages * inputs.logprobs + 0.5 * settings.quadratic * log_ratio.square()


_SURROGATES: Mapping[Clipping, Surrogate] = {
    "surrogate": _clipped,
    "weights": _weights,
    "none": _plain,
    "geometric": _geometric,
    "soft": _soft,
    "divergence_tv": _divergence_tv,
    "divergence_kl": _divergence_kl,
    "covariance": _covariance,
    "covariance_kl": _covariance_kl,
    "quadratic": _quadratic,
}
