import asyncio
import os
from pathlib import Path

import pytest

from gangline.domain.errors import EvaluatorError
from gangline.grading.untrusted.patterns import matches
from support.node.footprint import children


async def test_a_pattern_without_end_is_stopped_and_gives_no_reward() -> None:
    with pytest.raises(EvaluatorError, match="took longer"):
        await matches([(r"(a+)+$", False)], "a" * 40 + "b", timeout_s=0.5)


async def test_answers_come_in_the_order_of_the_patterns() -> None:
    assert await matches([("a", False), ("B", False), ("B", True)], "ab\udcff", timeout_s=60) == [True, False, True]


async def test_the_process_has_none_of_the_nodes_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_KEY", "secret")
    matching = asyncio.create_task(matches([(r"(a+)+$", False)], "a" * 40 + "b", timeout_s=5))
    try:
        async with asyncio.timeout(30):
            while not (environments := [environment(pid) for pid in children(os.getpid()) if b"json" in command(pid)]):
                await asyncio.sleep(0.01)
        assert b"secret" not in b"".join(environments)
    finally:
        matching.cancel()
        await asyncio.wait([matching])


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
