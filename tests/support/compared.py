"""Rewards of the same tasks, there and here: required to be the same, and counted for docs/reference/rewards.md."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

__all__ = ["same"]


def same(
    runner: str,
    theirs: Mapping[tuple[str, str], Any],
    ours: Mapping[tuple[str, str], Any],
    *,
    but: Collection[tuple[str, str]] = (),
) -> None:
    """
    runner: whose rewards `theirs` are. Both by task and by what was done in it; None is no reward.
    but: those that differ by intention; they are counted as different.

    GANGLINE_COMPARED names a file that they are added to: a test that runs twice is counted once.
    """
    differing = {key: (theirs[key], ours.get(key)) for key in theirs if theirs[key] != ours.get(key)}
    if given := os.environ.get("GANGLINE_COMPARED"):
        found = [[*key, key not in differing] for key in theirs]
        with Path(given).open("a") as file:
            file.write(json.dumps({"runner": runner, "rewards": found}) + "\n")
    assert ours.keys() == theirs.keys()
    assert differing.keys() == set(but), differing
