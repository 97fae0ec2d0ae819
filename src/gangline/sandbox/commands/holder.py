"""The process that keeps a sandbox's namespaces alive: `bwrap`, or another launcher of the kind, with a shell that
waits for its input to end.

Invariants:
- When the process that started it (the node's keeper) dies for any reason, so do the launcher, the sandbox's first
  process and everything in its namespaces: its input ends, and `bwrap` dies with its parent. The parent is the *thread*
  that started it, so the event loop's thread must stay alive.
- The sandbox's first process belongs to the launcher and reaps orphans; the harness is never process 1.
- A process is identified by a pidfd and an open `/proc` folder, which cannot come to refer to another process.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
from contextlib import suppress
from typing import Protocol

from gangline.domain.errors import RuntimeFailed
from gangline.machine.event_loop import to_end

_START_S = 30.0
_MAX_COMPLAINT_BYTES = 4096
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
"""Where a launcher and its programs are searched."""
WAITING = ("sh", "-c", "echo ready; read _")
"""The command that a launcher runs inside."""


class Launch(Protocol):
    """One start of a program that makes namespaces and runs `WAITING` in them."""

    def spawn(self, label: str) -> subprocess.Popen[bytes]:
        """Start it with pipes for its three streams. Raises: RuntimeFailed."""
        ...

    async def first_pid(self, process: subprocess.Popen[bytes]) -> int:
        """The host's number of the sandbox's process 1, now that it is ready. Raises: RuntimeFailed."""
        ...

    def close(self) -> None:
        """Release the resources of this start. Called once, when the launcher has ended."""
        ...


class Holder:
    """The namespaces of one started sandbox."""

    def __init__(self, process: subprocess.Popen[bytes], first_pid: int) -> None:
        self._process = process
        self._pidfd = os.pidfd_open(first_pid)
        self.proc_fd = os.open(f"/proc/{first_pid}", os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC)
        """An open `/proc/<pid>` folder of the sandbox's first process; -1 once closed."""
        self._doomed = False

    @classmethod
    async def start(cls, launch: Launch, label: str) -> Holder:
        """Start the launcher and wait until the sandbox is complete. Raises: RuntimeFailed with its error output.

        Waits even when cancelled: killing `bwrap` during its start can leave a child that waits for it forever.
        """
        return await to_end(cls._started(launch, label), Holder.end)

    @classmethod
    async def _started(cls, launch: Launch, label: str) -> Holder:
        try:
            process = launch.spawn(label)
            try:
                await _until_ready(process)
                return cls(process, await launch.first_pid(process))
            except BaseException:
                process.kill()
                process.wait()
                assert process.stdin is not None
                process.stdin.close()
                raise
            finally:
                for stream in (process.stdout, process.stderr):
                    assert stream is not None
                    stream.close()
        finally:
            launch.close()

    @property
    def alive(self) -> bool:
        """Whether commands can be started here. False as soon as the kill is ordered."""
        if self._doomed or self._pidfd < 0:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def kill(self) -> None:
        """Kill every process in the sandbox. Returns at once."""
        self._doomed = True
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def kill_all(self) -> None:
        """Kill every process in the sandbox and wait until they are dead. `end` must still be called."""
        self.kill()
        if self._pidfd >= 0:
            await process_ended(self._pidfd)

    async def end(self) -> None:
        """Kill every process in the sandbox and wait until the last one is gone."""
        if self._pidfd < 0:
            return
        self.kill()
        await readable(self._pidfd)
        await _child_ended(self._process)
        assert self._process.stdin is not None
        self._process.stdin.close()
        pidfd, self._pidfd = self._pidfd, -1
        proc_fd, self.proc_fd = self.proc_fd, -1
        os.close(pidfd)
        os.close(proc_fd)


async def _until_ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(_START_S):
            await readable(process.stdout.fileno())
    except TimeoutError:
        raise RuntimeFailed(f"the sandbox was not ready after {_START_S:.0f} s.") from None
    if os.read(process.stdout.fileno(), 64) != b"ready\n":
        complaint = os.read(process.stderr.fileno(), _MAX_COMPLAINT_BYTES).decode(errors="replace").strip()
        raise RuntimeFailed(f"the sandbox did not start: {complaint or 'it ended without a word'}")


async def process_ended(pidfd: int) -> None:
    """Wait until a process has ended, with its whole pid namespace if it is the first process there.

    `pidfd` may be closed meanwhile.
    """
    own = os.dup(pidfd)
    try:
        await readable(own)
    finally:
        os.close(own)


async def _child_ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child process without using a thread for each."""
    if process.returncode is None:
        pidfd = os.pidfd_open(process.pid)
        try:
            await readable(pidfd)
        finally:
            os.close(pidfd)
    process.wait()


async def readable(fd: int) -> None:
    """Wait until `fd` is readable or at its end."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)
