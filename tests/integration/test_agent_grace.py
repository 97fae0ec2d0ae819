"""`agent.grace_seconds`: programs of an agent that is ended get SIGTERM first, and that long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gangline.node.sessions.attempt import Attempt
from support.node.attempt import lease_of, node_parts


def flushing(folder: Path) -> str:
    """A program that writes what it has when it is told to end, and says so."""
    flush = f"echo flushed > {folder}/flushed; echo flushed; exit 0"
    return f"trap '{flush}' TERM; touch {folder}/ready; while :; do sleep 0.02; done"


def agent(folder: Path, grace_s: float) -> dict[str, object]:
    return {"harness": "shell", "settings": {"command": flushing(folder)}, "grace_seconds": grace_s}


@pytest.mark.parametrize("grace_s", [0, 30])
async def test_an_agent_out_of_time_flushes_what_it_has(tmp_path: Path, grace_s: float) -> None:
    async with node_parts(tmp_path / "node") as parts:
        lease = lease_of(agent=agent(tmp_path, grace_s), timeout_seconds=2)
        result = await Attempt(lease, parts).live()
    assert result.outcome == "agent_timeout"
    assert (tmp_path / "ready").exists()
    assert (tmp_path / "flushed").exists() == (grace_s > 0)
    assert result.artifacts["harness.stdout"] == (b"flushed\n" if grace_s else b"")


@pytest.mark.parametrize("grace_s", [0, 30])
async def test_an_agent_of_a_cancelled_session_flushes_what_it_has(tmp_path: Path, grace_s: float) -> None:
    async with node_parts(tmp_path / "node") as parts:
        living = asyncio.create_task(Attempt(lease_of(agent=agent(tmp_path, grace_s)), parts).live())
        async with asyncio.timeout(60):
            while not (tmp_path / "ready").exists():
                await asyncio.sleep(0.01)
        living.cancel()
        await asyncio.wait({living})
    assert (tmp_path / "flushed").exists() == (grace_s > 0)


async def test_an_agent_that_ends_by_itself_waits_for_no_grace(tmp_path: Path) -> None:
    left = "trap '' TERM; sleep 1000"
    quick = {"harness": "shell", "settings": {"command": f"({left}) & exit 0"}, "allow_no_model_call": True}
    async with node_parts(tmp_path / "node") as parts, asyncio.timeout(50):
        result = await Attempt(lease_of(agent={**quick, "grace_seconds": 60}), parts).live()
    assert result.outcome == "completed"
