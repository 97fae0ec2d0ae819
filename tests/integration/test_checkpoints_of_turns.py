"""A session's files at each of its turns: named by its records, kept for a while, bounded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from gangline.domain.completion import Completion
from gangline.domain.sandbox import Checkpoint, RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.node.sessions.attempt import Attempt
from gangline.node.sessions.parts import NodeParts
from gangline.node.sessions.reuse.checkpoints import Checkpoints
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from support.node.attempt import lease_of, node_parts

AGENT = """
import json, os, urllib.request
for turn in range(3):
    open("turns", "a").write(f"{turn}\\n")
    body = {"model": "m", "messages": [{"role": "user", "content": f"turn {turn}"}], "stream": turn == 1}
    key = "Bearer " + os.environ["OPENAI_API_KEY"]
    headers = {"authorization": key, "content-type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
open("turns", "a").write("end\\n")
"""
RUNTIME: dict[str, Any] = {
    "backend": "sandbox",
    "prepare": [{"type": "write", "path": "agent.py", "content": AGENT}],
}
TASK: dict[str, Any] = {
    "runtime": RUNTIME,
    "agent": {"harness": "shell", "settings": {"command": "python3 agent.py"}},
    "capture": {"checkpoints": "turn"},
}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def keeping(folder: Path, **bounds: Any) -> AsyncGenerator[NodeParts]:
    async with node_parts(folder) as parts:
        checkpoints = Checkpoints(BubblewrapRuntime().release, **bounds)
        yield msgspec.structs.replace(parts, checkpoints=checkpoints)
        await checkpoints.close()
        await BubblewrapRuntime().reap(parts.owner, parts.runtimes_folder)


def _named(completions: tuple[Completion, ...] | list[Completion]) -> list[str]:
    return [completion.metadata["checkpoint"] for completion in completions]


async def test_each_record_names_the_files_as_they_were_at_its_turn(tmp_path: Path) -> None:
    async with keeping(tmp_path) as parts:
        result = await Attempt(lease_of(**TASK), parts).live()
        assert result.outcome == "completed", result.failure
        named = _named(result.completions)
        assert len(set(named)) == 3
        for turn, checkpoint_id in enumerate(named):
            checkpoint = parts.checkpoints.find("s1", checkpoint_id)
            fork = await BubblewrapRuntime().start(
                RuntimeStart(
                    runtime_id=f"fork{turn}",
                    owner=parts.owner,
                    spec=RuntimeSpec.model_validate(RUNTIME),
                    folder=parts.runtimes_folder / f"fork{turn}",
                    proxy_port=parts.proxy_port,
                    base=checkpoint,
                )
            )
            assert await fork.download("turns") == "".join(f"{one}\n" for one in range(turn + 1)).encode()
            await fork.stop()


async def test_checkpoints_go_some_time_after_their_session(tmp_path: Path) -> None:
    async with keeping(tmp_path, hold_s=0.3) as parts:
        result = await Attempt(lease_of(**TASK), parts).live()
        assert parts.checkpoints.num_kept == 3, result.failure
        assert parts.checkpoints.num_bytes > 0
        await until(lambda: not os.listdir(parts.runtimes_folder))
        assert (parts.checkpoints.num_kept, parts.checkpoints.num_bytes) == (0, 0)


async def test_the_oldest_are_removed_where_all_take_too_much(tmp_path: Path) -> None:
    async with keeping(tmp_path, max_bytes=0) as parts:
        result = await Attempt(lease_of(**TASK), parts).live()
        assert result.outcome == "completed", result.failure
        assert (parts.checkpoints.num_kept, parts.checkpoints.num_bytes) == (0, 0)
        assert os.listdir(parts.runtimes_folder) == []


async def test_a_task_without_them_has_none(tmp_path: Path) -> None:
    async with keeping(tmp_path) as parts:
        result = await Attempt(lease_of(runtime=RUNTIME, agent=TASK["agent"]), parts).live()
        assert result.outcome == "completed", result.failure
        assert all("checkpoint" not in completion.metadata for completion in result.completions)
        assert parts.checkpoints.num_kept == 0


async def test_a_node_that_keeps_none_refuses_the_task(tmp_path: Path) -> None:
    async with node_parts(tmp_path) as parts:
        result = await Attempt(lease_of(**TASK), parts).live()
    assert result.failure is not None
    assert result.outcome == "infra_error"
    assert "capture.checkpoints" in result.failure.message


def _checkpoint(session_id: str, number: int, *, num_bytes: int, num_files: int = 1) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=f"{session_id}-{number}",
        runtime_id=session_id,
        owner="node",
        runtime="sandbox",
        spec_digest="",
        number=number,
        name=session_id,
        method="frozen_copy",
        is_frozen=True,
        num_bytes=num_bytes,
        num_files=num_files,
        made_at=float(number),
        folder="",
    )


class _Making:
    """A sandbox of which nothing but checkpoints is asked."""

    def __init__(self, made: list[Checkpoint]) -> None:
        self._made = made

    async def checkpoint(self, name: str = "") -> Checkpoint:
        return self._made.pop(0)


@pytest.mark.parametrize(("num_bytes", "num_files"), [(60 << 20, 1), (0, 15_000)], ids=["large", "many"])
async def test_an_agent_that_writes_much_loses_its_own_and_nobody_elses(num_bytes: int, num_files: int) -> None:
    released: list[str] = []

    async def release(checkpoint: Checkpoint) -> None:
        released.append(checkpoint.checkpoint_id)

    checkpoints = Checkpoints(release, max_bytes=100 << 20)
    modest = [_checkpoint("modest", number, num_bytes=10 << 20) for number in range(3)]
    greedy = [_checkpoint("greedy", number, num_bytes=num_bytes, num_files=num_files) for number in range(3, 6)]
    for session_id, made in (("modest", modest), ("greedy", greedy)):
        for _ in range(3):
            assert await checkpoints.take(session_id, cast("Sandbox", _Making(made))) is not None
    assert released == ["greedy-3", "greedy-4"]
    assert checkpoints.num_kept == 4
