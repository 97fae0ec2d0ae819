"""The link to a sandbox's daemon, over its environment's `exec` and `upload` alone.

Invariants:
- Received data may be forged, if the agent became root in the sandbox. It is therefore only JSON, or bytes.
- Any failure on the way means that the daemon is lost, and messages in either direction may be lost with it.
- At most one call sends and one receives at a time. The receiving call waits in the sandbox until there is output.
"""

from __future__ import annotations

import asyncio
import base64
import json
import marshal
import struct
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import gangline
from gangline.domain.errors import GanglineError, InvalidRequest, LimitExceeded, NotFound, RuntimeFailed
from gangline.interop.harbor.runtime.streams import Stream, Wire

_FOLDER = "/tmp/.gangline"
_PROGRAM = f"python3 -I -S {_FOLDER}/daemon.zip"
_FRAME = struct.Struct(">IIc")
_LISTEN_S = 20
_ANSWER_S = 120
"""Seconds for one call."""
_BEGIN_S = 60.0
_INLINE_BYTES = 48 << 10
"""A longer message is uploaded as a file: an argument has at most 128 KiB."""
_MAX_FRAME_BYTES = 1 << 27
_SOURCES = Path(gangline.__file__).parent
_SHIPPED = (
    *(f"sandbox/commands/helpers/{name}.py" for name in ("command", "descriptors", "spawner", "namespaces")),
    "sandbox/commands/helpers/supervisor.py",
    "interop/harbor/runtime/in_sandbox/pipes.py",
    "interop/harbor/runtime/in_sandbox/daemon.py",
    "sandbox/shared/files.py",
    "sandbox/shared/removal.py",
)
_MAIN = """
import os, sys
what, argument = sys.argv[1:]
folder = os.path.dirname(os.path.abspath(sys.argv[0]))
if what == "serve":
    from gangline.interop.harbor.runtime.in_sandbox.daemon import serve as done
else:
    from gangline.interop.harbor.runtime.in_sandbox import pipes
    done = getattr(pipes, what)
done(folder, argument)
"""
_ERRORS: Mapping[str, Callable[[str], GanglineError]] = {
    "InvalidRequest": InvalidRequest,
    "LimitExceeded": lambda message: LimitExceeded(message, limit_bytes=0),
    "NotFound": NotFound,
}


class Environment(Protocol):
    """A started Harbor environment."""

    async def exec(self, command: str, timeout_s: int, on_part: Callable[[str], None] | None = None) -> str:
        """Run a command as root and return its output. on_part: called with lines before that, if the class streams
        them.

        Raises: RuntimeFailed, also for a nonzero exit code.
        """
        ...

    async def upload(self, data: bytes, path: str) -> None:
        """Raises: RuntimeFailed."""
        ...


