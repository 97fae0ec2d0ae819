"""Reads large requests in separate processes, so that they do not delay the node's event loop.

Laws
- Each session has one request read at a time, and sessions take turns: a session that keeps sending large requests
  delays only itself.
- A request that is not read within `max_s` is refused, and the process that read it is killed.
- A process is started when first needed, and again after it ended.
- Each process has a thread that writes to it and reads from it. Its output is decoded one frame at a time, into memory
  that was made resident first, since decoding blocks the event loop too.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Literal

import msgspec

from gangline.domain import errors
from gangline.domain.conversation import Message
from gangline.domain.errors import GanglineError, LimitExceeded, NodeError
from gangline.machine.prefault import make_resident
from gangline.node.calls.reading.body import CallRead
from gangline.node.calls.reading.child import HEAD, Answer, Messages, Question, Refusal
from gangline.node.calls.session import ModelSession
from gangline.settings.node import CallLimits
from gangline.wire.dialects.contract import Dialect, RawRequest

log = logging.getLogger("gangline.proxy")

_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_PIPE_BYTES = 1 << 20


class Readers:
    """Call `close` at the end."""

    def __init__(self, *, num_processes: int = 2, max_s: float = 30.0) -> None:
        self._children = [_Child() for _ in range(num_processes)]
        self._max_s = max_s
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="reader")
        self._idle: asyncio.Queue[_Child] = asyncio.Queue()
        for child in self._children:
            self._idle.put_nowait(child)
        self._turns: dict[str, asyncio.Lock] = {}
        self._num_waiting: Counter[str] = Counter()
        self._reading: set[asyncio.Task[CallRead]] = set()

    async def read(
        self,
        session: ModelSession,
        dialect: Dialect,
        request: RawRequest,
        body: Sequence[bytes | bytearray],
        kind: Literal["call", "count"],
        path: str,
        limits: CallLimits,
    ) -> CallRead:
        """`request`: without its body; `body`: in pieces. Raises: LimitExceeded, InvalidRequest, NodeError."""
        question = Question(
            dialect=f"{type(dialect).__module__}:{type(dialect).__qualname__}",
            request=_as_utf8(request),
            kind=kind,
            path=path.encode(errors="replace").decode(),
            limits=limits.model_dump(),
            volatile=session.volatile_rules,
        )
        # A client that disconnects must not leave half an answer in the pipe, so the task continues without it.
        task = asyncio.create_task(self._read(session.session_id, question, body))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        return await asyncio.shield(task)

    async def _read(self, session_id: str, question: Question, body: Sequence[bytes | bytearray]) -> CallRead:
        turn = self._turns.setdefault(session_id, asyncio.Lock())
        self._num_waiting[session_id] += 1
        try:
            async with turn:
                child = await self._idle.get()
                try:
                    return await self._asked(child, question, body)
                finally:
                    self._idle.put_nowait(child)
        finally:
            self._num_waiting[session_id] -= 1
            if not self._num_waiting[session_id]:
                del self._num_waiting[session_id], self._turns[session_id]

    async def _asked(self, child: _Child, question: Question, body: Sequence[bytes | bytearray]) -> CallRead:
        """Raises: LimitExceeded, InvalidRequest, NodeError."""
        asking = asyncio.get_running_loop().run_in_executor(self._threads, child.ask, question, body)
        try:
            async with asyncio.timeout(self._max_s):
                return await asyncio.shield(asking)
        except TimeoutError:
            log.warning("reader.killed after_s=%g bytes=%d", self._max_s, sum(map(len, body)))
            raise LimitExceeded(
                f"the request could not be read within {self._max_s:g} s. Send a simpler one."
            ) from None
        finally:
            if not asking.done():
                child.kill()  # its thread then gets an error
                await asyncio.gather(asking, return_exceptions=True)

    async def close(self) -> None:
        """Stop all reads and processes. Idempotent."""
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        for child in self._children:
            child.end()
        self._threads.shutdown()


class _Child:
    """One process. All methods block and run on a reader thread, except `kill`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False

    def ask(self, question: Question, body: Sequence[bytes | bytearray]) -> CallRead:
        """Raises: GanglineError of the request; NodeError when the process cannot run or was killed."""
        head = msgspec.msgpack.encode(question)
        self._is_killed = False
        try:
            try:
                return self._asked(head, body)
            except (ConnectionError, EOFError):
                self.end()  # the old process had ended: try once with a new one
                if self._is_killed:
                    raise
                return self._asked(head, body)
        except (ConnectionError, EOFError, OSError) as error:
            self.end()
            raise NodeError(
                f"the process that reads large requests cannot run: {error}. See the node's log."
            ) from error

    def _asked(self, head: bytes, body: Sequence[bytes | bytearray]) -> CallRead:
        if self._process is None:
            self._process = _started()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        for frame in ([head], body):
            _write(process.stdin.fileno(), HEAD.pack(sum(map(len, frame))))
            for piece in frame:
                _write(process.stdin.fileno(), piece)
        answer = msgspec.msgpack.decode(_frame(pipe), type=Answer)
        read = _result(answer)
        messages, digests = list[Message](), list[bytes]()
        for _ in range(answer.num_frames):
            frame = _frame(pipe)
            make_resident(len(frame))
            piece = msgspec.msgpack.decode(frame, type=Messages)
            messages += piece.messages
            digests += piece.digests
        call = msgspec.structs.replace(read.call, messages=tuple(messages))
        return msgspec.structs.replace(read, call=call, digests=tuple(digests))

    def kill(self) -> None:
        """Kill the process, from any thread. A blocked `ask` then fails."""
        self._is_killed = True
        if (process := self._process) is not None:
            process.kill()

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _started() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "gangline.node.calls.reading.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
    )
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError, AttributeError):  # fewer context switches, where the system allows it
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return process


def _write(pipe: int, data: bytes | bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(pipe, left) :]


def _frame(pipe: int) -> bytearray:
    """Raises: EOFError."""
    return _read(pipe, *HEAD.unpack(_read(pipe, HEAD.size)))


def _read(pipe: int, length: int) -> bytearray:
    """Raises: EOFError."""
    make_resident(length)
    data = bytearray(length)
    left = memoryview(data)
    while left:
        num_bytes = os.readv(pipe, [left])
        if num_bytes == 0:
            raise EOFError("it ended")
        left = left[num_bytes:]
    return data


def _result(answer: Answer) -> CallRead:
    """Returns the call without its messages. Raises: GanglineError."""
    if answer.refusal is not None:
        raise _error(answer.refusal)
    if answer.read is None:
        raise NodeError(f"the request could not be read: {answer.crash}")
    return answer.read


def _error(refusal: Refusal) -> GanglineError:
    kind = getattr(errors, refusal.kind, errors.InvalidRequest)
    return kind(refusal.message, **refusal.details)


def _as_utf8(request: RawRequest) -> RawRequest:
    """Replace lone surrogates: they stand for header bytes that are not UTF-8."""

    def clean(texts: Mapping[str, str]) -> dict[str, str]:
        return {name: value.encode(errors="replace").decode() for name, value in texts.items()}

    params, query, headers = clean(request.params), clean(request.query), clean(request.headers)
    return RawRequest(params=params, query=query, headers=headers)
