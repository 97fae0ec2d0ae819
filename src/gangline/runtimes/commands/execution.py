"""One command in a runtime: started under a supervisor of its own, with bounded output and a classified end.

The process that starts it keeps one end of a control socket: closing it, on purpose or by dying, kills the command's
whole tree. All that happens between a call and its process being started is synchronous, so a cancelled caller never
loses a process.
"""

from __future__ import annotations

import asyncio
import fcntl
import marshal
import os
import socket
import subprocess
import sys
import termios
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

import msgspec

import gangline
from gangline.domain.contracts import ExecResult, OutputSink
from gangline.domain.errors import RuntimeFailed

__all__ = ["Executions", "Order", "helper_argv", "launcher_argv"]

_PIECE_BYTES = 1 << 16
_KILL_GRACE_S = 10.0
"""How long a supervisor may take to kill a tree before the whole sandbox is ended instead."""
_SOURCE = str(Path(gangline.__file__).parents[1])


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's order."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    proc_fd: int | None = None
    """An open `/proc/<pid>` folder of the sandbox to enter; None stays on the host."""
    uid: int | None = None
    """User (and group) to become; None stays who we are."""
    supervisor_uid: int | None = None
    """User of that sandbox that the supervisor becomes, so that the command cannot end it; None stays who we are."""
    own_namespace: bool = False
    """Whether the command gets a user namespace of its own in the sandbox's."""
    filters: Sequence[bytes] = ()
    """Filters of system calls to put on, as the kernel takes them, the first one first."""
    cgroup_procs: Sequence[str] = ()
    """Host paths of the `cgroup.procs` files to join."""
    rlimits: Mapping[int, int] = {}
    """RLIMIT number -> value."""


def helper_argv(name: str, argument: int | str) -> list[str]:
    """Command line of `gangline.runtimes.commands.helpers.<name>`. `argument`: of its `main`, as Python writes it."""
    program = f"import sys; sys.path.append({_SOURCE!r}); from gangline.runtimes.commands.helpers.{name} import main; "
    return [sys.executable, "-I", "-S", "-c", f"{program}main({argument})"]


def launcher_argv(argv: Sequence[str]) -> list[str]:
    """The same program with an empty session keyring of its own."""
    return [*helper_argv("launcher", "sys.argv[1:]"), *argv]


class Executions:
    """The commands that run in one sandbox, and the pipes that outlived theirs."""

    def __init__(self, label: str) -> None:
        """`label` marks our processes for the reaper."""
        self._label = label
        self._running: set[_Execution] = set()
        self._killing: set[asyncio.Task[None]] = set()
        self._pipes: set[_Pipe] = set()

    async def run(
        self,
        order: Order,
        *,
        end_all: Callable[[], Awaitable[None]],
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        on_output: OutputSink | None = None,
        max_output_bytes: int,
    ) -> ExecResult:
        """Start the command and wait for it. Cancelled or out of time, its whole tree is dead when this returns.

        `end_all` kills every process of the sandbox and waits for their end: called when a supervisor was killed, or
        cannot keep up with its tree. Raises: RuntimeFailed when the sandbox cannot be entered.
        """
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        pipes = tuple(self._pipe(name, on_output, max_output_bytes) for name in ("stdout", "stderr"))
        try:
            execution = _Execution(order, stdin, pipes, self._label)
        except OSError as error:
            for pipe in pipes:
                pipe.abandon()
            raise RuntimeFailed(f"no process could be started for a command: {error}.") from error
        self._running.add(execution)
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                answer = await execution.answer()
                if not answer:
                    await end_all()
                if answer.startswith("lost "):
                    raise RuntimeFailed(f"the sandbox is gone: {answer.removeprefix('lost ')}.")
        except TimeoutError:
            timed_out = True
            answer = await self._killed(execution, end_all)
        except asyncio.CancelledError:
            await self._killed(execution, end_all)
            raise
        finally:
            self._running.discard(execution)
            for pipe in pipes:
                pipe.finish()
        return _result(answer, timed_out, pipes, loop.time() - started_at)

    def _pipe(self, name: Literal["stdout", "stderr"], on_output: OutputSink | None, max_bytes: int) -> _Pipe:
        pipe = _Pipe(name, on_output, max_bytes, self._pipes.discard)
        self._pipes.add(pipe)
        return pipe

    async def _killed(self, execution: _Execution, end_all: Callable[[], Awaitable[None]]) -> str:
        """Kill a tree; this goes on even when its caller is cancelled once more."""
        task = asyncio.create_task(_kill(execution, end_all))
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)
        await asyncio.shield(task)
        return "killed"

    async def close(self) -> None:
        """Kill running processes, and close every pipe."""
        for execution in tuple(self._running):
            execution.order_kill()
        await asyncio.gather(*(execution.answer() for execution in tuple(self._running)), *self._killing)
        for pipe in tuple(self._pipes):
            pipe.close()


