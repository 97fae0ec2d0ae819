"""Byte streams between a sandbox's daemon and this process, for a command or a socket.

Invariants:
- Neither side sends more than `WINDOW` bytes of a stream before the other has passed them on.
- A command's end is passed on after its output.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from gangline.sandbox.commands.spawner import Spawner
from gangline.sandbox.commands.supervisor import Supervisor
from gangline.sandbox.shared.accounts import Traffic

WINDOW = 1 << 20
_PIECE = 1 << 16
_LOST = b"lost its daemon does not answer\n\nlast\n"
"""The message of a supervisor that cannot run a command."""


class Stream(Protocol):
    """Receives the frames of one number."""

    def hear(self, kind: bytes, payload: bytes) -> None: ...


class Wire(Protocol):
    """The connection to a daemon. Frames of unknown streams are dropped."""

    @property
    def is_alive(self) -> bool: ...

    def new_number(self) -> int:
        """The first of a command's four numbers."""
        ...

    def join(self, number: int, stream: Stream) -> None:
        """Register a stream. It receives a reset if the daemon is lost."""
        ...

    def leave(self, number: int) -> None: ...

    def say(self, number: int, kind: bytes, payload: bytes = b"") -> None: ...


class SocketStream:
    """A local socket whose other end is in the sandbox. It owns the socket."""

    def __init__(
        self, wire: Wire, number: int, opened: Callable[[], Awaitable[socket.socket]], traffic: Traffic | None = None
    ) -> None:
        """opened: returns the socket; data that arrives before that is kept. Raises: OSError."""
        self._wire, self._number, self._opened = wire, number, opened
        self._traffic = traffic or Traffic()
        self._room = WINDOW
        self._has_room = asyncio.Event()
        self._coming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._running = asyncio.create_task(self._run())
        wire.join(number, self)

    @property
    def is_open(self) -> bool:
        return not self._running.done()

    def hear(self, kind: bytes, payload: bytes) -> None:
        if kind == b"D":
            self._coming.put_nowait(payload)
        elif kind == b"E":
            self._coming.put_nowait(None)
        elif kind == b"A":
            self._room += int.from_bytes(payload, "big")
            self._has_room.set()
        elif kind == b"R":
            self._running.cancel()

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])

    async def _run(self) -> None:
        try:
            with await self._opened() as ours:
                ours.setblocking(False)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._inwards(ours))
                    both.create_task(self._outwards(ours))
        except* OSError:
            self._wire.say(self._number, b"R")
        finally:
            self._wire.leave(self._number)

    async def _inwards(self, ours: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(ours, _PIECE):
            self._traffic.received_bytes += len(data)
            self._room -= len(data)
            self._wire.say(self._number, b"D", data)
            while self._room <= 0:
                self._has_room.clear()
                await self._has_room.wait()
        self._wire.say(self._number, b"E")

    async def _outwards(self, ours: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while (data := await self._coming.get()) is not None:
            await loop.sock_sendall(ours, data)
            self._traffic.sent_bytes += len(data)
            self._wire.say(self._number, b"A", len(data).to_bytes(4, "big"))
        with suppress(OSError):
            ours.shutdown(socket.SHUT_WR)


class RemoteSupervisor(Supervisor):
    """Represents the supervisor of one command in the sandbox."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._number = wire.new_number()
        self._outputs: list[int] = []
        self._coming: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        self._carrying: asyncio.Task[None] | None = None
        self._is_closed = False
        self._channel: SocketStream | None = None

    def begin(self, order: bytes, files: Sequence[int], hear: Callable[[bytes], None]) -> None:
        """See `Supervisor.begin`. Raises: OSError."""
        self._outputs = [os.dup(fd) for fd in files[1:3]]
        for fd in self._outputs:
            os.set_blocking(fd, False)
        offset = 0
        while data := os.pread(files[0], _PIECE, offset) if os.path.isfile(f"/proc/self/fd/{files[0]}") else b"":
            self._wire.say(self._number, b"I", data)
            offset += len(data)
        has_channel = len(files) > 3
        if has_channel:
            self._channel = SocketStream(self._wire, self._number + 3, _same(socket.socket(fileno=os.dup(files[3]))))
        for index in range(3):
            self._wire.join(self._number + index, _Part(self, index))
        self._carrying = asyncio.create_task(self._carry(hear))
        self._carrying.add_done_callback(self._let_go)
        # Older Pythons in sandboxes cannot read newer marshal versions.
        packed = marshal.dumps((marshal.dumps(marshal.loads(order), 4), has_channel), 4)
        self._wire.say(self._number, b"X", packed)

    def heard(self, index: int, kind: bytes, payload: bytes) -> None:
        """index: 0 for the supervisor's messages, 1 and 2 for stdout and stderr."""
        if kind == b"D":
            self._coming.put_nowait((index, payload))
        elif index == 0 and kind == b"E":
            self._coming.put_nowait((0, b""))
        elif index == 0 and kind == b"R":
            self._coming.put_nowait((0, _LOST))

    async def _carry(self, hear: Callable[[bytes], None]) -> None:
        """Pass on messages in order until the supervisor has closed its end."""
        while not self._is_closed:
            index, data = await self._coming.get()
            if index == 0:
                hear(data)
                if not data:
                    return
            else:
                await _written(self._outputs[index - 1], data)
                self._wire.say(self._number + index, b"A", len(data).to_bytes(4, "big"))

    def _let_go(self, _task: asyncio.Task[None]) -> None:
        for number in range(self._number, self._number + 3):
            self._wire.say(number, b"R")
            self._wire.leave(number)
        for fd in self._outputs:
            os.close(fd)

    def order_end(self, grace_s: float) -> None:
        self._wire.say(self._number, b"D", b"e" + int(1000 * grace_s).to_bytes(4, "big"))

    def order_kill(self) -> None:
        self._wire.say(self._number, b"E")

    def close(self) -> None:
        """Release it. Idempotent."""
        self._is_closed = True
        if self._carrying is not None and self._carrying is not asyncio.current_task():
            self._carrying.cancel()


def _same(ours: socket.socket) -> Callable[[], Awaitable[socket.socket]]:
    async def opened() -> socket.socket:
        return ours

    return opened


class _Part:
    """One stream of a supervisor."""

    def __init__(self, supervisor: RemoteSupervisor, index: int) -> None:
        self._supervisor, self._index = supervisor, index

    def hear(self, kind: bytes, payload: bytes) -> None:
        self._supervisor.heard(self._index, kind, payload)


async def _written(fd: int, data: bytes) -> None:
    """Write to a local pipe. Data is dropped once the reader is gone."""
    loop, left = asyncio.get_running_loop(), memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BrokenPipeError:
            return
        except BlockingIOError:
            writable = loop.create_future()
            loop.add_writer(fd, lambda writable=writable: writable.done() or writable.set_result(None))
            try:
                await writable
            finally:
                loop.remove_writer(fd)


class RemoteSpawner(Spawner):
    """A spawner at the other end of a wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    @property
    def alive(self) -> bool:
        return self._wire.is_alive

    def supervisor(self, groups: Sequence[str]) -> Supervisor:
        """See `Spawner.supervisor`. groups: unused."""
        return RemoteSupervisor(self._wire)

    def rest(self, supervisor: Supervisor) -> None:
        """Release it: starting another one costs the same."""
        supervisor.close()

    async def end(self) -> None:
        """Does nothing: the spawner runs in the sandbox."""
