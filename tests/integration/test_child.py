"""A child of `gangline up`, really started: what is told of one that does not start."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from gangline.cli.processes.child import Child
from gangline.cli.service import bring_up as up
from gangline.domain.errors import NodeError, PortUnavailable


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    """One whose interpreter is a script of the test's, `tmp_path/python`."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\n")
    program.chmod(stat.S_IRWXU)
    monkeypatch.setattr(sys, "executable", str(program))
    return Child("node", ["node"], log_path=tmp_path / "node.log", env=dict(os.environ), port=0)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo trouble >&2; exit 7", "it ended with exit code 7. The end of"),
        ("exit 7", "it ended with exit code 7. It gave no reason."),
        ("kill -SEGV $$", "it was ended by SIGSEGV. It gave no reason."),
        ("exec >&-; sleep 600", "it was ended by SIGKILL"),
    ],
)
async def test_a_child_that_does_not_start_is_told_of_with_its_end(
    child: Child, tmp_path: Path, script: str, told: str
) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
    with pytest.raises(NodeError) as raised:
        await child.start()
    assert told in raised.value.message
    assert ("trouble" in raised.value.message) == ("trouble" in script)
    assert not child.is_running


READY = """echo '{"node_url": "http://127.0.0.1:1", "pid": 1}'; exec sleep 600"""


async def test_settings_that_are_known_later_reach_a_child_that_has_begun(child: Child, tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\ncat > {tmp_path}/read\n{READY}\n")
    known: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    later = Child(
        "node", ["node"], log_path=child.log_path, env=dict(os.environ), port=0, tables=lambda: asyncio.shield(known)
    )
    starting = asyncio.create_task(later.start())
    async with asyncio.timeout(30):
        while not (later.is_waiting and (tmp_path / "begun").exists()):
            await asyncio.sleep(0.01)
    known.set_result(b"settings")
    await starting
    assert (tmp_path / "read").read_text() == "settings"
    assert await later.address() == "http://127.0.0.1:1"
    assert not later.is_waiting
    later.kill()
    await later.wait()


async def test_a_start_that_is_cancelled_halfway_ends_the_child_and_what_it_started(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/pids\ncat\n")
    loop = asyncio.get_running_loop()
    connect, may_go_on, connecting = loop.connect_write_pipe, asyncio.Event(), asyncio.Event()

    async def slowly(*given: Any) -> Any:
        connecting.set()
        await may_go_on.wait()
        return await connect(*given)

    monkeypatch.setattr(loop, "connect_write_pipe", slowly)
    later = Child("node", ["node"], log_path=child.log_path, env=dict(os.environ), port=0, tables=b"settings")
    starting = asyncio.create_task(later.start())
    async with asyncio.timeout(30):
        await connecting.wait()
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text().strip():
            await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.sleep(0)  # so that it has heard of it
    may_go_on.set()
    done, _ = await asyncio.wait({starting}, timeout=30)
    assert done
    assert starting.cancelled()
    assert not later.is_running
    async with asyncio.timeout(30):
        while Path("/proc", (tmp_path / "pids").read_text().strip()).exists():  # it is the system's to reap
            await asyncio.sleep(0.01)


async def test_a_child_whose_settings_never_come_is_ended(child: Child, tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\n{READY}\n")

    async def fail() -> bytes:
        raise NodeError("no engine")

    later = Child("node", ["node"], log_path=child.log_path, env=dict(os.environ), port=0, tables=fail)
    with pytest.raises(NodeError, match="no engine"):
        await later.start()
    assert not later.is_running
    assert later.ended_by_itself


def was_free(_host: str, _port: int) -> bool:
    """A look at a port, a moment before another program takes it."""
    return True


@pytest.mark.parametrize("asked_for", [False, True])
async def test_only_a_usual_port_that_was_lost_after_the_look_is_replaced_by_a_free_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_for: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = int(other.getsockname()[1])
        monkeypatch.setattr(up, "DEFAULT_PORT", taken)
        monkeypatch.setattr(up, "_is_free", was_free)
        (tmp_path / "logs").mkdir()
        plan = up.Plan(data_dir=tmp_path, port=taken if asked_for else None)
        server = up.server_child(plan, {**os.environ, "GANGLINE_TOKEN": "gl-control-test"})
        try:
            if asked_for:
                with pytest.raises(PortUnavailable, match=str(taken)):
                    await server.start()
            else:
                await server.start()
                assert server.port not in (0, taken)
                assert server.url == f"http://127.0.0.1:{server.port}"
        finally:
            server.terminate()
            await server.wait()


async def test_a_large_log_is_moved_aside_and_the_child_goes_on_writing(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gangline.cli.processes.child._MAX_LOG_BYTES", 1000)
    talks = f"seq 1000 >&2; {READY.partition(';')[0]}; until [ -e {tmp_path}/more ]; do sleep 0.05; done; echo more >&2"
    (tmp_path / "python").write_text(f"#!/bin/sh\n{talks}\n")
    await child.start()
    try:
        child.bound_log()
        older = tmp_path / "node.log.1"
        assert (child.log_path.read_text(), older.read_text().splitlines()[-1]) == ("", "1000")
        assert stat.S_IMODE(older.stat().st_mode) == 0o600
        (tmp_path / "more").touch()
        await child.wait()
        child.bound_log()
        assert (child.log_path.read_text(), older.read_text().splitlines()[-1]) == ("more\n", "1000")
    finally:
        child.kill()
