"""The metrics of a step, collected from its batches."""

from __future__ import annotations

import torch
from torch import Tensor

from gangline.train.learning.packing import Batch


class StepMetrics:
    """Weighted means, maxima for keys that end in `_max`, and sums."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._other: dict[str, float] = {}

    @property
    def is_empty(self) -> bool:
        return not self._sums

    def add(self, weight: float, values: dict[str, float]) -> None:
        for name, value in values.items():
            if name.endswith("_max"):
                self._other[name] = max(value, self._other.get(name, value))
            else:
                self._sums[name] = self._sums.get(name, 0.0) + weight * value
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def sum(self, name: str, value: float) -> None:
        self._other[name] = self._other.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        return {name: total / (self._weights[name] or 1.0) for name, total in self._sums.items()} | self._other


def engine_mismatch(batch: Batch, logprobs: Tensor) -> dict[str, float]:
    """Differences between the engine's and the trainer's log-probs of the same tokens, before the update."""
    behaviour = torch.as_tensor(batch.behaviour_logprobs, device=logprobs.device)
    gap = (logprobs.double() - behaviour).clamp(-20.0, 20.0)
    ratios = gap.exp()
    return {
        "engine_gap_mean": float(gap.abs().mean()),
        "engine_gap_max": float(gap.abs().max()),
        "engine_effective_sample_share": float(ratios.sum() ** 2 / (ratios.square().sum() * len(ratios))),
    }
