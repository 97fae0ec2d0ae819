"""The operator's sampling policy for a harness's parameters: per parameter override, clamp or pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gangline.domain.conversation import SamplingParams
from gangline.domain.seeds import derived_seed
from gangline.domain.task import ParameterRule, SamplingPolicy

NUM_SEEDS = 2**30
"""Number of seeds that engines are sent: each choice of a call adds its index, and SGLang has stored the sum in 32
bits."""

_USUAL: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""The providers' defaults."""

_UNLIMITED = ("max_tokens", "top_k")
"""Unlimited if not set."""

_WHOLE = ("max_tokens", "top_k", "seed")


class SamplingRules:
    """The seed and sampling policies of a session that has any."""

    def __init__(self, seed: int | None, policies: Sequence[SamplingPolicy]) -> None:
        """policies: the task's, then the operator's."""
        self._seed = seed
        self._policies = policies

    def used(self, requested: SamplingParams, number: int) -> SamplingParams:
        """Returns the parameters to send to the engine for the call with this number."""
        if self._seed is not None:
            requested = msgspec.structs.replace(requested, seed=derived_seed(self._seed, number) % NUM_SEEDS)
        return apply_policies(self._policies, requested)


def apply_policies(policies: Iterable[SamplingPolicy], requested: SamplingParams) -> SamplingParams:
    """Apply policies in order; the last one wins."""
    used = requested
    for policy in policies:
        changes: dict[str, Any] = {}
        for name in SamplingPolicy.model_fields:
            rule: ParameterRule | None = getattr(policy, name)
            if rule is not None:
                value = _ruled(name, rule, getattr(used, name))
                changes[name] = int(value) if value is not None and name in _WHOLE else value
        used = msgspec.structs.replace(used, **changes) if changes else used
    return used


def _ruled(name: str, rule: ParameterRule, requested: float | None) -> float | None:
    if rule.override is not None:
        return rule.override
    value = rule.default if requested is None else requested
    if rule.min is None and rule.max is None:
        return value
    if value is None and name in _UNLIMITED:
        return rule.max
    value = _USUAL.get(name) if value is None else value
    if value is None:
        return None
    value = value if rule.min is None else max(value, rule.min)
    return value if rule.max is None else min(value, rule.max)
