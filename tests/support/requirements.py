"""What a test needs from the machine: without it the test is skipped; with GANGLINE_REQUIRE_ALL=1 (CI) it fails."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

__all__ = ["DOES_NOT_APPLY", "TOOLS", "everything_is_required", "need", "need_command", "need_module", "need_tool"]

DOES_NOT_APPLY = "does not apply:"
"""How the reason of a skip begins that is right even where everything is required."""
TOOLS = Path(os.environ.get("GANGLINE_TOOLS") or Path(__file__).parents[2] / ".tools")
"""Where `make tools` puts agent programs."""


def everything_is_required() -> bool:
    return os.environ.get("GANGLINE_REQUIRE_ALL") == "1"


def need(condition: object, what: str) -> None:
    """Skip the test unless `condition` holds; `what` names what is missing and the line that installs it."""
    if not condition:
        pytest.skip(what)


def need_command(name: str, install: str) -> None:
    need(shutil.which(name), f"{name} is missing: {install}")


def need_module(name: str, install: str) -> None:
    need(importlib.util.find_spec(name), f"{name} is missing: {install}")


def need_tool(name: str) -> Path:
    """Path of an agent program in TOOLS."""
    path = TOOLS / "node_modules" / ".bin" / name
    need(path.exists(), f"{name} is missing: make tools")
    return path
