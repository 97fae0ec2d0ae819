"""One command in a runtime: started under its own supervisor, with bounded output and a classified result.

The process that starts it keeps one end of a control socket: closing it, deliberately or by dying, kills the command's
whole tree. Everything between a call and the start of its process is synchronous, so cancellation never loses a
process.
"""

from __future__ import annotations

import asyncio
import fcntl
import marshal
import os
import socket
import sys
import termios
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal

import msgspec

from gangline.domain.errors import RuntimeFailed
from gangline.domain.sandbox import ExecRequest, ExecResult, OutputSink
from gangline.sandbox.commands.channel import LocalChannel
from gangline.sandbox.commands.spawner import Spawner
from gangline.sandbox.shared.accounts import MemoryWatch, Spent

EndAll = Callable[[], Awaitable[object]]
"""Kills every process of the sandbox's current life and waits until they are dead."""

_PIECE_BYTES = 1 << 16
_STARTED = b"started\n"
_NUM_LINES = 3
"""Lines that follow the first line of an answer."""
_KILLED_BY_ANOTHER = ("signal 9", "exit 137")
"""Its first process was killed, but not by its supervisor, or a shell reports that its last process was."""
_KILL_GRACE_S = 10.0
"""How long a supervisor may take to kill a tree before the whole sandbox is killed instead."""
_START_S = 30.0
"""Time limit for starting a command under supervision. A spawner stopped by an agent never does it."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The order to a supervisor."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    uid: int | None = None
    """User (and group) to become; None keeps the current one."""
    own_namespace: bool = False
    """Whether the command gets its own user namespace inside the sandbox's."""
    filters: Sequence[bytes] = ()
    """System call filters to install, in the kernel's format, in order."""
    rlimits: Mapping[int, int] = {}
    """RLIMIT number -> value."""
    cgroup_procs: Sequence[str] = ()
    """Paths of the `cgroup.procs` files to join."""


