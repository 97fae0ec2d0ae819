"""Bring the node's proxy into a network that has only `lo`.

A helper opens a listening socket inside the sandbox's network namespace and hands it over; from then on the node's own
event loop accepts the sandbox's connections and carries the bytes to the proxy's port on the host's loopback. Nothing
runs inside the sandbox, and nothing else can be reached from it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable
from typing import cast

from gangline.domain.errors import RuntimeFailed
from gangline.runtimes.commands.execution import helper_argv
from gangline.runtimes.commands.holder import readable

__all__ = ["ListenerHelper", "Relay"]

MAX_CONNECTIONS = 256
"""Per sandbox; a harness uses a few. More would let it use up the node's file descriptors."""
_HELPER_S = 30.0


class ListenerHelper:
    """The helper, started early so that its start overlaps with the sandbox's."""

    def __init__(self, label: str) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                helper_argv("listener", theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={"GANGLINE_RUNTIME": label},
                cwd="/",
            )

    async def listen(self, proc_fd: int, port: int) -> socket.socket:
        """A socket listening on 127.0.0.1:`port` in the network of that process. Raises: RuntimeFailed."""
        socket.send_fds(self._control, [str(port).encode()], [proc_fd])
        try:
            async with asyncio.timeout(_HELPER_S):
                await readable(self._control.fileno())
        except TimeoutError:
            raise RuntimeFailed("the listener in the sandbox's network did not open in time.") from None
        _message, fds, _flags, _address = socket.recv_fds(self._control, 16, 1)
        if not fds:
            assert self._process.stderr is not None
            complaint = os.read(self._process.stderr.fileno(), 4096).decode(errors="replace").strip()
            raise RuntimeFailed(f"no listener in the sandbox's network: {complaint.rpartition(chr(10))[2]}")
        listening = socket.socket(fileno=fds[0])
        listening.setblocking(False)
        return listening

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()


class Relay:
    """Serves one listening socket until closed."""

    def __init__(self, proxy_port: int) -> None:
        self._proxy_port = proxy_port
        self._server: asyncio.Server | None = None
        self._dials: set[asyncio.Task[None]] = set()
        self._near: set[_Side] = set()
        """Connections that the sandbox dialled, those too whose other side is not there yet."""
        self._far: set[_Side] = set()

    async def serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Side(self._accepted, self._near.discard), sock=listening, start_serving=False
        )  # does not suspend, so that a cancelled caller loses no socket
        await self._server.start_serving()

    def _accepted(self, near: _Side) -> None:
        if len(self._near) >= MAX_CONNECTIONS:
            near.transport.abort()
            return
        self._near.add(near)
        near.transport.pause_reading()
        task = asyncio.create_task(self._dial(near))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dial(self, near: _Side) -> None:
        loop = asyncio.get_running_loop()
        far = _Side(None, self._far.discard)
        try:
            await loop.create_connection(lambda: far, "127.0.0.1", self._proxy_port)
        except OSError:
            near.transport.abort()  # as if the proxy's port refused: it does
            return
        self._far.add(far)
        near.join(far)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self._dials):
            task.cancel()
        await asyncio.gather(*self._dials, return_exceptions=True)
        for side in (*self._near, *self._far):
            side.transport.abort()


class _Side(asyncio.Protocol):
    """One end of a relayed connection: its input goes to its peer; a slow peer slows it down."""

    transport: asyncio.Transport

    def __init__(self, on_connected: Callable[[_Side], None] | None, on_lost: Callable[[_Side], None]) -> None:
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._peer: _Side | None = None
        self._lost = False
        self._ended = False

    def join(self, peer: _Side) -> None:
        self._peer, peer._peer = peer, self
        if self._lost:
            peer.transport.abort()
        else:
            self.transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._on_connected is not None:
            self._on_connected(self)

    def data_received(self, data: bytes) -> None:
        if self._peer is not None:
            self._peer.transport.write(data)

    def eof_received(self) -> bool:
        self._ended = True
        if self._peer is None or self._peer._ended:
            return False  # closes this side, and with it the peer
        self._peer.transport.write_eof()
        return True  # the other direction goes on

    def pause_writing(self) -> None:
        if self._peer is not None and not self._peer.transport.is_closing():
            self._peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._peer is not None and not self._peer.transport.is_closing():
            self._peer.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._on_lost(self)
        if self._peer is not None:
            self._peer.transport.close()