class Link:
    """One run of a daemon. See `streams.Wire`."""

    def __init__(self, environment: Environment, on_connected: Callable[[Wire, int, int], None]) -> None:
        """on_connected: called with this link, the index of a sandbox listener, and the number of a new stream."""
        self._environment = environment
        self._on_connected = on_connected
        self._streams: dict[int, Stream] = {}
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._hello: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._next_number = 4
        self._said = bytearray()
        self._has_said = asyncio.Event()
        self._heard = bytearray()
        self._tasks: list[asyncio.Task[None]] = []
        self._has_lines = False
        self.is_alive = False

    async def begin(self, given: Mapping[str, Any], *, is_first: bool) -> dict[str, Any]:
        """Start the daemon. Returns its greeting. Raises: RuntimeFailed."""
        if is_first:
            await self._environment.exec(f"umask 077 && mkdir {_FOLDER}", _ANSWER_S)
            await self._environment.upload(_program(), f"{_FOLDER}/daemon.zip")
        argument = base64.b64encode(marshal.dumps(dict(given), 4)).decode()
        serve = f"setsid {_PROGRAM} serve {argument} < /dev/null > {_FOLDER}/log 2>&1 &"
        # Remove old pipes first, so that nothing reads from an earlier run's.
        wait = f"for n in $(seq 200); do [ -p {_FOLDER}/out ] && exit 0; sleep 0.05; done; cat {_FOLDER}/log; exit 1"
        await self._environment.exec(f"rm -f {_FOLDER}/in {_FOLDER}/out; {serve}\n{wait}", _ANSWER_S)
        self.is_alive = True
        self._tasks = [asyncio.create_task(work) for work in (self._listen(), self._speak())]
        try:
            async with asyncio.timeout(_BEGIN_S):
                return json.loads(await self._hello)
        except TimeoutError:
            raise RuntimeFailed(f"the daemon of a sandbox was not ready after {_BEGIN_S:.0f} s.") from None

    async def close(self) -> None:
        """Idempotent."""
        self._lose("it was stopped.")
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -- streams: see `Wire` -------------------------------------------------------------------------------------

    def new_number(self) -> int:
        number, self._next_number = self._next_number, self._next_number + 4
        return number

    def join(self, number: int, stream: Stream) -> None:
        self._streams[number] = stream
        if not self.is_alive:
            asyncio.get_running_loop().call_soon(stream.hear, b"R", b"")

    def leave(self, number: int) -> None:
        self._streams.pop(number, None)

    def say(self, number: int, kind: bytes, payload: bytes = b"") -> None:
        if self.is_alive:
            self._said += _FRAME.pack(len(payload), number, kind) + payload
            self._has_said.set()

    # -- questions -----------------------------------------------------------------------------------------------

    async def kill(self) -> None:
        """End all processes of commands. Raises: RuntimeFailed."""
        await self._asked(b"K", b"")

    async def file(self, name: str, *arguments: Any) -> bytes:
        """A method of `SharedFolders`, in the sandbox. Raises: its errors, RuntimeFailed."""
        answer = await self._asked(b"F", marshal.dumps((name, arguments), 4))
        if answer.startswith(b"+"):
            return answer[1:]
        word, _, message = answer[1:].decode(errors="replace").partition(" ")
        raise _ERRORS.get(word, RuntimeFailed)(message)

    async def _asked(self, kind: bytes, payload: bytes) -> bytes:
        if not self.is_alive:
            raise RuntimeFailed("the sandbox is gone.")
        number = self.new_number()
        answered = self._answers[number] = asyncio.get_running_loop().create_future()
        self.say(number, kind, payload)
        try:
            return await answered
        finally:
            self._answers.pop(number, None)
            del answered  # its error's traceback refers to this frame

    # -- the wire ------------------------------------------------------------------------------------------------

    async def _speak(self) -> None:
        try:
            while True:
                await self._has_said.wait()
                await asyncio.sleep(0)  # messages of the same turn are sent together
                message = bytes(self._said)
                self._said.clear()
                self._has_said.clear()
                argument = base64.b64encode(message).decode()
                if len(message) > _INLINE_BYTES:
                    argument = f"@{_FOLDER}/message"
                    await self._environment.upload(message, argument[1:])
                await self._environment.exec(f"{_PROGRAM} send {argument}", _ANSWER_S)
        except GanglineError as error:
            self._lose(error.message)

    async def _listen(self) -> None:
        """If the environment streams lines, one call keeps listening after the first lines."""
        try:
            while True:
                lines = _Lines(self._hear)
                argument = f"+{_LISTEN_S}" if self._has_lines else str(_LISTEN_S)
                output = await self._environment.exec(f"{_PROGRAM} hear {argument}", _LISTEN_S + _ANSWER_S, lines.add)
                self._has_lines = lines.num_heard > 0
                if not self._has_lines:
                    lines.add(output)
                if lines.error is not None or lines.num_heard == 0:
                    raise lines.error or ValueError("the daemon's answer has no marks")
        except (GanglineError, ValueError, LookupError) as error:
            self._lose(str(error))

    def _hear(self, data: bytes) -> None:
        self._heard += data
        self._take()

    def _take(self) -> None:
        while len(self._heard) >= _FRAME.size:
            length, number, kind = _FRAME.unpack_from(self._heard)
            if length > _MAX_FRAME_BYTES:
                raise ValueError("a frame is too long")
            if len(self._heard) < _FRAME.size + length:
                return
            payload = bytes(self._heard[_FRAME.size : _FRAME.size + length])
            del self._heard[: _FRAME.size + length]
            if kind == b"H" and not self._hello.done():
                self._hello.set_result(payload)
            elif kind == b"N":
                self._on_connected(self, payload[0], number)
            elif kind in (b"K", b"F"):
                if (answered := self._answers.get(number)) is not None and not answered.done():
                    answered.set_result(payload)
            elif (stream := self._streams.get(number)) is not None:
                stream.hear(kind, payload)

    def _lose(self, why: str) -> None:
        self.is_alive = False
        for stream in tuple(self._streams.values()):
            stream.hear(b"R", b"")
        for answered in (self._hello, *self._answers.values()):
            if not answered.done():
                answered.set_exception(RuntimeFailed(f"the sandbox is gone: {why}"))
                answered.exception()


class _Lines:
    """Collects the output of `hear`. An environment may print more: only the text between the marks counts."""

    def __init__(self, hear: Callable[[bytes], None]) -> None:
        self.num_heard = 0
        self.error: Exception | None = None
        self._hear = hear
        self._text = ""

    def add(self, text: str) -> None:
        self._text += text
        while ">>>" in self._text and self.error is None:
            line, _, self._text = self._text.partition(">>>")
            try:
                # Strip white space, which environments with a terminal insert.
                self._hear(base64.b64decode("".join(line[line.index("<<<") + 3 :].split())))
                self.num_heard += 1
            except (ValueError, LookupError) as error:
                self.error = error


def _program() -> bytes:
    """The daemon and the modules that it needs, as one zip file that Python can run."""
    files = {name: (_SOURCES / name).read_text() for name in _SHIPPED}
    files["domain/errors.py"] = (_SOURCES / "interop/harbor/runtime/in_sandbox/errors.py").read_text()
    packages = {str(parent) for name in files for parent in Path("gangline", name).parents} - {"."}
    written = BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", _MAIN)
        for package in packages:
            archive.writestr(f"{package}/__init__.py", "")
        for name, text in files.items():
            archive.writestr(f"gangline/{name}", text)
    return written.getvalue()
