"""Channels: both ends of a byte stream to a command, over an unnamed socket.

The command has one end as its descriptor 3. We read and write the other end, or pass it on: a process that receives a
duplicate continues where this one stopped.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from gangline.domain.errors import RuntimeFailed
from gangline.domain.sandbox import Channel, ExecResult


class SocketChannel(Channel):
    """See `Channel`. Bytes are read off the socket only when asked for, so none are lost if this process ends."""

    def __init__(self, ours: socket.socket) -> None:
        ours.setblocking(False)
        self._socket = ours
        self._loop = asyncio.get_running_loop()
        self._reading, self._writing = asyncio.Lock(), asyncio.Lock()
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._sending: asyncio.Task[None] | None = None

    def fileno(self) -> int:
        """Our end, for a process that receives a duplicate of it."""
        return self._socket.fileno()

    async def read(self, max_bytes: int = 1 << 16) -> bytes:
        async with self._reading:
            while self._socket.fileno() >= 0:
                try:
                    return self._socket.recv(max_bytes)
                except BlockingIOError:
                    await self._until_readable()
                except OSError:  # the other end was closed with unread bytes
                    break
        return b""

    async def _until_readable(self) -> None:
        self._readable = ready = self._loop.create_future()
        self._loop.add_reader(self._socket, _wake, ready)
        try:
            await ready
        finally:
            if self._readable is ready:
                self._loop.remove_reader(self._socket)
                self._readable = None

    async def write(self, data: bytes) -> None:
        async with self._writing:
            if self._sending is not None:
                await asyncio.wait([self._sending])  # its caller was cancelled: finish the pending bytes first
            self._sending = asyncio.create_task(self._send(data))
            self._sending.add_done_callback(_seen)
            await asyncio.shield(self._sending)

    async def _send(self, data: bytes) -> None:
        """Raises: RuntimeFailed."""
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await self._until_writable()
            except OSError as error:
                raise RuntimeFailed(f"nobody reads the channel of a command any more: {error}.") from error

    async def _until_writable(self) -> None:
        self._writable = ready = self._loop.create_future()
        self._loop.add_writer(self._socket, _wake, ready)
        try:
            await ready
        finally:
            if self._writable is ready:
                self._loop.remove_writer(self._socket)
                self._writable = None

    def hang_up(self) -> None:
        """Close our end. Idempotent."""
        if self._readable is not None:
            self._loop.remove_reader(self._socket)
            _wake(self._readable)
        if self._writable is not None:
            self._loop.remove_writer(self._socket)
            _wake(self._writable)
        self._readable = self._writable = None
        self._socket.close()


class LocalChannel(SocketChannel):
    """A channel to a command that this process started."""

    def __init__(
        self,
        ours: socket.socket,
        running: asyncio.Task[ExecResult],
        kill: Callable[[], Awaitable[object]],
        on_closed: Callable[[LocalChannel], None],
    ) -> None:
        """`running`: the command; `kill` kills its whole tree and waits until it is dead."""
        super().__init__(ours)
        self._running = running
        self._kill = kill
        self._on_closed = on_closed
        running.add_done_callback(_seen)

    async def close(self) -> None:
        if not self._running.done():
            await self._kill()
            await asyncio.wait([self._running])
        self.hang_up()

    async def ended(self) -> ExecResult:
        return await asyncio.shield(self._running)

    def hang_up(self) -> None:
        super().hang_up()
        self._on_closed(self)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _seen(task: asyncio.Task[ExecResult] | asyncio.Task[None]) -> None:
    """Mark its error as retrieved, since it may never be awaited."""
    if not task.cancelled():
        with suppress(RuntimeFailed):
            task.result()
