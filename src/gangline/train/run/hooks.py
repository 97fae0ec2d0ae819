"""Hooks: functions of a user's own distribution that an experiment names by entry points of `gangline.hooks`.

A hook is called with its subject and returns a decision. A wrong type or an exception ends the run with an error that
names the hook. Hooks run in the trainer's process. Source: "Inside the Agentic RL Training Loop", extension points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from gangline.domain.errors import InvalidGroup
from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trace
from gangline.settings import plugins
from gangline.train.collecting.groups import Group
from gangline.train.learning.masks import Weights
from gangline.train.options import TrainingOptions


class HookSettings(TrainingOptions):
    """Names of entry points of the group `gangline.hooks`; None means no hook."""

    reward: str | None = None
    """`(session) -> float`: the reward used for a session, instead of its evaluator's."""
    prepare: str | None = None
    """`(group) -> group`: changes a whole group before selection."""
    filter: str | None = None
    """`(session) -> str | None`: why a session is left out of its group, starting with the kind and a colon."""
    admit: str | None = None
    """`(group) -> group | None`: the part of a group that is worth training on."""
    mask: str | None = None
    """`(trace) -> weights`: one weight per token of the response, multiplied with the weights of `mask`."""

    @property
    def named(self) -> dict[str, str]:
        """Place -> name, for configured hooks."""
        return {place: name for place, name in self.model_dump().items() if name is not None}


@dataclass(frozen=True)
class Hooks:
    """An experiment's hooks, whose results are checked at every call."""

    reward: Callable[[SessionResult], float] | None = None
    prepare: Callable[[Group], Group] | None = None
    filter: Callable[[SessionResult], str | None] | None = None
    admit: Callable[[Group], Group | None] | None = None
    mask: Callable[[Trace], Weights] | None = None


def load_hooks(settings: HookSettings) -> Hooks:
    """Raises: UnknownPlugin (lists the known names), InvalidRequest if a package is missing."""
    check: dict[str, Callable[[Any, Any], Any]] = {
        "reward": _number,
        "prepare": _group,
        "filter": _reason,
        "admit": _group_or_none,
        "mask": _weights,
    }
    return Hooks(**{place: _checked(place, name, check[place]) for place, name in settings.named.items()})


def _checked(place: str, name: str, check: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """The hook, with its errors turned into InvalidGroup and its result type checked."""
    hook: Callable[[Any], Any] = plugins.load("hook", name)

    def call(subject: Any) -> Any:
        try:
            return check(hook(subject), subject)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise InvalidGroup(f"hooks.{place}: hook {name!r} failed on {_id(subject)}: {why}") from error

    return call


def _id(subject: Group | SessionResult | Trace) -> str:
    match subject:
        case Group():
            return subject.task_id
        case SessionResult():
            return subject.session_id
        case Trace():
            return subject.trace_id


def _number(found: Any, _session: Any) -> float:
    if isinstance(found, Real):
        return float(found)
    raise TypeError(f"a reward is a number, and it returned {type(found).__name__}")


def _group(found: Any, _group: Any) -> Group:
    if isinstance(found, Group):
        return found
    raise TypeError(f"it must return a Group, and returned {type(found).__name__}")


def _group_or_none(found: Any, group: Any) -> Group | None:
    return None if found is None else _group(found, group)


def _reason(found: Any, _session: Any) -> str | None:
    if found is None or isinstance(found, str):
        return found
    raise TypeError(f"it must return a reason or None, and returned {type(found).__name__}")


def _weights(found: Any, trace: Trace) -> Weights:
    weights = np.asarray(found, dtype=np.float32)
    if weights.shape != (len(trace.response_ids),):
        raise ValueError(f"it must return {len(trace.response_ids)} weights, and returned shape {weights.shape}")
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("weights must be finite and at least 0")
    return weights
