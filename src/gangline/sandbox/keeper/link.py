"""The connection from a node to its keeper: requests and their answers."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import msgspec

from gangline.domain.errors import RuntimeFailed
from gangline.domain.sandbox import OutputSink
from gangline.sandbox.commands.holder import readable
from gangline.sandbox.keeper import wire

_FIRST_WORD_S = 60.0
"""Seconds until a keeper's first message. It loads its code, or removes the previous node's unfinished work."""
_SOCKET = "socket"
_T = TypeVar("_T")


class Begun(NamedTuple):
    link: Link
    agents: socket.socket
    """The listening socket of the agents' port."""
    hello: wire.Hello


class Link:
    """Sends requests. Belongs to the node's event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, descriptors: socket.socket) -> None:
        self._reader = reader
        self._writer = writer
        self._descriptors = descriptors
        self._taken: dict[str, socket.socket] = {}
        self._num_asked = 0
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._sinks: dict[int, OutputSink] = {}
        self.lost = asyncio.create_task(self._listen())
        """Done when the keeper is gone."""

    @property
    def is_lost(self) -> bool:
        return self.lost.done()

    def send(self, message: wire.FromNode) -> None:
        if not self.is_lost:
            wire.write_message(self._writer, message)

    @overload
    async def ask(self, request: wire.Request, kind: type[_T], sink: OutputSink | None = None) -> _T: ...

    @overload
    async def ask(self, request: wire.Request, kind: None) -> None: ...

    async def ask(self, request: wire.Request, kind: Any, sink: OutputSink | None = None) -> Any:
        """Returns the answer, of type `kind`. A cancelled caller waits until its request is undone or done.

        Raises: RuntimeFailed when the keeper is gone; the runtime's errors.
        """
        if self.is_lost:
            raise _gone()
        self._num_asked += 1
        number = self._num_asked
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        if sink is not None:
            self._sinks[number] = sink
        self.send(wire.Asked(number, request))
        try:
            value = await asyncio.shield(answer)
        except asyncio.CancelledError:
            self.send(wire.Cancel(number))
            await asyncio.wait({answer})
            answer.exception()
            raise
        finally:
            self._sinks.pop(number, None)
            del answer  # its traceback has this frame: a cycle that would keep the caller alive
        return msgspec.msgpack.decode(value, type=kind)

    def take(self, name: str) -> socket.socket | None:
        """The descriptor received under this name before an answer, or None."""
        with suppress(OSError):
            while True:
                message, fds, _flags, _address = socket.recv_fds(self._descriptors, 256, 1)
                if not fds:
                    break
                self._taken[message.decode()] = socket.socket(fileno=fds[0])
        return self._taken.pop(name, None)

    async def _listen(self) -> None:
        try:
            while (message := await wire.read_message(self._reader, wire.TO_NODE)) is not None:
                self._hear(message)
        finally:
            self._writer.close()
            for descriptor in (self._descriptors, *self._taken.values()):
                descriptor.close()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(_gone())
            self._waiting.clear()

    def _hear(self, message: wire.ToNode) -> None:
        if isinstance(message, wire.Output):
            if message.number in self._sinks:
                self._sinks[message.number](message.stream, message.data)
            return
        answer = self._waiting.pop(message.number)
        if isinstance(message, wire.Answered):
            answer.set_result(message.value)
        else:
            answer.set_exception(wire.error_of(message))

    async def close(self) -> None:
        """Disconnect."""
        self.lost.cancel()
        await asyncio.wait({self.lost})
        self._writer.close()  # it may not have started yet
        self._descriptors.close()


def _gone() -> RuntimeFailed:
    return RuntimeFailed("the process that keeps this node's sandboxes is gone, and they with it.")


@contextmanager
def _short(folder: Path) -> Generator[str]:
    """A path of the folder that fits the 108 bytes of a Unix socket's address."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def listen(folder: Path) -> socket.socket:
    """A socket where nodes connect, for this user only. The folder must be private to this user too."""
    (folder / _SOCKET).unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(folder) as short:
            listening.bind(f"{short}/{_SOCKET}")
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def forget(folder: Path) -> None:
    """Remove the socket: later connections fail at once."""
    (folder / _SOCKET).unlink(missing_ok=True)


def peer_uid(connection: socket.socket) -> int:
    """User of the process at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    _pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid


async def connect(folder: Path) -> Begun | None:
    """Connect to the keeper that listens there. Returns None if there is none, or one of another version."""
    connection = _connected(folder)
    if connection is None:
        return None
    try:
        async with asyncio.timeout(_FIRST_WORD_S):
            return await _begin(connection)
    except (OSError, TimeoutError, msgspec.MsgspecError):
        connection.close()
        return None


async def _begin(connection: socket.socket) -> Begun | None:
    await readable(connection.fileno())
    _word, fds, _flags, _address = socket.recv_fds(connection, 1, 2)
    with ExitStack() as on_failure:
        on_failure.callback(connection.close)
        given = [on_failure.enter_context(socket.socket(fileno=fd)) for fd in fds]
        if len(given) != 2:
            return None
        agents, descriptors = given
        descriptors.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection)
        on_failure.callback(writer.close)
        hello = await wire.read_message(reader, wire.HELLO)
        if hello is None or hello.version != wire.VERSION:
            return None
        on_failure.pop_all()
    return Begun(Link(reader, writer, descriptors), agents, hello)


def _connected(folder: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with suppress(OSError), _short(folder) as short:
        connection.connect(f"{short}/{_SOCKET}")
        if peer_uid(connection) == os.geteuid():
            connection.setblocking(False)
            return connection
    connection.close()
    return None
