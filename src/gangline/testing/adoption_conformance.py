"""Requirements on a runtime in a node's keeper process, as checks that authors of keepable runtimes can run.

    @pytest.mark.parametrize("check", adoption_checks(), ids=lambda check: check.__name__)
    async def test_my_runtime_outlives_its_node(check, tmp_path):
        await run_adoption_check(check, "my_runtime", tmp_path)

The keeper finds the runtime by the name of its entry point. `in_keeper` provides it as a node has it, for the checks of
`runtime_conformance`. For the keeper, a node's death is a connection that ends without a message. While there is no
node, events inside are observed through connections to the agents' port, which the check itself accepts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import ClassVar, NamedTuple

from gangline.domain.errors import RuntimeFailed
from gangline.domain.ids import new_id
from gangline.domain.sandbox import Checkpoint, ExecRequest, Runtime, RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.keeper.kept import Keeper, KeptSandbox
from gangline.sandbox.shared.leftovers import LABEL
from gangline.settings import plugins
from gangline.testing.runtime_conformance.bench import daemon, is_held, promised, until_held, until_present

_PATIENCE_S = 60.0
_UNTIL_GO = "echo begun; touch ready; while [ ! -e go ]; do sleep 0.02; done; echo ended"


class Call(NamedTuple):
    """One connection from inside a sandbox."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def heard(self) -> bytes:
        """The next line; empty at the end."""
        return await self.reader.readline()

    async def say(self, line: bytes) -> None:
        self.writer.write(line)
        await self.writer.drain()


class Lives:
    """Successive runs of one node, each with the keeper that it finds or starts."""

    def __init__(self, runtime: str, root: Path, *, image: str | None = None) -> None:
        self.runtime = runtime
        self.image = image
        self.owner = new_id("lives")
        self.root = root / "runtimes"
        self.folder = root / "keeper"
        self.grace_s = 60.0
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

    async def next(self) -> list[KeptSandbox]:
        """End this node and start the next one. Returns the sandboxes that outlived it."""
        await self.die()
        self.keeper = self._keeper()
        await self.begin()
        return self.keeper.kept

    async def start(self) -> KeptSandbox:
        sandbox = await self.start_of(new_id("runtime"))
        assert isinstance(sandbox, KeptSandbox), f"runtime {self.runtime} does not say that it is keepable"
        return sandbox

    async def start_of(self, runtime_id: str, base: Checkpoint | None = None) -> Sandbox:
        spec = RuntimeSpec(backend=self.runtime, image=self.image)
        start = RuntimeStart(
            runtime_id=runtime_id,
            owner=self.owner,
            spec=spec,
            folder=self.root / runtime_id,
            proxy_port=int(self.agents.getsockname()[1]),
            base=base,
        )
        return await self.keeper.start(self.runtime, start)

    async def accept(self) -> Call:
        """The next connection to the agents' port, from whichever process answers it now."""
        self.agents.setblocking(False)
        connection, _ = await asyncio.get_running_loop().sock_accept(self.agents)
        return Call(*await asyncio.open_connection(sock=connection))

    async def left(self, *, but: str | None = None) -> int:
        """Remove the node's sandboxes, except the one with the id `but`. Returns how many there were."""
        keep = frozenset(filter(None, [but]))
        return await plugins.make_runtime(self.runtime).reap(self.owner, self.root, keep)

    async def end(self) -> None:
        await self.keeper.close()
        self.agents.close()

    def keeper_pids(self) -> list[int]:
        return [pid for pid, label in self._labels() if label.endswith("/keeper")]

    def sandboxes(self) -> set[str]:
        """Ids of sandboxes that have a folder on the host, or a process with their label."""
        return {label.split("/")[1] for _pid, label in self._labels()} - {"keeper"} | set(os.listdir(self.root))

    def processes(self) -> list[int]:
        """Ids of all processes with the node's label."""
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


async def run_adoption_check(check: AdoptionCheck, runtime: str, root: Path, *, image: str | None = None) -> None:
    """`root` is an empty folder. A failed check raises AssertionError with the expectation."""
    lives = Lives(runtime, root, image=image)
    await lives.begin()
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await check(lives)
    finally:
        await lives.end()
    assert os.listdir(lives.root) == [], "folders were left behind"
    assert lives.processes() == [], "processes were left behind"
    assert not (lives.folder / "socket").exists(), "the keeper's socket was left behind"
    assert await lives.left() == 0, "sandboxes were left behind"


