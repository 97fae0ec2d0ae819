"""The spawner of a sandbox and its supervisors: they do not grow, and their death harms their own sandbox only."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from gangline.domain.errors import RuntimeFailed, RuntimeUnavailable
from gangline.domain.ids import new_id
from gangline.domain.sandbox import Runtime, RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.sandbox.commands import execution, forkserver
from gangline.sandbox.commands.spawner import Spawner
from gangline.sandbox.network.relay import listening_inside
from gangline.sandbox.process import ProcessRuntime
from gangline.sandbox.shared.leftovers import kill_labelled

NUM_ACTIONS = 1000
MAX_PRIVATE_BYTES = 3 << 20


@pytest.fixture(params=[BubblewrapRuntime, ProcessRuntime], ids=["sandbox", "process"])
async def runtime(request: pytest.FixtureRequest) -> Runtime:
    runtime: Runtime = request.param()
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    return runtime


async def start(runtime: Runtime, root: Path) -> tuple[Sandbox, str]:
    """A sandbox, and its owner."""
    owner = new_id("spawner")
    spec = RuntimeSpec(network="none")
    return await runtime.start(RuntimeStart(runtime_id="r", owner=owner, spec=spec, folder=root / owner)), owner


def helpers(owner: str) -> set[int]:
    """Forks of the forkserver that carry the owner's label."""
    found: set[int] = set()
    for folder in Path("/proc").iterdir():
        try:
            is_labelled = f"GANGLINE_RUNTIME={owner}/".encode() in (folder / "environ").read_bytes()
            if is_labelled and b"helpers.forkserver" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Forks(NamedTuple):
    """Those of a sandbox in which no command runs. Without one since its begin, there is only the spawner."""

    spawner: int
    supervisor: int | None = None
    waiting: int | None = None
    """The supervisor's, which becomes the next command."""


async def forks_of(owner: str, number: int) -> Forks:
    async with asyncio.timeout(30):
        while len(found := helpers(owner)) != number:
            await asyncio.sleep(0.01)
    return Forks(*sorted(found, key=lambda pid: (parent(pid) in found, parent(parent(pid)) in found)))


async def gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.01)


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def forkserver_pid() -> int:
    assert forkserver._current is not None
    info = Path(f"/proc/self/fdinfo/{forkserver._current.pid_fd}").read_text()
    (number,) = [line.split()[1] for line in info.splitlines() if line.startswith("Pid:")]
    return int(number)


