"""Runs a sandbox's commands for a node that can only reach it by `exec`. Standard library, Python 3.8 or newer.

Invariants:
- Node and daemon exchange frames (`_FRAME`, then the payload) over two pipes in a folder owned by root: see `pipes`.
- Commands run as in other runtimes: under the same spawner and supervisors, which never run as the agent's user.
- This process is a subreaper, so processes that a command leaves behind are its descendants, and end with `kill`.
- A side sends at most `WINDOW` bytes of a stream before the other has passed them on.

A stream is a command's control socket, its stdout, stderr or channel, or a connection made to a listener.
"""

from __future__ import annotations

import base64
import fcntl
import json
import marshal
import os
import select
import signal
import socket
import struct
import sys
import termios
from contextlib import suppress
from pathlib import Path

from gangline.sandbox.commands.helpers import spawner
from gangline.sandbox.commands.helpers.namespaces import become_subreaper
from gangline.sandbox.commands.helpers.supervisor import kill_tree
from gangline.sandbox.shared.files import SharedFolders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_FRAME = struct.Struct(">IIc")
"""Length of the payload, stream, kind."""
_DATA, _TAKEN, _END, _RESET = b"D", b"A", b"E", b"R"
_HELLO, _COMMAND, _INPUT, _CONNECTED, _KILL, _FILE = b"H", b"X", b"I", b"N", b"K", b"F"
_WINDOW = 1 << 20
_PIECE = 1 << 16
_SET_PIPE_SIZE = 1031
_FIRST_CONNECTION = 1 << 31
_CLOSED = ("/proc", "/sys", "/dev")


def serve(folder: str, argument: str) -> None:
    """folder: the daemon's. argument: the arguments of `_Daemon`, marshalled and base64-encoded."""
    _Daemon(folder, marshal.loads(base64.b64decode(argument))).serve()


class _Stream:
    """A descriptor in the sandbox, connected to the node."""

    def __init__(self, fd: int, *, is_pipe: bool = False, before: tuple[int, ...] = ()) -> None:
        """is_pipe: it is only read. before: streams whose data must be sent first."""
        self.fd = fd
        self.reads = True
        self.is_pipe = is_pipe
        self.before = before
        self.room = _WINDOW
        self.waiting = bytearray()
        self.is_ending = self.is_drained = False
        """Whether no more data will be queued; whether data that is read is discarded."""
        os.set_blocking(fd, False)

    @property
    def events(self) -> int:
        hears = self.reads and (self.room > 0 or self.is_drained)
        return (select.POLLIN if hears else 0) | (select.POLLOUT if self.waiting else 0)


class _Streams:
    """The open streams, by number. A command has consecutive numbers: control, stdout, stderr, channel."""

    def __init__(self, say: Callable[..., None]) -> None:
        """say: called with number, kind, payload."""
        self._say = say
        self._open: dict[int, _Stream] = {}

    def add(self, number: int, stream: _Stream) -> None:
        self._open[number] = stream

    def register(self, poll: select.poll) -> dict[int, int]:
        """Register the streams that wait for something. Returns descriptor -> number."""
        waiting = {stream.fd: number for number, stream in self._open.items() if stream.events}
        for fd, number in waiting.items():
            poll.register(fd, self._open[number].events)
        return waiting

    def obey(self, number: int, kind: bytes, payload: bytes) -> None:
        stream = self._open.get(number)
        if stream is None:
            return
        if kind == _DATA:
            stream.waiting += payload
            self._write(number, stream)
        elif kind == _TAKEN:
            stream.room += int.from_bytes(payload, "big")
        elif kind == _END:
            stream.is_ending = True
            self._write(number, stream)
        elif kind == _RESET:
            self._drop(number, stream)

    def move(self, number: int, events: int) -> None:
        stream = self._open.get(number)
        if stream is None:
            return
        if stream.waiting:
            self._write(number, stream)
        if events & ~select.POLLOUT and stream.reads and number in self._open:
            for other in stream.before:
                self._flush(other)
            self._read(number, stream, _PIECE)

    def _flush(self, number: int) -> None:
        """Read the data now in a pipe, ignoring the window."""
        stream = self._open.get(number)
        if stream is not None:
            size = int.from_bytes(fcntl.ioctl(stream.fd, termios.FIONREAD, bytes(4)), sys.byteorder)
            while size > 0 and number in self._open:
                size -= self._read(number, stream, size) or size

    def _read(self, number: int, stream: _Stream, size: int) -> int:
        try:
            piece = os.read(stream.fd, size)
        except BlockingIOError:
            return 0
        except OSError:  # the other end was closed with unread data of ours
            piece = b""
        if not piece:
            stream.reads = False
            self._say(number, _END)
            if stream.is_ending or stream.is_pipe:
                self._forget(number)
        elif not stream.is_drained:
            stream.room -= len(piece)
            self._say(number, _DATA, piece)
        return len(piece)

    def _write(self, number: int, stream: _Stream) -> None:
        try:
            num_written = os.write(stream.fd, stream.waiting) if stream.waiting else 0
        except BlockingIOError:
            return
        except OSError:  # it has no reader any more
            self._say(number, _RESET)
            self._forget(number)
            return
        del stream.waiting[:num_written]
        if num_written:
            self._say(number, _TAKEN, num_written.to_bytes(4, "big"))
        if stream.is_ending and not stream.waiting:
            with socket.socket(fileno=os.dup(stream.fd)) as end, suppress(OSError):
                end.shutdown(socket.SHUT_WR)
            if not stream.reads:
                self._forget(number)

    def _drop(self, number: int, stream: _Stream) -> None:
        """The node wants no more data. A pipe is still read, since closing it would kill its writer."""
        if stream.is_pipe:
            stream.is_drained = True
        else:
            self._forget(number)

    def _forget(self, number: int) -> None:
        os.close(self._open.pop(number).fd)


