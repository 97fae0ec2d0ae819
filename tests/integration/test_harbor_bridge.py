"""Runtime `harbor` where Harbor is missing, or is not what answers: it says so, and names what to run."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from gangline.domain.errors import RuntimeFailed, RuntimeUnavailable
from gangline.interop.harbor.runtime.bridge import Bridge
from gangline.interop.harbor.runtime.runtime import HarborRuntime
from gangline.settings.machine import Settings


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


async def test_a_part_that_its_receiver_cannot_take_fails_the_request(tmp_path: Path) -> None:
    """Nobody waits for an answer that nobody will read."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"id": 0}\'\nread line\necho \'{"id": 1, "part": "x"}\'\nread line\n')
    python.chmod(0o755)
    bridge = await Bridge.begin(python)
    try:
        async with asyncio.timeout(20):
            with pytest.raises(RuntimeFailed, match="not understood: 'no such part x'"):
                await bridge.ask("exec", "a", on_part=_refuse)
    finally:
        await bridge.close()


def _refuse(part: str) -> None:
    raise KeyError(f"no such part {part}")


async def test_what_is_no_answer_at_all_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Hello.\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeUnavailable, match="not understood: Expecting value"):
        await Bridge.begin(python)