@pytest.mark.timeout(300)
async def test_a_thousand_actions_leave_nothing_behind(runtime: Runtime, tmp_path: Path) -> None:
    handle, owner = await start(runtime, tmp_path)

    async def act(number: int) -> None:
        for _ in range(number):
            assert (await handle.exec("(exit 0) & echo acted")).stdout == b"acted\n"

    try:
        await asyncio.gather(*(act(5) for _ in range(4)))
        assert (await handle.exec("true")).ok  # it leaves nothing behind, so that its supervisor rests
        spawner = (await forks_of(owner, 3)).spawner
        places = [f"/proc/{pid}/fd" for pid in (os.getpid(), forkserver_pid(), spawner)]
        before = [len(os.listdir(place)) for place in places]
        memory = [private_bytes(pid) for pid in (forkserver_pid(), spawner)]
        await asyncio.gather(*(act(NUM_ACTIONS // 4) for _ in range(4)))
        assert (await handle.exec("true")).ok
        assert (await forks_of(owner, 3)).spawner == spawner
        async with asyncio.timeout(30):  # until the pipes of the last commands are closed
            while any(len(os.listdir(place)) > number for place, number in zip(places, before, strict=True)):
                await asyncio.sleep(0.01)
        grown = [private_bytes(pid) - one for pid, one in zip((forkserver_pid(), spawner), memory, strict=True)]
        assert max(grown) < 256 << 10
        assert sum(map(private_bytes, helpers(owner))) < MAX_PRIVATE_BYTES
    finally:
        await handle.stop()


async def test_a_killed_spawner_ends_its_own_sandbox_only(runtime: Runtime, tmp_path: Path) -> None:
    handle, owner = await start(runtime, tmp_path)
    neighbour, _ = await start(runtime, tmp_path)
    try:
        spared = await neighbour.channel(["cat"])
        spawner = (await forks_of(owner, 1)).spawner
        os.kill(spawner, signal.SIGKILL)
        await gone(spawner)
        assert (await handle.exec("echo again")).stdout == b"again\n"
        assert helpers(owner) - {spawner}, "another spawner is there"
        assert (await neighbour.exec("echo here")).stdout == b"here\n"
        await spared.close()
    finally:
        await handle.stop()
        await neighbour.stop()


async def test_a_stopped_spawner_holds_no_caller_up(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, owner = await start(runtime, tmp_path)
    try:
        spawner = (await forks_of(owner, 1)).spawner
        os.kill(spawner, signal.SIGSTOP)
        monkeypatch.setattr(execution, "_START_S", 0.5)
        with pytest.raises(RuntimeFailed, match="spawner did not take a command in time"):
            await handle.exec("true")
        monkeypatch.undo()
        assert (await handle.exec("echo again")).stdout == b"again\n"
        assert spawner not in helpers(owner), "the stopped one is gone"
    finally:
        await handle.stop()


async def test_a_killed_forkserver_is_replaced_and_spawners_live_on(runtime: Runtime, tmp_path: Path) -> None:
    handle, owner = await start(runtime, tmp_path)
    before, old = {(await forks_of(owner, 1)).spawner}, forkserver_pid()
    os.kill(old, signal.SIGKILL)
    await gone(old)  # reaped before anybody needs another
    other, _ = await start(runtime, tmp_path)
    try:
        assert forkserver_pid() != old
        assert (await handle.exec("echo still")).stdout == b"still\n"
        assert before < helpers(owner)
        assert (await other.exec("echo too")).stdout == b"too\n"
    finally:
        await handle.stop()
        await other.stop()


async def test_a_listener_whose_caller_was_cancelled_is_gone_when_the_caller_is(
    runtime: Runtime, tmp_path: Path
) -> None:
    handle, owner = await start(runtime, tmp_path)  # so there is a forkserver
    stopped = forkserver_pid()
    folder = os.open(f"/proc/{os.getpid()}", os.O_DIRECTORY | os.O_RDONLY)
    try:
        os.kill(stopped, signal.SIGSTOP)
        opening = asyncio.create_task(listening_inside(f"{owner}/l/sandbox", folder, 0))
        await asyncio.wait({opening}, timeout=0.1)
        opening.cancel()
        done, _ = await asyncio.wait({opening}, timeout=0.1)
        assert not done, "its helper is still to come"
        os.kill(stopped, signal.SIGCONT)
        await asyncio.wait({opening}, timeout=30)
        assert opening.cancelled()
        assert not kill_labelled(lambda label: label == f"{owner}/l/sandbox")
    finally:
        os.kill(stopped, signal.SIGCONT)
        os.close(folder)
        await handle.stop()


async def test_a_supervisor_takes_one_command_after_another(runtime: Runtime, tmp_path: Path) -> None:
    handle, owner = await start(runtime, tmp_path)
    try:
        assert (await handle.exec("exit 3")).exit_code == 3
        before = await forks_of(owner, 3)
        for number in range(20):
            result = await handle.exec(f"cat; echo {number} >&2; kill -9 $$", stdin=b"given", cwd="/", env={"A": "b"})
            assert (result.signal, result.stdout, result.stderr) == (9, b"given", f"{number}\n".encode())
        after = await forks_of(owner, 3)
        assert (after.spawner, after.supervisor) == (before.spawner, before.supervisor)
        assert after.waiting != before.waiting
    finally:
        await handle.stop()


async def test_only_one_supervisor_rests(runtime: Runtime, tmp_path: Path) -> None:
    handle, owner = await start(runtime, tmp_path)
    try:
        assert all(one.ok for one in await asyncio.gather(*(handle.exec("sleep 0.1") for _ in range(5))))
        await forks_of(owner, 3)
    finally:
        await handle.stop()


async def test_an_end_that_is_cancelled_keeps_no_socket() -> None:
    spawner = Spawner(f"{new_id('spawner')}/r")
    await spawner.ready()
    supervisor = spawner.supervisor(())
    ending = asyncio.create_task(spawner.end())
    await asyncio.sleep(0)
    spawner.rest(supervisor)  # its command has ended while the spawner was let go
    ending.cancel()
    await asyncio.wait({ending})  # the spawner may have been quicker
    assert not supervisor.is_ready
    assert not spawner.alive


async def test_a_supervisor_whose_command_was_killed_or_left_a_process_ends(runtime: Runtime, tmp_path: Path) -> None:
    handle, owner = await start(runtime, tmp_path)
    try:
        left = await handle.exec("sleep 1000 >/dev/null 2>&1 & echo $!")
        await forks_of(owner, 1)
        assert (await handle.exec(f"kill -0 {int(left.stdout)}")).ok, "it lives on"
        await forks_of(owner, 3)
        assert (await handle.exec("sleep 1000", timeout_s=0.1)).timed_out
        await forks_of(owner, 1)
        heard = bytearray()
        # The child itself says that it is there: a shell that has just forked forgets a signal.
        command = "trap 'echo asked; exit' TERM; sh -c 'echo ready; exec sleep 1000' & wait"
        asked = asyncio.create_task(
            handle.exec(command, grace_s=30, on_output=lambda _stream, data: heard.extend(data))
        )
        async with asyncio.timeout(30):
            while not heard:
                await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled()
        assert heard == b"ready\nasked\n"
        await forks_of(owner, 1)
    finally:
        await handle.stop()


async def test_a_shell_is_asked_to_end_before_its_child(runtime: Runtime, tmp_path: Path) -> None:
    """Or it takes the child's end for the end of a step, and continues with the next one."""
    handle, _owner = await start(runtime, tmp_path)

    async def asked_to_end() -> bytes:
        heard = bytearray()
        command = "trap 'echo asked; exit' TERM; sh -c 'echo ready; exec sleep 1000'; echo went on"
        running = asyncio.create_task(
            handle.exec(f"exec 2>/dev/null; {command}", grace_s=30, on_output=lambda _stream, data: heard.extend(data))
        )
        async with asyncio.timeout(30):
            while not heard:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        return bytes(heard)

    try:
        said = await asyncio.gather(*(asked_to_end() for _ in range(20)))
    finally:
        await handle.stop()
    assert said == [b"ready\nasked\n"] * 20


async def test_a_killed_waiting_fork_is_replaced_by_the_next_order(runtime: Runtime, tmp_path: Path) -> None:
    handle, owner = await start(runtime, tmp_path)
    try:
        assert (await handle.exec("true")).ok
        before = await forks_of(owner, 3)
        assert before.waiting is not None
        os.kill(before.waiting, signal.SIGKILL)
        await gone(before.waiting)
        assert await forks_of(owner, 2) == (*before[:2], None), "and not before it comes"
        assert (await handle.exec("echo again")).stdout == b"again\n"
        assert (await forks_of(owner, 3))[:2] == before[:2]
    finally:
        await handle.stop()


async def test_a_killed_resting_supervisor_harms_its_own_sandbox_only(runtime: Runtime, tmp_path: Path) -> None:
    handle, owner = await start(runtime, tmp_path)
    try:
        assert (await handle.exec("true")).ok
        supervisor = (await forks_of(owner, 3)).supervisor
        assert supervisor is not None
        os.kill(supervisor, signal.SIGKILL)
        await gone(supervisor)
        with pytest.raises(RuntimeFailed, match="was killed before a command began"):
            await handle.exec("true")
        assert (await handle.exec("echo again")).stdout == b"again\n"
    finally:
        await handle.stop()


async def test_an_order_may_be_larger_than_a_socket_takes(runtime: Runtime, tmp_path: Path) -> None:
    handle, _ = await start(runtime, tmp_path)
    words = ["x" * 100_000] * 12
    try:
        for _ in range(2):
            assert (await handle.exec(["sh", "-c", 'echo "$#"', "sh", *words])).stdout == b"12\n"
    finally:
        await handle.stop()