async def _kill(execution: _Execution, end_all: Callable[[], Awaitable[None]]) -> None:
    execution.order_kill()
    try:
        async with asyncio.timeout(_KILL_GRACE_S):
            answer = await execution.answer()
    except TimeoutError:
        answer = "stuck"
    if answer in ("stuck", ""):
        await end_all()


def _result(answer: str, timed_out: bool, pipes: Sequence[_Pipe], duration_s: float) -> ExecResult:
    word, _, number = answer.partition(" ")
    killed = 9 if word not in ("exit", "signal") else None  # by the node, or the supervisor itself was killed
    return ExecResult(
        exit_code=int(number) if word == "exit" and not timed_out else None,
        signal=None if timed_out else int(number) if word == "signal" else killed,
        timed_out=timed_out,
        stdout=bytes(pipes[0].kept),
        stderr=bytes(pipes[1].kept),
        truncated=any(pipe.truncated for pipe in pipes),
        duration_s=duration_s,
    )


class _Execution:
    """A supervisor process and the control socket to it."""

    def __init__(self, order: Order, stdin: bytes | None, pipes: Sequence[_Pipe], label: str) -> None:
        with ExitStack() as on_failure:
            ours, theirs = socket.socketpair()
            on_failure.enter_context(ours)
            with theirs, _input(stdin) as source:
                self._process = self._spawn(order, source.fileno(), theirs.fileno(), pipes, label)
            on_failure.pop_all()
        for pipe in pipes:
            pipe.close_write_end()
        ours.setblocking(False)
        self._control = ours
        self._answer = asyncio.ensure_future(self._converse(marshal.dumps(_as_plain(order))))

    @staticmethod
    def _spawn(
        order: Order, stdin_fd: int, control_fd: int, pipes: Sequence[_Pipe], label: str
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            helper_argv("supervisor", control_fd),
            stdin=stdin_fd,
            stdout=pipes[0].write_fd,
            stderr=pipes[1].write_fd,
            pass_fds=[control_fd, *([] if order.proc_fd is None else [order.proc_fd])],
            env={"GANGLINE_RUNTIME": label},
            cwd="/",
        )

    async def _converse(self, order: bytes) -> str:
        """The supervisor's answer; empty when it died without one."""
        loop = asyncio.get_running_loop()
        answer = bytearray()
        with suppress(ConnectionError):
            await loop.sock_sendall(self._control, len(order).to_bytes(4, "big") + order)
            while piece := await loop.sock_recv(self._control, 256):
                answer += piece
        self._control.close()
        self._process.wait()  # its end of the socket is closed by its exit: there is nothing to wait for
        return answer.decode()

    async def answer(self) -> str:
        return await asyncio.shield(self._answer)

    def order_kill(self) -> None:
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)


def _as_plain(order: Order) -> dict[str, object]:
    return {
        "argv": list(order.argv),
        "cwd": order.cwd,
        "env": dict(order.env),
        "proc_fd": order.proc_fd,
        "uid": order.uid,
        "supervisor_uid": order.supervisor_uid,
        "own_namespace": order.own_namespace,
        "filters": list(order.filters),
        "cgroup_procs": list(order.cgroup_procs),
        "rlimits": dict(order.rlimits),
    }


def _input(data: bytes | None):
    """A command's standard input: nothing, or a file in memory, which needs nobody to feed it."""
    if data is None:
        return open(os.devnull, "rb")
    file = os.fdopen(os.memfd_create("stdin"), "w+b")
    file.write(data)
    file.seek(0)
    return file


class _Pipe:
    """Reads a command's output for as long as anyone can write it: the front is kept, the rest is drained.

    Output of background processes after the command's end is drained too: closing the pipe would kill them.
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
        """Read the output from before the command's end, which is in the pipe by now; then only drain."""
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
