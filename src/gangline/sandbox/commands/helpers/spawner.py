"""Wait inside a sandbox, and fork supervisors of commands.

Invariants:
- It has entered the sandbox before it hears of any command, and imports nothing there: the files are the agent's.
- Nobody inside can reach it: its orders come over a socket without a name, which no other process holds. Inside a
  sandbox it is not dumpable, nor are its forks: nobody traces them, reads their memory or takes their descriptors.
- It knows nothing of a command. It adopts no orphans, so that processes which commands leave behind
  are children of the sandbox's first process.
- It ends when the socket closes; commands that run then are their supervisors'.
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

    uid: the user of that sandbox to become; None stays who we are.
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
        if os.fork():  # only a child is in the namespace of processes
            os._exit(0)
    _serve(_socket.socket(fileno=fds[0]), user_fd)


def _serve(orders: _socket.socket, user_fd: int | None) -> NoReturn:
    """Each message has a supervisor's control socket, and open `cgroup.procs` files that its commands join."""
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
