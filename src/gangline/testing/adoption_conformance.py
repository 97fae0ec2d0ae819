"""What must hold of a runtime in a node's keeper, as checks that the author of a keepable runtime can run.

    @pytest.mark.parametrize("check", adoption_checks(), ids=lambda check: check.__name__)
    async def test_my_runtime_outlives_its_node(check, tmp_path):
        await run_adoption_check(check, "my_runtime", tmp_path)

The keeper finds the runtime by the name of its entry point. `in_keeper` gives it as a node has it, for the checks of
`runtime_conformance`. A node's death is, as the keeper sees it, a connection that ends without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import ClassVar

from gangline import plugins
from gangline.domain.contracts import Runtime, RuntimeHandle, RuntimeStart
from gangline.domain.errors import CallerError, RuntimeFailed
from gangline.domain.ids import new_id
from gangline.domain.task import RuntimeSpec
from gangline.runtimes.kept import Keeper, KeptHandle
from gangline.runtimes.leftovers import LABEL

__all__ = ["AdoptionCheck", "Lives", "adoption_checks", "in_keeper", "run_adoption_check"]

_PATIENCE_S = 60.0
_UNTIL_GO = "echo begun; touch ready; while [ ! -e go ]; do sleep 0.02; done; echo ended"


class Lives:
    """One node's lives, each with the keeper that it finds or starts."""

    def __init__(self, runtime: str, root: Path, grace_s: float = 60.0) -> None:
        self.runtime = runtime
        self.owner = new_id("lives")
        self.root = root / "runtimes"
        self.folder = root / "keeper"
        self.grace_s = grace_s
        self.keeper = self._keeper()
        self.agents: socket.socket
        """The listening socket of the agents' port."""

    def _keeper(self) -> Keeper:
        return Keeper(self.folder, owner=self.owner, runtimes_folder=self.root, grace_s=self.grace_s)

    async def begin(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.agents = await self.keeper.join(lambda: socket.create_server(("127.0.0.1", 0)))

    async def die(self) -> None:
        await self.keeper.leave()
        self.agents.close()

    async def next(self) -> list[KeptHandle]:
        """Die, and live again; gives what outlived it."""
        await self.die()
        self.keeper = self._keeper()
        await self.begin()
        return self.keeper.kept

    async def start(self) -> KeptHandle:
        handle = await self.start_of(new_id("runtime"))
        assert isinstance(handle, KeptHandle), f"runtime {self.runtime} does not say that it is keepable"
        return handle

    async def start_of(self, runtime_id: str) -> RuntimeHandle:
        spec = RuntimeSpec(backend=self.runtime)
        start = RuntimeStart(
            runtime_id=runtime_id,
            owner=self.owner,
            spec=spec,
            folder=self.root / runtime_id,
            proxy_port=int(self.agents.getsockname()[1]),
        )
        return await self.keeper.start(self.runtime, start)

    async def end(self) -> None:
        await self.keeper.close()
        self.agents.close()

    def keeper_pids(self) -> list[int]:
        return [pid for pid, label in self._labels() if label.endswith("/keeper")]

    def processes(self) -> list[int]:
        """All that carry the node's label."""
        return [pid for pid, _label in self._labels()]

    def _labels(self) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                for variable in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    if variable.startswith(f"{LABEL}={self.owner}/".encode()):
                        found.append((int(name), variable.decode()))
        return found


AdoptionCheck = Callable[[Lives], Awaitable[None]]
_CHECKS: list[AdoptionCheck] = []


def _check(check: AdoptionCheck) -> AdoptionCheck:
    _CHECKS.append(check)
    return check


def adoption_checks() -> list[AdoptionCheck]:
    return list(_CHECKS)


async def run_adoption_check(check: AdoptionCheck, runtime: str, root: Path) -> None:
    """`root` is an empty folder. A check that fails raises AssertionError with what was expected."""
    lives = Lives(runtime, root)
    await lives.begin()
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await check(lives)
    finally:
        await lives.end()
    assert os.listdir(lives.root) == [], "folders were left behind"
    assert lives.processes() == [], "processes were left behind"
    assert not (lives.folder / "socket").exists(), "the keeper's socket was left behind"


@contextlib.asynccontextmanager
async def in_keeper(runtime: str, root: Path) -> AsyncGenerator[Runtime]:
    """The runtime of that name, its sandboxes in a keeper of their own."""
    lives = Lives(runtime, root)
    plugin = plugins.make_runtime(runtime)

    class InKeeper:
        name: ClassVar[str] = runtime

        async def check(self) -> None:
            await plugin.check()

        async def start(self, start: RuntimeStart) -> RuntimeHandle:
            return await lives.keeper.start(runtime, start)

        async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
            return await plugin.reap(owner, root, keep)

    await lives.begin()
    try:
        yield InKeeper()
    finally:
        await lives.end()


async def _running(handle: KeptHandle, command: str = _UNTIL_GO, note: bytes = b"note") -> asyncio.Task[object]:
    """A command that outlives the node, once it has touched `ready`. What this life hears of it is dropped."""
    task: asyncio.Task[object] = asyncio.create_task(handle.exec(command, note=note))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    await _until_present(handle, "ready")
    return task


async def _until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.02)


