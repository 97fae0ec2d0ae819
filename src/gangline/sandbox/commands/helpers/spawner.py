"""Wait inside a sandbox, and fork supervisors of commands.

Invariants:
- It enters the sandbox before it receives any command, and imports nothing there: the files are the agent's.
- No process inside can reach it: its orders come over an unnamed socket, which no other process holds. Inside a sandbox
  neither it nor its forks are dumpable, so they cannot be traced, their memory cannot be read and their descriptors
  cannot be taken.
- It knows nothing about commands. It adopts no orphans, so processes left behind by commands become children of the
  sandbox's first process.
- It ends when the socket closes; running commands then belong to their supervisors.
"""

from __future__ import annotations

import _socket
import os
import sys

from gangline.sandbox.commands.helpers.descriptors import received
from gangline.sandbox.commands.helpers.namespaces import become_user, enter, hide_from_tracers, leave_session_keyring
from gangline.sandbox.commands.helpers.supervisor import supervise

TYPE_CHECKING = False  # see `forkserver`
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

_KINDS = ("cgroup", "ipc", "uts", "net", "pid", "mnt")


def main(fds: Sequence[int], uid: int | None) -> NoReturn:
    """fds: the socket for orders; an open `/proc/<pid>` folder of the sandbox to enter, where it has namespaces.

    uid: the user of that sandbox to become; None keeps the current one.
    Raises: OSError when the sandbox cannot be entered.
    """
    leave_session_keyring()
    user_fd = None
    if len(fds) > 1:
        user_fd = os.open("ns/user", os.O_RDONLY | os.O_CLOEXEC, dir_fd=fds[1])
        enter(fds[1], _KINDS)
        os.close(fds[1])
        if uid is not None:
            become_user(uid)
        hide_from_tracers()
        sys.meta_path.clear()
        sys.path.clear()
        if os.fork():  # only children are in the pid namespace
            os._exit(0)
    _serve(_socket.socket(fileno=fds[0]), user_fd)


def _serve(orders: _socket.socket, user_fd: int | None) -> NoReturn:
    """Each message carries a supervisor's control socket, and open `cgroup.procs` files for its commands to join."""
    orders.send(b"ready")
    while True:
        message, fds = received(orders)
        if not message:
            os._exit(0)
        try:
            is_supervisor = os.fork() == 0
        except OSError as error:
            os.write(fds[0], f"lost {error}\n\nlast\n".encode())
        else:
            if is_supervisor:
                orders.close()
                supervise(fds[0], fds[1:], user_fd)
        for fd in fds:
            os.close(fd)