class _Daemon:
    def __init__(self, folder: str, given: dict[str, Any]) -> None:
        self._folder = folder
        self._uid: int = given["uid"]
        self._home: str = given["home"]
        self._own: list[str] = given["own"]
        self._ports: list[int] = given["ports"]
        self._streams = _Streams(self._say)
        self._inputs: dict[int, int] = {}
        """Standard input received so far, by the number of its command's control stream."""
        self._next_connection = _FIRST_CONNECTION
        self._heard = bytearray()
        self._said = bytearray()
        self._files = SharedFolders(
            {"/": Path("/")}, given["workdir"], uid=self._uid, closed=(*_CLOSED, folder), lasting=self._own
        )

    # -- begin ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        os.chdir("/")
        os.chmod(self._folder, 0o700)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # so ended children need no reaping
        become_subreaper()
        self._make_agent()
        self._orders = self._spawner()
        self._listeners = [_listener(port) for port in self._ports]
        self._in, self._out = (self._pipe(name) for name in ("in", "out"))
        self._say(0, _HELLO, json.dumps(self._hello()).encode())
        while True:
            self._turn()

    def _make_agent(self) -> None:
        """Create the agent's user and folders."""
        for path, line in (
            ("/etc/passwd", f"agent:x:{self._uid}:{self._uid}:agent:{self._home}:/bin/sh\n"),
            ("/etc/group", f"agent:x:{self._uid}:\n"),
        ):
            if os.path.isfile(path):
                with open(path, "r+") as file:
                    rest = file.read()
                    if line not in rest:
                        file.seek(0)
                        file.write(line + rest)
        os.makedirs("/tmp", exist_ok=True)
        os.chmod("/tmp", 0o1777)
        if os.path.exists(f"{self._folder}/made"):
            return
        for own in self._own:
            os.makedirs(own, exist_ok=True)
            os.chown(own, self._uid, self._uid)
            for parent, folders, files in os.walk(own):
                for name in (*folders, *files):
                    os.chown(f"{parent}/{name}", self._uid, self._uid, follow_symlinks=False)
            above = os.path.dirname(own)
            while above != "/":
                os.chmod(above, os.stat(above).st_mode | 0o001)
                above = os.path.dirname(above)
        os.close(os.open(f"{self._folder}/made", os.O_CREAT, 0o600))

    def _hello(self) -> dict[str, Any]:
        has_filters = os.path.exists("/proc/sys/kernel/seccomp/actions_avail")
        return {
            "env": dict(os.environ),
            "machine": os.uname().machine if has_filters else "",
            "ports": [listener.getsockname()[1] for listener in self._listeners],
        }

    def _spawner(self) -> socket.socket:
        """Start a process that forks supervisors. It gets none of our descriptors, since an inherited copy would keep
        them open.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            os.dup2(theirs.fileno(), 3)
            os.closerange(4, 1 << 16)
            spawner.main([3], None)
        theirs.close()
        ours.recv(16)  # it is ready
        return ours

    def _pipe(self, name: str) -> int:
        path = f"{self._folder}/{name}"
        if os.path.lexists(path):
            os.unlink(path)
        os.mkfifo(path, 0o600)
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        with suppress(OSError):
            fcntl.fcntl(fd, _SET_PIPE_SIZE, _WINDOW)
        return fd

    # -- turns ---------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        if self._said:
            poll.register(self._out, select.POLLOUT)
        for listener in self._listeners:
            poll.register(listener, select.POLLIN)
        by_fd = self._streams.register(poll)
        for fd, events in poll.poll():
            if fd == self._in:
                self._hear()
            elif fd == self._out:
                self._speak()
            elif fd in by_fd:
                self._streams.move(by_fd[fd], events)
            else:
                self._accept(fd)

    def _say(self, number: int, kind: bytes, payload: bytes = b"") -> None:
        self._said += _FRAME.pack(len(payload), number, kind) + payload

    def _speak(self) -> None:
        with suppress(BlockingIOError):
            del self._said[: os.write(self._out, self._said[:_WINDOW])]

    def _hear(self) -> None:
        try:
            self._heard += os.read(self._in, _WINDOW)
        except BlockingIOError:
            return
        while len(self._heard) >= _FRAME.size:
            length, number, kind = _FRAME.unpack_from(self._heard)
            if len(self._heard) < _FRAME.size + length:
                return
            payload = bytes(self._heard[_FRAME.size : _FRAME.size + length])
            del self._heard[: _FRAME.size + length]
            self._obey(number, kind, payload)

    def _obey(self, number: int, kind: bytes, payload: bytes) -> None:
        if kind == _COMMAND:
            self._begin(number, payload)
        elif kind == _INPUT:
            fd = self._inputs.get(number)
            if fd is None:
                fd = self._inputs[number] = os.memfd_create("stdin")
            os.write(fd, payload)
        elif kind == _FILE:
            self._say(number, _FILE, self._file(*marshal.loads(payload)))
        elif kind == _KILL:
            self._orders.close()
            kill_tree()
            self._orders = self._spawner()
            self._say(number, _KILL)
        else:
            self._streams.obey(number, kind, payload)

    def _begin(self, number: int, payload: bytes) -> None:
        order, has_channel = marshal.loads(payload)
        fds = [self._inputs.pop(number, -1)]
        if fds[0] < 0:
            fds[0] = os.open(os.devnull, os.O_RDONLY)
        os.lseek(fds[0], 0, os.SEEK_SET)
        for output in (number + 1, number + 2):
            ours, theirs = os.pipe()
            self._streams.add(output, _Stream(ours, is_pipe=True))
            fds.append(theirs)
        if has_channel:
            near, far = socket.socketpair()
            self._streams.add(number + 3, _Stream(near.detach()))
            fds.append(far.detach())
        control, theirs = socket.socketpair()
        _send_fds(self._orders, b"s", [theirs.fileno()])
        theirs.close()
        message = len(order).to_bytes(4, "big") + order
        num_sent = _send_fds(control, message[:_PIECE], fds)
        for fd in fds:
            os.close(fd)
        talk = _Stream(control.detach(), before=(number + 1, number + 2))
        talk.waiting += message[num_sent:]
        self._streams.add(number, talk)

    def _accept(self, fd: int) -> None:
        index = next(index for index, listener in enumerate(self._listeners) if listener.fileno() == fd)
        connection, _ = self._listeners[index].accept()
        number, self._next_connection = self._next_connection, self._next_connection + 1
        self._streams.add(number, _Stream(connection.detach()))
        self._say(number, _CONNECTED, bytes([index]))

    # -- files ---------------------------------------------------------------------------------------------------

    def _file(self, name: str, arguments: tuple[Any, ...]) -> bytes:
        """`+` and the result, or `-`, the name of an error, and its message."""
        try:
            return b"+" + (getattr(self._files, name)(*arguments) or b"")
        except Exception as error:
            return f"-{type(error).__name__} {error}".encode(errors="replace")


def _listener(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(128)
    listening.setblocking(False)
    return listening


def _send_fds(to: socket.socket, message: bytes, fds: list[int]) -> int:
    packed = struct.pack(f"{len(fds)}i", *fds)
    return to.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])