@contextlib.asynccontextmanager
async def in_keeper(runtime: str, root: Path) -> AsyncGenerator[Runtime]:
    """The named runtime, with its sandboxes in a separate keeper."""
    lives = Lives(runtime, root)
    plugin = plugins.make_runtime(runtime)

    class InKeeper(Runtime):
        name: ClassVar[str] = runtime

        async def check(self) -> None:
            await plugin.check()

        async def start(self, start: RuntimeStart) -> Sandbox:
            return await lives.keeper.start(runtime, start)

        async def release(self, checkpoint: Checkpoint) -> None:
            await lives.keeper.release(checkpoint)

        async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
            return await plugin.reap(owner, root, keep)

    await lives.begin()
    try:
        yield InKeeper()
    finally:
        await lives.end()


async def _running(sandbox: KeptSandbox, command: str = _UNTIL_GO, note: bytes = b"note") -> asyncio.Task[object]:
    """Run a command that outlives the node, and wait until it has touched `ready`. Its output during this node's run is
    dropped.
    """
    task: asyncio.Task[object] = asyncio.create_task(sandbox.run_lasting(ExecRequest(command=command), note))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    await until_present(sandbox, "ready")
    return task


async def _until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
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
    sandbox = await lives.start()
    old = await _running(sandbox)
    (kept,) = await lives.next()
    await _refused(old)
    assert (kept.runtime_id, kept.note) == (sandbox.runtime_id, b"note")
    assert (kept.workdir, kept.home, kept.proxy_url) == (sandbox.workdir, sandbox.home, sandbox.proxy_url)
    assert kept.limits() == sandbox.limits()
    await kept.upload("go", b"")
    result = await kept.rejoin()
    assert (result.exit_code, result.stdout, result.truncated) == (0, b"begun\nended\n", False)


def _calling(sandbox: Sandbox, program: str) -> list[str]:
    """A Python program that has connected to the agents' port: `first` is that connection, and `call()` opens
    another.
    """
    assert sandbox.proxy_url is not None
    host, _, port = sandbox.proxy_url.removeprefix("http://").rpartition(":")
    call = f"import socket, sys\ndef call(): return socket.create_connection(({host!r}, {port}), 60).makefile('rw')\n"
    return ["python3", "-c", f"{call}first = call()\n{program}"]


async def _called(lives: Lives, sandbox: KeptSandbox, program: str) -> Call:
    """Start a program that outlives the node, and accept its first connection, which also outlives it."""
    task: asyncio.Task[object] = asyncio.create_task(
        sandbox.run_lasting(ExecRequest(command=_calling(sandbox, program)), b"note")
    )
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await lives.accept()


@_check
async def a_channel_ends_with_its_node(lives: Lives) -> None:
    sandbox = await lives.start()
    await _running(sandbox)
    channel = await sandbox.channel(f"{daemon()}; sleep 100000")
    await until_held(sandbox)
    (kept,) = await lives.next()
    await _refused(channel.ended())
    await channel.close()
    assert not await is_held(kept), "the command of a channel was kept"
    await kept.upload("go", b"")
    assert (await kept.rejoin()).stdout == b"begun\nended\n"


@_check
async def a_command_that_ended_meanwhile_tells_how(lives: Lives) -> None:
    call = await _called(
        lives, await lives.start(), "first.readline(); print('out'); print('err', file=sys.stderr); sys.exit(7)"
    )
    await lives.die()
    await call.say(b"end\n")
    assert await call.heard() == b""
    (kept,) = await lives.next()
    result = await kept.rejoin()
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
    assert await kept.rejoin() == result, "it is told as often as it is asked for"
    call.writer.close()


@_check
async def nothing_else_outlives_the_node(lives: Lives) -> None:
    lost, sandbox = await asyncio.gather(lives.start(), lives.start())
    short = asyncio.create_task(sandbox.exec(f"{daemon()}; sleep 100000"))
    other = asyncio.create_task(lost.exec("sleep 100000"))
    await until_held(sandbox)
    await _running(sandbox)
    kept = await lives.next()
    assert [one.runtime_id for one in kept] == [sandbox.runtime_id]
    assert await lives.left(but=sandbox.runtime_id) == 0, "a sandbox without a note was kept"
    assert not await is_held(kept[0]), "a command without a note was kept"
    for task in (short, other):
        await _refused(task)


