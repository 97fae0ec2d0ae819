"""Sandboxes that wait for a session: the same as new ones, given once, for the same specification and submitter."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gangline.domain.errors import RuntimeFailed
from gangline.domain.sandbox import Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.node.sessions.parts import NodeParts
from gangline.node.sessions.reuse.warm import WarmPool, WarmSizes
from gangline.node.sessions.sandboxes import start_prepared
from gangline.sandbox.shared.users import grader_uid
from support.node.attempt import node_parts

SPEC = RuntimeSpec.model_validate(
    {
        "backend": "sandbox",
        "env": {"MINE": "1"},
        "prepare": [
            {"type": "write", "path": "tool", "content": "prepared"},
            {"type": "exec", "command": "mkdir made; echo $MINE > made/file"},
        ],
    }
)
_LOOK = """
id; env | sort; pwd; umask; ulimit -a; hostname
find / -xdev \\( -path /proc -o -path /usr -o -path /etc -o -path /opt \\) -prune \
  -o -printf '%y %m %U %G %p %l\\n' 2>/dev/null | sort
for path in "$HOME" /tmp /dev/shm /var/tmp .; do find $path -printf '%y %m %s %p\\n'; done | sort
ps -e -o user,comm 2>/dev/null || cat /proc/[0-9]*/comm | sort
cat /proc/sysvipc/msg /proc/sysvipc/sem /proc/sysvipc/shm /proc/net/unix | wc -l
cat /proc/keys /proc/key-users | wc -c
cat made/file tool
"""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def pool(folder: Path, **sizes: Any) -> AsyncGenerator[tuple[WarmPool, NodeParts]]:
    async with node_parts(folder) as parts:
        warm = WarmPool(lambda spec, runtime_id: start_prepared(parts, spec, runtime_id), WarmSizes(**sizes))
        try:
            yield warm, parts
        finally:
            await warm.close()
        assert os.listdir(parts.runtimes_folder) == [], "a warm sandbox was left behind"


async def taken(warm: WarmPool, spec: RuntimeSpec = SPEC, submitter: str | None = None) -> Sandbox:
    assert await warm.take(spec, submitter) is None
    await until(lambda: warm.num_spare > 0)
    handle = await warm.take(spec, submitter)
    assert handle is not None
    return handle


async def _looked(handle: Sandbox) -> str:
    """All that a program sees of its surroundings, with words in place of the users' numbers."""
    result = await handle.exec(_LOOK)
    (uid,) = re.findall(rb"uid=(\d+)", result.stdout)
    return result.stdout.decode().replace(uid.decode(), "UID").replace(str(grader_uid(int(uid))), "GRADER")


async def test_a_warm_sandbox_cannot_be_told_from_a_new_one(tmp_path: Path) -> None:
    async with pool(tmp_path, count=1) as (warm, parts):
        waited = await taken(warm)
        new = await start_prepared(parts, SPEC, "new")
        assert await _looked(waited) == await _looked(new)
        assert waited.limits() == new.limits()
        facts = [(one.workdir, one.home, one.grader_home, one.proxy_url) for one in (waited, new)]
        assert facts[0] == facts[1]
        await asyncio.gather(waited.stop(), new.stop())


async def test_each_is_given_once(tmp_path: Path) -> None:
    async with pool(tmp_path, count=3) as (warm, _parts):
        handles = [await taken(warm)]
        await handles[0].exec("echo secret > mine")
        for number in range(2):
            await until(lambda: warm.num_spare > 0)
            handle = await warm.take(SPEC, None)
            assert handle is not None
            assert not (await handle.exec("test -e mine")).ok, f"sandbox {number} was used before"
            handles.append(handle)
        assert len({handle.runtime_id for handle in handles}) == 3
        await asyncio.gather(*(handle.stop() for handle in handles))


async def test_another_specification_or_submitter_gets_none(tmp_path: Path) -> None:
    async with pool(tmp_path, count=1) as (warm, _parts):
        await warm.take(SPEC, "ann")
        await until(lambda: warm.num_spare > 0)
        others = [SPEC.model_copy(update={"env": {"MINE": "2"}}), SPEC.model_copy(update={"prepare": ()})]
        for spec, submitter in (*((other, "ann") for other in others), (SPEC, "bob"), (SPEC, None)):
            assert await warm.take(spec, submitter) is None


async def test_they_are_bounded_in_number_memory_and_time(tmp_path: Path) -> None:
    async with pool(tmp_path, count=2, age_s=1.0) as (warm, parts):
        for number in range(4):
            await warm.take(SPEC.model_copy(update={"env": {"N": str(number)}}), None)
        await until(lambda: warm.num_spare == 2)
        await until(lambda: not os.listdir(parts.runtimes_folder))
        assert warm.num_spare == 0
    async with pool(tmp_path / "small", count=2, memory_bytes=1) as (warm, parts):
        await warm.take(SPEC, None)
        await asyncio.sleep(0)
        await until(lambda: not warm.is_starting)
        assert os.listdir(parts.runtimes_folder) == []


async def test_one_that_is_gone_is_not_given(tmp_path: Path) -> None:
    async with node_parts(tmp_path) as parts:
        started: list[Sandbox] = []

        async def start(spec: RuntimeSpec, runtime_id: str) -> Sandbox:
            started.append(await start_prepared(parts, spec, runtime_id))
            return started[-1]

        warm = WarmPool(start, WarmSizes(count=1))
        await warm.take(SPEC, None)
        await until(lambda: warm.num_spare > 0)
        await started[0].stop()
        assert await warm.take(SPEC, None) is None
        await warm.close()


async def test_a_start_that_fails_is_left_to_the_session(tmp_path: Path) -> None:
    tried: list[str] = []

    async def failing(_spec: RuntimeSpec, runtime_id: str) -> Sandbox:
        tried.append(runtime_id)
        raise RuntimeFailed("no room")

    warm = WarmPool(failing, WarmSizes(count=1))
    assert await warm.take(SPEC, None) is None
    await until(lambda: bool(tried) and not warm.is_starting)
    assert await warm.take(SPEC, None) is None
    await warm.close()
