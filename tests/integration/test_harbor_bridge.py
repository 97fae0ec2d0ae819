"""Runtime `harbor` where Harbor is missing: it says so, and names what to run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gangline.domain.errors import RuntimeUnavailable
from gangline.runtimes.harbor.runtime import HarborRuntime
from gangline.settings import Settings


def _runtime(python: str | None) -> HarborRuntime:
    return HarborRuntime(Settings(harbor_python=None if python is None else Path(python)))


async def test_without_a_python_it_says_how_to_make_one() -> None:
    runtime = _runtime(None)
    assert "pip install harbor" in (runtime.missing() or "")
    with pytest.raises(RuntimeUnavailable, match="GANGLINE_HARBOR_PYTHON"):
        await runtime.check()


async def test_a_python_that_does_not_exist_is_named() -> None:
    runtime = _runtime("/nowhere/python")
    assert (runtime.missing() or "").startswith("/nowhere/python does not exist")
    with pytest.raises(RuntimeUnavailable, match="/nowhere/python cannot be started"):
        await runtime.check()


async def test_a_python_without_harbor_is_told(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nshift\nexec {sys.base_prefix}/bin/python3 -I "$@" 2>/dev/null\n')
    bare.chmod(0o755)
    with pytest.raises(RuntimeUnavailable, match="pip install harbor"):
        await _runtime(str(bare)).check()


async def test_a_python_that_has_it_is_not_missing() -> None:
    assert _runtime(sys.executable).missing() is None