async def _until_present(handle: RuntimeHandle, path: str) -> None:
    while True:
        with contextlib.suppress(CallerError):
            await handle.download(path)
            return
        await asyncio.sleep(0.02)


async def _refused(work: Awaitable[object]) -> RuntimeFailed:
    try:
        await work
    except RuntimeFailed as error:
        return error
    raise AssertionError("RuntimeFailed expected")


@_check
async def a_running_command_goes_on_without_its_node(lives: Lives) -> None:
    handle = await lives.start()
    old = await _running(handle)
    (kept,) = await lives.next()
    await _refused(old)
    assert (kept.runtime_id, kept.note) == (handle.runtime_id, b"note")
    assert (kept.workdir, kept.home, kept.proxy_url) == (handle.workdir, handle.home, handle.proxy_url)
    assert kept.limits() == handle.limits()
    await kept.upload("go", b"")
    result = await kept.rejoin()
    assert (result.exit_code, result.stdout, result.truncated) == (0, b"begun\nended\n", False)


@_check
async def a_command_that_ended_meanwhile_tells_how(lives: Lives) -> None:
    handle = await lives.start()
    await _running(
        handle, "touch ready; until [ -e go ]; do sleep 0.02; done; echo out; echo err >&2; touch over; exit 7"
    )
    work = lives.root / handle.runtime_id / "work"
    await lives.die()
    (work / "go").touch()
    await _until(lambda: (work / "over").exists())
    (kept,) = await lives.next()
    result = await kept.rejoin()
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
    assert await kept.rejoin() == result, "it is told as often as it is asked for"


@_check
async def nothing_else_outlives_the_node(lives: Lives) -> None:
    lost, handle = await asyncio.gather(lives.start(), lives.start())
    short = asyncio.create_task(handle.exec("touch short; tail -f /dev/null"))
    other = asyncio.create_task(lost.exec("sleep 1000"))
    await _until_present(handle, "short")
    await _running(handle)
    kept = await lives.next()
    assert [one.runtime_id for one in kept] == [handle.runtime_id]
    assert os.listdir(lives.root) == [handle.runtime_id], "a sandbox without a note was kept"
    seen = await kept[0].exec("cat /proc/[0-9]*/comm | grep -c tail")
    assert seen.stdout == b"0\n", "a command without a note was kept"
    for task in (short, other):
        await _refused(task)


@_check
async def an_adopted_sandbox_keeps_the_contract(lives: Lives) -> None:
    handle = await lives.start()
    await handle.upload("mine", b"1")
    await _running(handle)
    (kept,) = await lives.next()
    assert (await kept.exec("cat mine; ls ready")).stdout == b"1ready\n"
    assert await kept.download("mine") == b"1"
    await kept.kill()
    assert (await kept.rejoin()).exit_code is None, "kill spared the command that outlives nodes"
    assert (await kept.exec("cat mine")).stdout == b"1"
    await kept.stop()
    await _refused(kept.exec("true"))


