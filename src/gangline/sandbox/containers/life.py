"""One run of a container, whose first process waits for its keeper to die.

Invariants:
- The first process is a shell of the image. It runs as root without privileges, and runs nothing of the agent's. It
  reads from a pipe whose other end only this process holds: when that closes for any reason, the container ends.
- It reaps orphaned processes. The agent runs as another user and cannot kill it.
- The pipes are unlinked once they are open, so that nothing else can open them.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from gangline.domain.errors import RuntimeFailed
from gangline.sandbox.commands.holder import process_ended, readable

PIPES = "/run/gangline"
"""Where a container sees the folder of its pipes."""
_START_S = 60.0
_MAX_COMPLAINT_BYTES = 4096
_SCRIPT = Path(__file__).with_name("first_process.sh").read_text(encoding="utf-8")


def first_process(
    uid: int, own: Sequence[str], through: Sequence[str], *, grader_uid: int | None, grader_home: str
) -> list[str]:
    """Command line of a container.

    own: folders that the agent, user `uid`, owns with all that is in them; the first is its HOME.
    through: folders that every user must be able to enter.
    grader_uid: user that owns `grader_home`, which only that user may enter; None if there is none.
    """
    return ["sh", "-c", _SCRIPT, PIPES, str(uid), str(grader_uid or ""), grader_home, *own, ":", *through]


class Pipes:
    """Made before a container starts and removed from the folder once it has started. Blocks only on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o755, exist_ok=True)
        self.life, self.ready = (self._made(name) for name in ("life", "ready"))

    def _made(self, name: str) -> int:
        path = self._folder / name
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # opening it does not wait

    def hide(self) -> None:
        for name in ("life", "ready"):
            (self._folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        self.hide()
        for fd in (self.life, self.ready):
            os.close(fd)


class ContainerLife:
    """A running container."""

    def __init__(self, pid: int, pipes: Pipes) -> None:
        """Raises: OSError when the process is gone, or on another machine."""
        self._pipes = pipes
        self.pid = pid
        self.proc_fd = os.open(f"/proc/{pid}", os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC)
        """An open `/proc/<pid>` folder of the first process; -1 once closed."""
        self._pidfd = self._root = -1
        try:
            self._pidfd = os.pidfd_open(pid)
            self._root = os.open("root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.proc_fd)
        except BaseException:
            self.close()
            raise

    @classmethod
    async def begin(cls, pipes: Pipes, start: Callable[[], Awaitable[int]]) -> ContainerLife:
        """`start` starts the container and returns the pid of its first process. Raises: its errors, RuntimeFailed."""
        try:
            pid = await start()
            life = cls(pid, pipes)
        except OSError as error:
            pipes.close()
            raise RuntimeFailed(
                f"the first process of a container is not here ({error}): the container has ended already, or its "
                "engine runs on another machine or in another process namespace than this node."
            ) from error
        except BaseException:
            pipes.close()
            raise
        try:
            await life._until_ready()
        except BaseException:
            life.close()
            raise
        return life

    async def _until_ready(self) -> None:
        ready, ended = (asyncio.create_task(readable(fd)) for fd in (self._pipes.ready, self._pidfd))
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise RuntimeFailed(f"a container was not ready after {_START_S:.0f} s.") from None
        finally:
            for task in (ready, ended):
                task.cancel()
            await asyncio.wait({ready, ended})
        output = b""
        with suppress(BlockingIOError):
            output = os.read(self._pipes.ready, _MAX_COMPLAINT_BYTES)
        if not output.endswith(b"ready\n"):
            complaint = output.decode(errors="replace").strip() or "it ended without a word"
            raise RuntimeFailed(f"the container could not be prepared: {complaint}. Its image needs sh and coreutils.")
        self._pipes.hide()

    @property
    def alive(self) -> bool:
        if self._pidfd < 0:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def root(self) -> int:
        """A new descriptor of the folder that processes of the container see as `/`. The caller closes it."""
        return os.dup(self._root)

    def host_uid(self, uid: int) -> int | None:
        """The host's user for user `uid` of the container, or None."""
        for line in Path(f"/proc/{self.pid}/uid_map").read_text().splitlines():
            inside, outside, count = map(int, line.split())
            if inside <= uid < inside + count:
                return outside + uid - inside
        return None

    def is_in_our_network(self) -> bool:
        ours, theirs = os.stat("/proc/self/ns/net"), os.stat("ns/net", dir_fd=self.proc_fd)
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)

    def kill(self) -> None:
        """Kill every process in the container. Returns at once."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def kill_all(self) -> None:
        """Kill every process in the container and wait until they are dead."""
        self.kill()
        if self._pidfd >= 0:
            await process_ended(self._pidfd)

    def close(self) -> None:
        """Release it. The container ends, if it has not already."""
        for fd in (self._pidfd, self.proc_fd, self._root):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self.proc_fd = self._root = -1
        self._pipes.close()
