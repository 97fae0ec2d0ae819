"""Open listening sockets inside a sandbox's network namespace and hand them to the node.

A socket belongs for ever to the namespace it was opened in, so the node can serve it from outside: nothing of ours runs
in the sandbox. Usage: `main(control_fd)`; for each message, a `port` with an open `/proc/<pid>` folder, the node gets a
socket; port 0 picks a free one. It ends with its control socket.
"""

from __future__ import annotations

import socket

from gangline.runtimes.commands.helpers.namespaces import enter

__all__ = ["main"]

_BACKLOG = 128


def main(control_fd: int) -> None:
    with socket.socket(fileno=control_fd) as control:
        while True:
            message, fds, _flags, _address = socket.recv_fds(control, 64, 1)
            if not fds:
                return
            enter(fds[0], ["net"])
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(("127.0.0.1", int(message)))
                listening.listen(_BACKLOG)
                socket.send_fds(control, [b"ok"], [listening.fileno()])
