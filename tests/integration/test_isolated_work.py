"""Work on untrusted text in children of a fork server: what they have, what is left of them, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.child_work import Limits, OverLimit
from gangline.domain.errors import EvaluatorError
from gangline.grading.untrusted.isolated import ENVIRONMENT, ForkServers
from support.service.cli_process import processes_with, wait_for, wait_until_gone

WORK = "gangline.testing.child_work"
LIMITS = Limits(1, 256 << 20, 240.0)


@pytest.fixture
async def servers() -> AsyncGenerator[ForkServers]:
    found = ForkServers()
    yield found
    await found.close()


async def done(servers: ForkServers, action: str, limits: Limits = LIMITS, **given: Any) -> Any:
    return await servers(WORK, {"action": action, **given}, limits)


async def test_each_job_has_a_process_of_its_own_without_the_callers_environment(
    servers: ForkServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGLINE_TEST_SECRET", "secret")
    first, second = [await done(servers, "look", note=note) for note in ("mine", "other")]
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"] != os.getpid(), "one server has forked both"
    for found in (first, second):
        assert found["environment"] == ENVIRONMENT
        assert found["server_environment"] == ENVIRONMENT
        assert found["descriptors"] == [0, 1, 2, 3]
        assert found["folder"] == "/"
        assert found["session"] == found["pid"]
    assert (first["seen"], second["seen"]) == (["mine"], ["other"]), "nothing is left of the job before"


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("spin", "more than 1 s of processor time"),
        ("swell", "more than 256 MiB of memory"),
        ("fault", "crashed .signal 11."),
        ("leave", "crashed .exit code 9."),
        ("fail", "crashed .exit code 1.: ZeroDivisionError: no number"),
    ],
)
async def test_work_beyond_its_limits_is_the_doing_of_its_input(servers: ForkServers, action: str, says: str) -> None:
    with pytest.raises(OverLimit, match=says):
        await done(servers, action)
    assert (await done(servers, "look"))["seen"] == [None], "the server goes on"


async def test_a_failure_to_prepare_is_ours(servers: ForkServers) -> None:
    with pytest.raises(EvaluatorError, match="ended with 1: ValueError: not prepared"):
        await done(servers, "look", unprepared=True)
    with pytest.raises(EvaluatorError, match="ModuleNotFoundError"):
        await servers("gangline.no_such_module", {}, LIMITS)


async def sleeping(servers: ForkServers, mark: Path) -> asyncio.Task[Any]:
    """A job whose child sleeps, and has written its pid to `mark`."""
    task = asyncio.create_task(done(servers, "sleep", mark=str(mark)))
    while not mark.exists() or not mark.read_text():
        assert not task.done(), await task
        await asyncio.sleep(0.01)
    return task


async def test_a_child_that_nobody_waits_for_is_killed(servers: ForkServers, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    task = await sleeping(servers, mark)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(wait_until_gone, int(mark.read_text()))


async def test_many_jobs_at_once_get_their_own_results(servers: ForkServers) -> None:
    found = await asyncio.gather(*(done(servers, "look", note=number) for number in range(100)))
    assert [one["seen"] for one in found] == [[number] for number in range(100)]
    assert len({one["pid"] for one in found}) == 100


async def test_large_requests_and_results_come_whole(servers: ForkServers) -> None:
    text = "ü" * (4 << 20)
    assert (await done(servers, "look", note=text))["seen"] == [text]


async def test_a_server_that_died_is_replaced(servers: ForkServers) -> None:
    parent = (await done(servers, "look"))["parent"]
    os.kill(parent, signal.SIGKILL)
    wait_for(lambda: Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert (await done(servers, "look"))["parent"] != parent


async def test_its_end_leaves_nothing(tmp_path: Path) -> None:
    servers, mark = ForkServers(), tmp_path / "pid"
    task = await sleeping(servers, mark)
    await servers.close()
    with pytest.raises(EvaluatorError, match="has ended"):
        await task
    assert await asyncio.to_thread(wait_until_gone, int(mark.read_text()))
    assert processes_with(WORK) == {}
    await servers.close()