class Executions:
    """The commands that run in one sandbox, and the pipes that outlived their commands."""

    def __init__(self) -> None:
        self.spent = Spent()
        """Used by commands that have ended."""
        self._running: set[_Execution] = set()
        self._killing: set[asyncio.Task[None]] = set()
        self._pipes: set[_Pipe] = set()
        self._channels: set[LocalChannel] = set()

    async def run(
        self,
        spawner: Spawner,
        order: Order,
        end_all: EndAll,
        request: ExecRequest,
        *,
        memory: MemoryWatch,
        on_output: OutputSink | None = None,
    ) -> ExecResult:
        """Start the command and wait for it. After cancellation or a timeout, its whole tree is dead when this returns.

        `end_all` is called when a supervisor was killed, cannot keep up with its tree, or did not start.
        Raises: RuntimeFailed when no command can be started in the sandbox.
        """
        execution = self._begin(spawner, order, memory, request, on_output)
        timed_out = False
        try:
            async with asyncio.timeout(request.timeout_s):
                answer = await _ended(execution, end_all)
        except TimeoutError:
            timed_out = True
            answer = await self._killed(execution, request.grace_s, end_all)
        except asyncio.CancelledError:
            await self._killed(execution, request.grace_s, end_all)
            raise
        finally:
            self._finish(execution)
        return execution.result(answer, timed_out=timed_out)

    async def open(
        self,
        spawner: Spawner,
        order: Order,
        end_all: EndAll,
        request: ExecRequest,
        *,
        memory: MemoryWatch,
        on_ended: Callable[[], None],
    ) -> LocalChannel:
        """Start a command with a channel. Returns once it is supervised.

        `on_ended` is called once, when the command ends, or fails to start. Raises: RuntimeFailed.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            on_ended()
            raise RuntimeFailed(f"no channel could be opened: {error}.") from error
        with ExitStack() as on_failure:
            on_failure.enter_context(ours)
            on_failure.callback(on_ended)
            with theirs:
                silent = msgspec.structs.replace(request, stdin=None)
                execution = self._begin(spawner, order, memory, silent, None, theirs.fileno())
            task = asyncio.create_task(self._channel_ended(execution, end_all))
            on_failure.pop_all()
            on_failure.enter_context(ours)
            task.add_done_callback(lambda _task: on_ended())
            kill = partial(self._killed, execution, 0.0, end_all)
            try:
                await execution.started()
            except asyncio.CancelledError:
                await kill()
                raise
            if not execution.is_started:
                await task
            on_failure.pop_all()
        channel = LocalChannel(ours, task, kill, self._channels.discard)
        self._channels.add(channel)
        return channel

    async def _channel_ended(self, execution: _Execution, end_all: EndAll) -> ExecResult:
        """Raises: RuntimeFailed."""
        try:
            answer = await _ended(execution, end_all)
        finally:
            self._finish(execution)
        return execution.result(answer, timed_out=False)

    def _begin(
        self,
        spawner: Spawner,
        order: Order,
        memory: MemoryWatch,
        request: ExecRequest,
        on_output: OutputSink | None,
        *files: int,
    ) -> _Execution:
        most = request.max_output_bytes
        pipes = tuple(_Pipe(name, on_output, most, self._pipes.discard) for name in ("stdout", "stderr"))
        try:
            execution = _Execution(spawner, order, memory, request.stdin, pipes, files)
        except OSError as error:
            for pipe in pipes:
                pipe.abandon()
            raise RuntimeFailed(f"no command could be started in the sandbox: {error}.") from error
        self._pipes.update(pipes)
        self._running.add(execution)
        return execution

    def _finish(self, execution: _Execution) -> None:
        self._running.discard(execution)
        self.spent.add(execution.spent)
        for pipe in execution.pipes:
            pipe.finish()

    async def _killed(self, execution: _Execution, grace_s: float, end_all: EndAll) -> str:
        """Kill a tree; completes even when its caller is cancelled again."""
        task = asyncio.create_task(_kill(execution, grace_s, end_all))
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)
        await asyncio.shield(task)
        return "killed"

    async def ask_to_end(self, grace_s: float) -> None:
        """Send SIGTERM to all running processes. Returns when their commands have ended, or after the grace."""
        running = tuple(self._running)
        for execution in running:
            execution.order_end(grace_s)
        if running:
            await asyncio.wait([execution.ended for execution in running], timeout=grace_s)

    async def close(self) -> None:
        """Kill running processes, and close every channel and pipe."""
        for execution in tuple(self._running):
            execution.order_kill()
        await asyncio.gather(*(execution.answer() for execution in tuple(self._running)), *self._killing)
        for channel in tuple(self._channels):
            channel.hang_up()
        for pipe in tuple(self._pipes):
            pipe.close()


async def _ended(execution: _Execution, end_all: EndAll) -> str:
    """The supervisor's last answer. Raises: RuntimeFailed when the command could not be started."""
    answer = await execution.answer()
    if answer.startswith("lost "):
        raise RuntimeFailed(f"the sandbox is gone: {answer.removeprefix('lost ')}.")
    if answer in ("", "unstarted"):
        await end_all()
    if not execution.is_started and not execution.is_doomed:
        done = "did not take a command in time" if answer else "was killed before a command began"
        raise RuntimeFailed(
            f"the sandbox's spawner {done}, so the sandbox was ended. Unless memory ran out, a process of the "
            "sandbox's own did this to it."
        )
    return answer


async def _kill(execution: _Execution, grace_s: float, end_all: EndAll) -> None:
    if grace_s > 0:
        execution.order_end(grace_s)
        await asyncio.wait([execution.ended], timeout=grace_s)
    execution.order_kill()
    try:
        async with asyncio.timeout(_KILL_GRACE_S):
            answer = await execution.answer()
    except TimeoutError:
        answer = "stuck"
    if answer in ("stuck", "unstarted", ""):
        await end_all()


