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

    The process that has this end owns the commands: closing it, on purpose or by dying, kills the one that runs.
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
        """Whether it lives, as far as anyone can know, and has nothing to say while it has no command."""
        if self._control.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        return not poll.poll(0)

    def begin(self, order: bytes, files: Sequence[int], hear: Callable[[bytes], None]) -> None:
        """Have a command run. Returns at once.

        files: the command's descriptors, from number 0 on. hear: gets the answer in pieces, the last one empty where
        the supervisor is gone. Raises: OSError.
        """
        message = len(order).to_bytes(_LENGTH_BYTES, "big") + order
        num_sent = socket.send_fds(self._control, [message], files)
        self._hear = hear
        if num_sent < len(message):
            self._sending = self._loop.create_task(self._send(message[num_sent:]))

    async def _send(self, rest: bytes) -> None:
        with suppress(OSError):  # the answer's end tells
            await self._loop.sock_sendall(self._control, rest)

    def _read(self) -> None:
        try:
            piece = self._control.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:  # it died with something unread
            piece = b""
        hear = self._hear
        if hear is None or not piece:
            self.close()
        if hear is not None:
            hear(piece)

    def rest(self) -> None:
        """Its command has ended, and it may take another one."""
        self._hear = None

    def order_end(self, grace_s: float) -> None:
        """SIGTERM for the command's processes, and SIGKILL for what is left after the grace."""
        with suppress(OSError):
            self._control.send(b"e" + int(1000 * grace_s).to_bytes(_GRACE_BYTES, "big"))

    def order_kill(self) -> None:
        """Kill the command's whole tree. It takes no other command then."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Release it. Idempotent."""
        self._hear = None  # the command's, which has this one
        if self._control.fileno() >= 0:
            if self._sending is not None:
                self._sending.cancel()
            self._loop.remove_reader(self._control)
            self._control.close()
