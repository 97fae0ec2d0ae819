"""Hooks that leave something running: the result waits for none of it."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path

import pytest

from gangline.node.sessions.leases.hooks import Hooks
from support.page.sessions import working_session


async def test_what_a_hook_left_behind_cannot_hold_up_the_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its output is open in a process that has left the hook's group, so nobody sees the end of that output."""
    told = tmp_path / "pid"
    caplog.set_level(logging.ERROR, logger="gangline.node")
    hooks = Hooks([f"setsid sleep 100000 & echo $! > {told}"], budget_s=0.5)
    try:
        async with asyncio.timeout(30):
            await hooks.run(working_session("task-1.0"))
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(told.read_text()), 9)
    assert caplog.messages == []


async def test_the_last_words_of_a_hook_that_failed_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="gangline.node")
    await Hooks(["cat > /dev/null; echo it is broken >&2; exit 3"]).run(working_session("task-1.0"))
    (message,) = caplog.messages
    assert "exited 3: it is broken" in message
