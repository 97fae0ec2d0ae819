"""Fork the processes that wait to become commands, from within the sandbox's control groups.

Laws:
- To join a group may take twenty milliseconds, because the kernel waits for all processors. The forker joins once, and
  its forks are in the groups from their birth on. Like them, it is in the agent's groups, but not of the agent's user.
- The forker and its forks are children of the supervisor that are not seen by who waits for any child. So the children
  that are seen are the agent's processes; `exec` makes a fork one of them.
- The next fork is made while a command runs. It does not read the control socket before it is told to: until then,
  what comes there is for the supervisor.
- Without a forker, the supervisor forks by itself, and that fork joins the groups. A killed forker is replaced once for
  each command at most: otherwise an agent of the same user could keep us forking.
- All of them end with the supervisor, for they wait on what only it has open.
"""

from __future__ import annotations

import _socket
import os
import select
import sys

from gangline.runtimes.commands.helpers.command import become_command, prepared
from gangline.runtimes.commands.helpers.namespaces import can_fork_unseen, fork_unseen

TYPE_CHECKING = False  # see `zygote`
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Sequence
    from typing import NoReturn
else:
    import _signal

__all__ = ["WALL", "Forker"]

WALL = 0x40000000
"""An option of `waitpid`: children that are not seen otherwise, too."""

_ASK = b"f"
_GO = b"g"
_PID_BYTES = 4
_PATIENCE_MS = 2000
"""How long a forker may take. One that an agent of our own user has stopped never answers."""


class Forker:
    """A supervisor's way to the next process that waits for an order."""

    def __init__(
        self,
        control: _socket.socket,
        told: Callable[[], tuple[int, bytes]],
        cgroup_fds: Sequence[int],
        user_fd: int | None,
    ) -> None:
        """
        told: asked once in each child; see `command.become_command`.
        cgroup_fds, user_fd: see `supervisor.supervise`.
        """
        self._control = control
        self._told = told
        self._cgroup_fds = cgroup_fds
        self._user_fd = user_fd
        self._new_pipe()
        self._is_first = True
        self._pid = 0
        self._asked: _socket.socket | None = None
        """Our end of the socket to the forker; None without one."""
        self._is_asked = False
        """Whether it has a fork to answer for."""
        self._is_prepared = False

    def _new_pipe(self) -> None:
        """Where the next fork is told to go."""
        self._go_fd, self._let_go_fd = os.pipe2(os.O_CLOEXEC)

    def prepare(self) -> None:
        """Have the next fork made; once for each command. Returns at once."""
        if not self._is_prepared and can_fork_unseen():
            self._is_prepared = True
            try:
                self._ask()
            except OSError:
                return  # the next order's caller is told, if it is so then

    def _ask(self) -> None:
        """Raises: OSError where nothing can be forked."""
        if self._asked is None:
            self._asked = self._started()
        if not self._is_asked:
            try:
                self._asked.send(_ASK)
            except OSError:
                self._lose()
            else:
                self._is_asked = True

    def listening(self) -> int:
        """Number of a process that waits for an order. Raises: OSError.

        The first one comes without a forker, which would have to be there before it.
        """
        waiting = self._first() if self._is_first else self._answered() or self._forked()
        self._is_prepared = False
        self._forget_go()
        os.write(self._let_go_fd, _GO)
        return waiting

    def _first(self) -> int:
        self._is_first = not can_fork_unseen()
        return self._forked()

    def _forget_go(self) -> None:
        """That of a fork which was killed before it went."""
        if _is_readable(self._go_fd, 0):
            os.read(self._go_fd, 1)

    def _answered(self) -> int:
        """The forker's next; 0: it made none. Raises: OSError."""
        self._ask()
        if self._asked is None:
            return 0
        self._is_asked = False
        answer = self._asked.recv(_PID_BYTES) if _is_readable(self._asked.fileno(), _PATIENCE_MS) else b""
        if not answer:
            self._lose()
        return int.from_bytes(answer, sys.byteorder)

    def _lose(self) -> None:
        """The forker, which is gone or was stopped. A fork that it has not told of is never let go, and ends."""
        self._close()
        os.kill(self._pid, _signal.SIGKILL)
        os.waitpid(self._pid, WALL)
        os.close(self._go_fd)
        os.close(self._let_go_fd)
        self._new_pipe()

    def _close(self) -> None:
        if self._asked is not None:
            self._asked.close()
        self._asked, self._is_asked = None, False

    def _started(self) -> _socket.socket:
        """A socket to a new forker. Raises: OSError."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            self._pid = fork_unseen()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if self._pid == 0:
            try:
                ours.close()
                self._serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        return ours

    def _serve(self, asked: _socket.socket) -> None:
        """Be the forker."""
        told = self._as_child()
        failure = prepared(self._cgroup_fds, self._user_fd)
        while asked.recv(1):
            try:
                pid = fork_unseen(as_sibling=True)
            except OSError:
                pid = 0
            else:
                if pid == 0:
                    asked.close()
                    self._become_command(told, failure)
            asked.send(pid.to_bytes(_PID_BYTES, sys.byteorder))

    def _forked(self) -> int:
        """A fork of the supervisor itself. Raises: OSError."""
        pid = fork_unseen()
        if pid == 0:
            try:
                told = self._as_child()
                self._become_command(told, prepared(self._cgroup_fds, self._user_fd))
            finally:
                os._exit(126)
        return pid

    def _as_child(self) -> tuple[int, bytes]:
        """Close what only the supervisor may have open."""
        os.close(self._let_go_fd)
        self._close()
        return self._told()

    def _become_command(self, told: tuple[int, bytes], failure: OSError | None) -> NoReturn:
        if not os.read(self._go_fd, 1):
            os._exit(0)  # its supervisor is gone
        become_command(self._control, told, failure)


def _is_readable(fd: int, timeout_ms: int) -> bool:
    """Or at its end."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))
