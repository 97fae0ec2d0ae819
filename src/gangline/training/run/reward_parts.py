"""Parts of rewards: what evaluators `composite` and `staged` found, as means over the sessions of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from gangline.domain.session import SessionResult

__all__ = ["mean_reward_parts"]


def mean_reward_parts(sessions: Iterable[SessionResult]) -> dict[str, float]:
    """Name -> mean reward of a part of `composite`, or share of sessions that passed a gate of `staged`.

    Names of nested parts are joined by dots. A gate that was not asked, since an earlier one was not passed, is not
    passed.
    """
    sums: dict[str, float] = {}
    num_asked, num_staged, level_of = Counter[str](), Counter[str](), dict[str, str]()
    for session in sessions:
        for level, name, value in _found(session.reward_details, ""):
            if name is None:
                num_staged[level] += 1
                continue
            sums[name] = sums.get(name, 0.0) + value
            num_asked[name] += 1
            level_of[name] = level
    return {name: total / (num_staged[level_of[name]] or num_asked[name]) for name, total in sums.items()}


def _found(details: Mapping[str, Any], level: str) -> Iterator[tuple[str, str | None, float]]:
    """(level, name, value) of each part; without a name, once for each level of gates."""
    parts, stages = _entries(details.get("parts")), _entries(details.get("stages"))
    if stages:
        yield f"{level}stages", None, 0.0
    for name, entry in parts.items():
        yield f"{level}parts", f"{level}{name}", float(entry["reward"])
    for name, entry in stages.items():
        yield f"{level}stages", f"{level}{name}", float(entry.get("passed") is True)
    for name, entry in (parts | stages).items():
        inner = entry.get("details")
        if isinstance(inner, dict):
            yield from _found(cast("dict[str, Any]", inner), f"{level}{name}.")


def _entries(value: Any) -> dict[str, dict[str, Any]]:
    """Entries that have a reward; a grader's own details may have other values under the same names."""
    if not isinstance(value, dict):
        return {}
    entries = cast("dict[str, Any]", value)
    return {name: entry for name, entry in entries.items() if isinstance(entry, dict) and _has_reward(entry)}


def _has_reward(entry: Any) -> bool:
    reward = entry.get("reward")
    return isinstance(reward, int | float) and math.isfinite(reward)