@_check
async def an_adopted_sandbox_can_be_adopted_again(lives: Lives) -> None:
    await _running(await lives.start())
    await lives.next()
    await lives.next()
    (kept,) = await lives.next()
    await kept.upload("go", b"")
    assert (await kept.rejoin()).stdout == b"begun\nended\n"


@_check
async def notes_change_and_budgets_are_remembered(lives: Lives) -> None:
    handle = await lives.start()
    await _running(handle)
    handle.tell_spent(2.5)
    await handle.annotate(b"another")
    (kept,) = await lives.next()
    assert (kept.note, kept.spent_s) == (b"another", 2.5)
    await kept.annotate(None)
    assert await lives.next() == [], "a sandbox whose note was taken back was kept"


@_check
async def who_waits_for_the_command_can_end_it(lives: Lives) -> None:
    await _running(await lives.start(), "touch ready; (setsid sleep 1000 &); sleep 1000")
    (kept,) = await lives.next()
    waiting = asyncio.create_task(kept.rejoin())
    await kept.exec("true")
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert (await kept.exec("cat /proc/[0-9]*/comm | grep -c sleep")).stdout == b"0\n"


@_check
async def calls_wait_for_the_next_life(lives: Lives) -> None:
    """What dials the agents' port while nobody is there is answered by whoever comes."""
    handle = await lives.start()
    assert handle.proxy_url is not None
    port = int(handle.proxy_url.rpartition(":")[2])
    program = (
        "import os, socket, time\nopen('ready', 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.02)\n"
        f"s = socket.create_connection(('127.0.0.1', {port}), 30); s.sendall(b'call\\n')\n"
        "open('dialled', 'w').close()\n"
        "print(s.makefile().readline(), end='')"
    )
    await handle.upload("dial.py", program.encode())
    await _running(handle, "python3 dial.py")
    work = lives.root / handle.runtime_id / "work"
    await lives.die()
    (work / "go").touch()
    await _until(lambda: (work / "dialled").exists())
    (kept,) = await lives.next()
    lives.agents.setblocking(False)
    call, _ = await asyncio.get_running_loop().sock_accept(lives.agents)
    with call:
        call.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(call, 64) == b"call\n"
        await asyncio.get_running_loop().sock_sendall(call, b"answer\n")
    assert (await kept.rejoin()).stdout == b"answer\n"


@_check
async def nothing_outlives_the_grace(lives: Lives) -> None:
    lives.grace_s = 0.3
    await lives.next()
    await _running(await lives.start())
    await lives.die()
    await _until(lambda: not (lives.processes() or os.listdir(lives.root) or (lives.folder / "socket").exists()))
    assert await lives.next() == []


@_check
async def a_node_that_is_stopping_has_no_grace(lives: Lives) -> None:
    await _running(await lives.start())
    lives.keeper.stopping()
    await lives.die()
    await _until(lambda: not (lives.processes() or os.listdir(lives.root)))


@_check
async def nothing_outlives_the_keeper(lives: Lives) -> None:
    handle = await lives.start()
    running = await _running(handle)
    for pid in lives.keeper_pids():
        os.kill(pid, signal.SIGKILL)
    await _refused(running)
    await _refused(handle.exec("true"))
    await handle.stop()
    assert lives.processes() == []
    assert os.listdir(lives.root) == []
    assert (await (await lives.start()).exec("echo again")).stdout == b"again\n", "no other keeper was started"


@_check
async def a_start_that_is_cancelled_leaves_nothing(lives: Lives) -> None:
    await lives.start()
    for stage_s in (0.0, 0.002, 0.01, 0.02, 0.03, 0.05):
        task = asyncio.create_task(lives.start_of(f"r{stage_s}"))
        await asyncio.wait({task}, timeout=stage_s)
        task.cancel()
        done = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(done, BaseException):
            await done.stop()
    assert len(os.listdir(lives.root)) == 1