@_check
async def an_adopted_sandbox_keeps_the_contract(lives: Lives) -> None:
    sandbox = await lives.start()
    await sandbox.upload("mine", b"1")
    await _running(sandbox)
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
    sandbox = await lives.start()
    await _running(sandbox)
    sandbox.tell_spent(2.5)
    await sandbox.annotate(b"another")
    (kept,) = await lives.next()
    assert (kept.note, kept.spent_s) == (b"another", 2.5)
    await kept.annotate(None)
    assert await lives.next() == [], "a sandbox whose note was taken back was kept"


@_check
async def who_waits_for_the_command_can_end_it(lives: Lives) -> None:
    await _running(await lives.start(), f"{daemon()}; until [ -e lock.held ]; do :; done; touch ready; sleep 100000")
    (kept,) = await lives.next()
    waiting = asyncio.create_task(kept.rejoin())
    await kept.exec("true")
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert not await is_held(kept)


@_check
async def calls_wait_for_the_next_life(lives: Lives) -> None:
    """Connections to the agents' port made without a node are answered by the next one."""
    program = (
        "first.readline(); second = call(); print('call', file=second, flush=True)\n"
        "print('dialled', file=first, flush=True); print(second.readline(), end='')"
    )
    first = await _called(lives, await lives.start(), program)
    await lives.die()
    await first.say(b"dial\n")
    assert await first.heard() == b"dialled\n"
    (kept,) = await lives.next()
    second = await lives.accept()
    assert await second.heard() == b"call\n"
    await second.say(b"answer\n")
    assert (await kept.rejoin()).stdout == b"answer\n"
    for call in (first, second):
        call.writer.close()


@_check
async def what_the_node_forgot_ends_by_itself(lives: Lives) -> None:
    held = await lives.start()
    running = asyncio.create_task(held.exec("until [ -e go ]; do sleep 0.02; done; echo went on"))
    lost = [await lives.start(), await lives.start()]
    lives.keeper.tell_held()
    assert await lost[0].exec("echo here") is not None
    lost.clear()
    gc.collect()
    lives.keeper.tell_held()
    await _until(lambda: lives.sandboxes() <= {held.runtime_id})
    await held.upload("go", b"")
    assert (await running).stdout == b"went on\n", "a sandbox that is held was stopped"


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
    sandbox = await lives.start()
    running = await _running(sandbox)
    for pid in lives.keeper_pids():
        os.kill(pid, signal.SIGKILL)
    await _refused(running)
    await _refused(sandbox.exec("true"))
    await sandbox.stop()
    assert lives.processes() == []
    assert os.listdir(lives.root) == []
    assert (await (await lives.start()).exec("echo again")).stdout == b"again\n", "no other keeper was started"


@_check
async def a_start_that_is_cancelled_leaves_nothing(lives: Lives) -> None:
    first = await lives.start()
    for stage_s in (0.0, 0.002, 0.01, 0.02, 0.03, 0.05):
        task = asyncio.create_task(lives.start_of(f"r{stage_s}"))
        await asyncio.wait({task}, timeout=stage_s)
        task.cancel()
        done = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(done, BaseException):
            await done.stop()
    assert await lives.left(but=first.runtime_id) == 0


@_check
async def checkpoints_outlive_their_node_in_the_keeper(lives: Lives) -> None:
    sandbox = await lives.start()
    promised(sandbox, "checkpoints")
    await sandbox.upload("file", b"then")
    made = await sandbox.checkpoint("turn")
    released = await sandbox.checkpoint("released")
    await lives.keeper.release(released)
    running = await _running(sandbox)
    assert [one.runtime_id for one in await lives.next()] == [sandbox.runtime_id]
    await asyncio.wait({running})
    assert [(checkpoint.checkpoint_id, checkpoint.name) for checkpoint in lives.keeper.checkpoints] == [
        (made.checkpoint_id, "turn")
    ]
    fork = await lives.start_of(new_id("runtime"), lives.keeper.checkpoints[0])
    assert await fork.download("file") == b"then"
    await fork.stop()


@_check
async def a_killed_keeper_leaves_no_checkpoint_and_no_mount(lives: Lives) -> None:
    sandbox = await lives.start()
    promised(sandbox, "checkpoints")
    await sandbox.upload("file", b"then")
    made = await sandbox.checkpoint()
    assert (await sandbox.exec("cat file")).stdout == b"then"
    for pid in lives.keeper_pids():
        os.kill(pid, signal.SIGKILL)
    await _refused(sandbox.exec("true"))
    await sandbox.stop()
    mounts = await asyncio.to_thread(Path("/proc/self/mountinfo").read_text)
    assert str(lives.root) not in mounts, "a mount was left behind"
    assert made.checkpoint_id not in os.listdir(lives.root), "a checkpoint was left behind"
