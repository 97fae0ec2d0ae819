"""A child process that answers one request at a time, over its own socket pair."""

from __future__ import annotations

import _socket
import marshal
import os

from .loop import Lines, Loop

TYPE_CHECKING = False  # `typing` takes as long to import as all the rest: see `gangline.agents.tools.in_sandbox`
if TYPE_CHECKING:
    import signal as _signal
    from typing import Any, Callable
else:
    import _signal

MAX_LINE_BYTES = 32 << 20
SOCKET = 3
"""The child's descriptor of its socket."""
_END_POLL_S = 0.01


class Worker:
    """One child, in a separate process session."""

    def __init__(
        self,
        loop: Loop,
        body: Callable[[int], None],
        on_line: Callable[[bytes], None],
        on_end: Callable[[int], None],
        output: int | None = None,
    ) -> None:
        """body: runs in the child, with the descriptor of its socket. on_end: called with the exit code, after the
        child's last line; 128 plus the number after a signal. output: a descriptor to become its stdout and stderr.
        """
        self._loop = loop
        self._on_end = on_end
        ours, theirs = _socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become_child(theirs.fileno(), output)
                body(SOCKET)
            finally:
                os._exit(1)
        theirs.close()
        self._lines = Lines(loop, ours.detach(), on_line, self._closed, MAX_LINE_BYTES)

    def send(self, line: bytes) -> None:
        self._lines.send(line + b"\n")

    def send_raw(self, data: bytes) -> None:
        self._lines.send(data)

    def interrupt(self) -> None:
        """Send SIGINT to the child and its process group."""
        try:
            os.killpg(self.pid, _signal.SIGINT)
        except ProcessLookupError:  # it has ended
            pass

    def kill(self) -> None:
        """Kill the child without calling `on_end`."""
        self._lines.close()
        self._on_end = _ignore
        try:
            os.killpg(self.pid, _signal.SIGKILL)
        except ProcessLookupError:  # it has not become the leader of its group yet
            os.kill(self.pid, _signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def _closed(self) -> None:
        if self._on_end is _ignore:
            return
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            self._loop.later(_END_POLL_S, self._closed)
            return
        self._on_end(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def encoded(program: dict[str, Any]) -> bytes:
    """A program in the form that `bootstrap` reads: its length as eight hexadecimal digits, and its `marshal` bytes."""
    data = marshal.dumps(program)
    return b"%08x" % len(data) + data


def _ignore(_code: int) -> None:
    pass


def _become_child(fd: int, output: int | None) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    for stream in (1, 2):
        os.dup2(nothing if output is None else output, stream)
    if fd != SOCKET:
        os.dup2(fd, SOCKET)
    os.set_inheritable(SOCKET, True)
    os.closerange(SOCKET + 1, 1024)
