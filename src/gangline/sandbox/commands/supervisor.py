"""A supervisor of commands, from outside: see `helpers.supervisor`."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

_LENGTH_BYTES, _GRACE_BYTES = 4, 4


class Supervisor:
    """Takes one command after another, until one leaves a process behind or is killed.

    The process that holds this end owns the commands: closing it, deliberately or by dying, kills the running one.
    """

    def __init__(self, control: socket.socket, groups: Sequence[str]) -> None:
        """groups: paths of the `cgroup.procs` files that its commands join."""
        control.setblocking(False)
        self.groups = tuple(groups)
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(control, self._read)
        self._hear: Callable[[bytes], None] | None = None
        self._sending: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it is alive, as far as can be known, and idle without unread output."""
        if self._control.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        return not poll.poll(0)

    def begin(self, order: bytes, files: Sequence[int], hear: Callable[[bytes], None]) -> None:
        """Run a command. Returns at once.

        files: the command's descriptors, from number 0 on. hear: receives the answer in pieces, the last one empty if
        the supervisor is gone. Raises: OSError.
        """
        message = len(order).to_bytes(_LENGTH_BYTES, "big") + order
        num_sent = socket.send_fds(self._control, [message], files)
        self._hear = hear
        if num_sent < len(message):
            self._sending = self._loop.create_task(self._send(message[num_sent:]))

    async def _send(self, rest: bytes) -> None:
        with suppress(OSError):  # the end of the answer reports it
            await self._loop.sock_sendall(self._control, rest)

    def _read(self) -> None:
        try:
            piece = self._control.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:  # it died with unread bytes
            piece = b""
        hear = self._hear
        if hear is None or not piece:
            self.close()
        if hear is not None:
            hear(piece)

    def rest(self) -> None:
        """Its command has ended; it may take another one."""
        self._hear = None

    def order_end(self, grace_s: float) -> None:
        """Send SIGTERM to the command's processes, and SIGKILL to the rest after the grace."""
        with suppress(OSError):
            self._control.send(b"e" + int(1000 * grace_s).to_bytes(_GRACE_BYTES, "big"))

    def order_kill(self) -> None:
        """Kill the command's whole tree. The supervisor takes no other command then."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Release it. Idempotent."""
        self._hear = None  # it belongs to the command, which refers to this one
        if self._control.fileno() >= 0:
            if self._sending is not None:
                self._sending.cancel()
            self._loop.remove_reader(self._control)
            self._control.close()
