"""Connects wings to the core: entry points of this distribution, in groups that only Gangline itself uses.

A wing that is not installed adds nothing, and code that needs it raises an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution
from typing import Any, Literal

from gangline.domain.errors import InvalidRequest

Group = Literal["gangline.commands", "gangline.importers", "gangline.parts", "gangline.server_parts"]


@cache
def wing_entries(group: Group) -> Mapping[str, EntryPoint]:
    """Name -> entry point, sorted by name. They are not loaded."""
    try:
        found = distribution("gangline").entry_points.select(group=group)
    except PackageNotFoundError:
        return {}
    return {entry.name: entry for entry in sorted(found)}


def wing_parts(group: Group) -> dict[str, Any]:
    """Name -> loaded object of each part, sorted by name."""
    return {name: entry.load() for name, entry in wing_entries(group).items()}


def wing_part(name: str) -> Any:
    """The object in group `gangline.parts`. Raises: InvalidRequest if its wing is not installed."""
    entry = wing_entries("gangline.parts").get(name)
    if entry is None:
        raise InvalidRequest(f"this installation of Gangline has no part {name!r}: install the whole package.")
    return entry.load()
