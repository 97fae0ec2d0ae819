"""Open listening sockets inside a sandbox's network namespace and hand them to the node.

A socket stays in the namespace where it was opened, so the node can serve it from outside, without running anything in
the sandbox.
"""

from __future__ import annotations

import _socket
import sys

from gangline.sandbox.commands.helpers.namespaces import enter

TYPE_CHECKING = False  # see `forkserver`
if TYPE_CHECKING:
    from collections.abc import Sequence

_BACKLOG = 128


def main(fds: Sequence[int], port: int) -> None:
    """fds: the socket for the answer, and an open `/proc/<pid>` folder of a process in the network.

    port: on 127.0.0.1 there; 0 picks a free one. Raises: OSError.
    """
    enter(fds[1], ["net"])
    listening = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listening.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(_BACKLOG)
    packed = listening.fileno().to_bytes(4, sys.byteorder)
    answer = _socket.socket(fileno=fds[0])
    answer.sendmsg([b"ok"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)])
    answer.detach()  # closed only when this process ends, which the node waits for
