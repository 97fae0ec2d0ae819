"""Parts of a session's reward, as reported by the evaluators `composite` and `staged`.

Names of nested parts are joined by dots. A nested part is already included in its parent, so it only counts if it is
named explicitly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gangline.domain.errors import InvalidGroup
from gangline.domain.session import SessionResult
from gangline.rows.rewards import ON_UNPARSED
from gangline.train.collecting.groups import LOW_DEVIATION, Group


def rewards_of_parts(group: Group, names: Sequence[str] = ()) -> dict[str, NDArray[np.float64]]:
    """Name of a part -> its rewards [S]. names: () means all parts that are not nested.

    A gate of `staged` that was skipped because an earlier one failed is 0. Raises: InvalidGroup if a session has no
    such part.
    """
    found = [_parts_of(session) for session in group.sessions]
    wanted = names or sorted({name for parts, _ in found for name in parts if "." not in name})
    if not wanted:
        raise InvalidGroup(
            f"advantage.rewards `parts` compares the parts of a reward, and no session of {group.task_id} has parts: "
            "use the evaluator composite or staged, or leave advantage.rewards out."
        )
    return {name: np.array([_part(one, name, group.task_id) for one in found]) for name in wanted}


def parts_differ(group: Group, names: Sequence[str] = ()) -> bool:
    """Whether the sessions differ in any part. Raises: as `rewards_of_parts`."""
    return any(float(np.std(values)) >= LOW_DEVIATION for values in rewards_of_parts(group, names).values())


def _parts_of(session: SessionResult) -> tuple[dict[str, float], bool]:
    """The parts, and whether there are gates. If `on_unparsed` lowered the session's reward, its parts are capped at
    that reward.
    """
    entries = list(found_parts(session.reward_details))
    most = math.inf if session.reward is None or ON_UNPARSED not in session.reward_details else session.reward
    found = {name: min(value, most) for _, name, value in entries if name is not None}
    return found, any(name is None for _, name, _ in entries)


def _part(found: tuple[dict[str, float], bool], name: str, task_id: str) -> float:
    parts, has_gates = found
    if name in parts or has_gates:
        return parts.get(name, 0.0)
    known = ", ".join(sorted(parts)) or "none"
    raise InvalidGroup(
        f"a session of {task_id} has no part {name!r} in its reward (its parts: {known}): name others in "
        "advantage.part_weights, or have the evaluator find it in every session."
    )


def found_parts(details: Mapping[str, Any], level: str = "") -> Iterator[tuple[str, str | None, float]]:
    """(level, name, value) of each part in an evaluator's details. Each level of gates also yields one entry without a
    name.
    """
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
            yield from found_parts(cast("dict[str, Any]", inner), f"{level}{name}.")


def _entries(value: Any) -> dict[str, dict[str, Any]]:
    """Entries with a reward. A grader's own details may have other values under the same names."""
    if not isinstance(value, dict):
        return {}
    entries = cast("dict[str, Any]", value)
    return {name: entry for name, entry in entries.items() if isinstance(entry, dict) and _has_reward(entry)}


def _has_reward(entry: Any) -> bool:
    reward = entry.get("reward")
    return isinstance(reward, int | float) and math.isfinite(reward)