class _Execution:
    """A command under its supervisor."""

    def __init__(
        self,
        spawner: Spawner,
        order: Order,
        memory: MemoryWatch,
        stdin: bytes | None,
        pipes: Sequence[_Pipe],
        files: Sequence[int],
    ) -> None:
        """`files`: more descriptors for the command, from number 3 on. Raises: OSError."""
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._spawner = spawner
        self._memory = memory
        self.pipes = pipes
        self.spent = ""
        """Resource use reported by the supervisor, once it has answered."""
        self.is_started = self.is_doomed = False
        self._started = asyncio.Event()
        self._heard = bytearray()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Result: the supervisor's last answer; see `answer`."""
        self._supervisor = spawner.supervisor(order.cgroup_procs)
        source = _input(stdin)
        try:
            given = [source, *(pipe.write_fd for pipe in pipes), *files]
            self._supervisor.begin(marshal.dumps(_as_plain(order)), given, self._hear)
        except BaseException:
            self._supervisor.close()
            raise
        finally:
            os.close(source)
        for pipe in pipes:
            pipe.close_write_end()
        self._patience = self._loop.call_later(_START_S, self._end, "unstarted")

    def _hear(self, piece: bytes) -> None:
        self._heard += piece
        if not self.is_started and self._heard.startswith(_STARTED):
            del self._heard[: len(_STARTED)]
            self.is_started = True
            self._patience.cancel()
            self._started.set()
        if not piece or self._heard.count(b"\n") == _NUM_LINES:
            end, _, rest = self._heard.decode().partition("\n")
            self.spent, _, last = rest.partition("\n")
            self._end(end, is_free=last == "free\n")

    def _end(self, word: str, *, is_free: bool = False) -> None:
        """`word`: the last answer; empty when the supervisor died without one, `unstarted` when it did not start."""
        self._patience.cancel()
        if is_free and not self.is_doomed:
            self._spawner.rest(self._supervisor)
        else:
            self._supervisor.close()
        self._started.set()
        if not self.ended.done():
            self.ended.set_result(word)

    async def started(self) -> None:
        """Returns when it has started, or ended without starting."""
        await self._started.wait()

    async def answer(self) -> str:
        return await asyncio.shield(self.ended)

    def order_end(self, grace_s: float) -> None:
        self.is_doomed = True
        self._supervisor.order_end(grace_s)

    def order_kill(self) -> None:
        self.is_doomed = True
        self._supervisor.order_kill()

    def result(self, answer: str, *, timed_out: bool) -> ExecResult:
        word, _, number = answer.partition(" ")
        killed = 9 if word not in ("exit", "signal") else None  # by the node, or the supervisor itself was killed
        return ExecResult(
            exit_code=int(number) if word == "exit" and not timed_out else None,
            signal=None if timed_out else int(number) if word == "signal" else killed,
            timed_out=timed_out,
            stdout=bytes(self.pipes[0].kept),
            stderr=bytes(self.pipes[1].kept),
            truncated=any(pipe.truncated for pipe in self.pipes),
            duration_s=self._loop.time() - self._began_at,
            memory_limit_bytes=self._memory.limit_that_killed() if answer in _KILLED_BY_ANOTHER else None,
        )


def _as_plain(order: Order) -> dict[str, object]:
    return {
        "argv": list(order.argv),
        "cwd": order.cwd,
        "env": dict(order.env),
        "uid": order.uid,
        "own_namespace": order.own_namespace,
        "filters": list(order.filters),
        "rlimits": dict(order.rlimits),
    }


def _input(data: bytes | None) -> int:
    """Standard input of a command: empty, or an in-memory file, which needs no writer. Raises: OSError."""
    if data is None:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    file = os.memfd_create("stdin")
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


class _Pipe:
    """Reads a command's output until its last writer closes it. Keeps the beginning and discards the rest.

    Keeps reading output of background processes after the command's end: closing the pipe would kill them.
    """

    def __init__(
        self,
        name: Literal["stdout", "stderr"],
        sink: OutputSink | None,
        max_bytes: int,
        on_closed: Callable[[_Pipe], None],
    ) -> None:
        self.kept = bytearray()
        self.truncated = False
        self._name: Literal["stdout", "stderr"] = name
        self._sink = sink
        self._max_bytes = max_bytes
        self._on_closed = on_closed
        self._finished = False
        self._fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read, _PIECE_BYTES)

    def close_write_end(self) -> None:
        os.close(self.write_fd)

    def abandon(self) -> None:
        self.close_write_end()
        self.close()

    def _read(self, size: int) -> None:
        try:
            piece = os.read(self._fd, size)
        except BlockingIOError:
            return
        if not piece:
            self.close()
        elif not self._finished:
            self._take(piece)

    def _take(self, piece: bytes) -> None:
        room = self._max_bytes - len(self.kept)
        self.kept += piece[:room]
        self.truncated = self.truncated or len(piece) > room
        if self._sink is not None:
            self._sink(self._name, piece)

    def finish(self) -> None:
        """Keep output written before the command's end, which is in the pipe by now; discard the rest."""
        if self._fd >= 0:
            waiting = int.from_bytes(fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4)), sys.byteorder)
            if waiting:
                self._read(waiting)
        self._finished = True
        self._sink = None

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._on_closed(self)
