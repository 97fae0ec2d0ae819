"""Brings the node's proxy into a network that has only `lo`.

A helper opens a listening socket inside the sandbox's network namespace and hands it over; from then on the node's own
event loop accepts the sandbox's connections and carries the bytes to the proxy's port on the host's loopback. Nothing
runs inside the sandbox, and nothing else can be reached from it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import cast

from gangline.domain.errors import RuntimeFailed
from gangline.machine.event_loop import to_end
from gangline.sandbox.commands.forkserver import fork_helper
from gangline.sandbox.commands.holder import readable
from gangline.sandbox.shared.accounts import Traffic

MAX_CONNECTIONS = 256
"""Per sandbox; a harness uses a few. The limit protects the node's file descriptors."""
_HELPER_S = 30.0


async def listening_inside(label: str, proc_fd: int, port: int) -> socket.socket:
    """A socket that listens on this port of 127.0.0.1 in the network of a process; port 0 picks a free one.

    label: its sandbox's. proc_fd: the process's open folder in /proc. Raises: RuntimeFailed.

    The helper that opened it has ended on return, also when the caller was cancelled.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            fork_helper("listener", label, [theirs.fileno(), proc_fd], port)
    except BaseException:
        ours.close()
        raise
    return await to_end(_handed_over(ours), _close)


async def _close(listening: socket.socket) -> None:
    listening.close()


async def _handed_over(ours: socket.socket) -> socket.socket:
    """Receive the listening socket from its helper, and wait for the helper to end. Raises: RuntimeFailed."""
    fds: list[int] = []
    with ours:
        try:
            async with asyncio.timeout(_HELPER_S):
                await readable(ours.fileno())
                message, fds, _flags, _address = socket.recv_fds(ours, 4096, 1)
                if message:
                    await readable(ours.fileno())
        except TimeoutError:
            for fd in fds:
                os.close(fd)
            raise RuntimeFailed("the listener in the sandbox's network did not open in time.") from None
    if not fds:
        complaint = message.decode(errors="replace").removeprefix("lost ") or "its helper was killed"
        raise RuntimeFailed(f"no listener in the sandbox's network: {complaint}")
    listening = socket.socket(fileno=fds[0])
    listening.setblocking(False)
    return listening


class Relay:
    """Serves one listening socket until closed."""

    def __init__(self, proxy_port: int, traffic: Traffic | None = None) -> None:
        """`traffic`: incremented by the relayed bytes."""
        self._proxy_port = proxy_port
        self._traffic = traffic or Traffic()
        self._server: asyncio.Server | None = None
        self._dials: set[asyncio.Task[None]] = set()
        self._near: set[_Side] = set()
        """Connections from the sandbox, including ones whose other side is not connected yet."""
        self._far: set[_Side] = set()

    async def serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Side(self._accepted, self._near.discard, self._sent), sock=listening, start_serving=False
        )  # does not suspend, so that a cancelled caller loses no socket
        await self._server.start_serving()

    def _accepted(self, near: _Side) -> None:
        if len(self._near) >= MAX_CONNECTIONS:
            near.transport.abort()
            return
        self._near.add(near)
        task = asyncio.create_task(self._dial(near))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    def _sent(self, num_bytes: int) -> None:
        self._traffic.sent_bytes += num_bytes

    def _received(self, num_bytes: int) -> None:
        self._traffic.received_bytes += num_bytes

    async def _dial(self, near: _Side) -> None:
        loop = asyncio.get_running_loop()
        far = _Side(None, self._far.discard, self._received)
        try:
            await loop.create_connection(lambda: far, "127.0.0.1", self._proxy_port)
        except OSError:
            near.transport.abort()  # the proxy's port refused, so refuse here too
            return
        self._far.add(far)
        near.join(far)

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in tuple(self._dials):
            task.cancel()
        await asyncio.gather(*self._dials, return_exceptions=True)
        for side in (*self._near, *self._far):
            side.transport.abort()


class _Side(asyncio.Protocol):
    """One end of a relayed connection. Its input goes to its peer; a slow peer slows it down."""

    transport: asyncio.Transport

    def __init__(
        self,
        on_connected: Callable[[_Side], None] | None,
        on_lost: Callable[[_Side], None],
        count: Callable[[int], None],
    ) -> None:
        """`count`: called with the number of bytes passed to the peer."""
        self._count = count
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._peer: _Side | None = None
        self._early: list[bytes] = []
        """Data received before there was a peer."""
        self._lost = False
        self._ended = False

    def join(self, peer: _Side) -> None:
        self._peer, peer._peer = peer, self
        if self._lost:
            peer.transport.abort()
            return
        for data in self._early:
            self.data_received(data)
        self._early.clear()
        if self._ended:
            peer.transport.write_eof()
        self.transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._on_connected is not None:
            self._on_connected(self)

    def data_received(self, data: bytes) -> None:
        if self._peer is None:
            # Not earlier: Python 3.11.2 undoes a pause in `connection_made` right after it.
            self._early.append(data)
            self.transport.pause_reading()
            return
        self._peer.transport.write(data)
        self._count(len(data))

    def eof_received(self) -> bool:
        self._ended = True
        if self._peer is None:
            return True
        if self._peer._ended:
            return False  # closes this side, and with it the peer
        self._peer.transport.write_eof()
        return True  # the other direction continues

    def pause_writing(self) -> None:
        if self._peer is not None and not self._peer.transport.is_closing():
            self._peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._peer is not None and not self._peer.transport.is_closing():
            self._peer.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._on_lost(self)
        peer, self._peer = self._peer, None  # mutual references would be a cycle
        if peer is not None:
            peer.transport.close()
