"""The process that keeps a sandbox's namespaces alive: `bwrap` with a shell that waits for its input to end.

Laws:
- When the process that started it (the node's keeper) dies, however it dies, so do `bwrap`, the sandbox's first process
  and all that lives with it: it dies with its parent, and its input ends. The parent is the *thread* that started it:
  the event loop's thread must live on.
- The sandbox's first process is bubblewrap's own, which reaps; the harness is never process 1.
- A process is named by a pidfd and an open `/proc` folder, which cannot come to mean another one.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from gangline.domain.errors import RuntimeFailed

__all__ = ["Holder"]

_START_S = 30.0
_MAX_COMPLAINT_BYTES = 4096
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


class Holder:
    """One started sandbox's namespaces."""

    def __init__(self, process: subprocess.Popen[bytes], first_pid: int) -> None:
        self._process = process
        self._pidfd = os.pidfd_open(first_pid)
        self.proc_fd = os.open(f"/proc/{first_pid}", os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC)
        """An open `/proc/<pid>` folder of the sandbox's first process; -1 once closed."""
        self._doomed = False

    @classmethod
    async def start(cls, arguments: Sequence[str], label: str) -> Holder:
        """Start `bwrap` and wait until the sandbox is complete. Raises: RuntimeFailed with what bwrap said.

        A cancelled caller waits for that too: `bwrap` killed halfway can leave a child that waits for it for ever.
        """
        task = asyncio.create_task(cls._started(arguments, label))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if task.exception() is None:
                await task.result().end()
            raise

    @classmethod
    async def _started(cls, arguments: Sequence[str], label: str) -> Holder:
        info_read, info_write = os.pipe2(os.O_CLOEXEC)
        try:
            process = _spawn(arguments, label, info_write)
        finally:
            os.close(info_write)
        try:
            await _until_ready(process)
            return cls(process, json.loads(os.read(info_read, 65536))["child-pid"])
        except BaseException:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
            raise
        finally:
            os.close(info_read)
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()

    @property
    def alive(self) -> bool:
        """Whether commands can be started here: from the order to die on, they cannot."""
        if self._doomed or self._pidfd < 0:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def kill(self) -> None:
        """Order the death of every process in the sandbox. Returns at once."""
        self._doomed = True
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self) -> None:
        """Kill every process in the sandbox and wait until the last one is gone."""
        if self._pidfd < 0:
            return
        self.kill()
        await readable(self._pidfd)
        await asyncio.to_thread(self._process.wait)
        assert self._process.stdin is not None
        self._process.stdin.close()
        pidfd, self._pidfd = self._pidfd, -1
        proc_fd, self.proc_fd = self.proc_fd, -1
        os.close(pidfd)
        os.close(proc_fd)


def _spawn(arguments: Sequence[str], label: str, info_fd: int) -> subprocess.Popen[bytes]:
    try:
        with os.fdopen(os.memfd_create("arguments"), "w+b") as file:  # the command line can be read in the sandbox
            file.write(b"\0".join(map(os.fsencode, arguments)))
            file.seek(0)
            return subprocess.Popen(
                ["bwrap", "--info-fd", str(info_fd), "--args", str(file.fileno()), "sh", "-c", "echo ready; read _"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[info_fd, file.fileno()],
                env={"PATH": _PATH, "GANGLINE_RUNTIME": label},
                cwd="/",
            )
    except OSError as error:
        raise RuntimeFailed(f"bwrap could not be started: {error}. Run `apt-get install bubblewrap`.") from error


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
        raise RuntimeFailed(f"the sandbox did not start: {complaint or 'bwrap ended without a word'}")


async def readable(fd: int) -> None:
    """Wait until `fd` can be read, or has ended."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)
