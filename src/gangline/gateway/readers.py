"""Reads large requests in processes of their own, so that none of them holds up the node's event loop.

Laws
- Each session has one request read at a time, and sessions take turns: one that sends large requests without end waits
  for itself.
- A request that is not read within `max_s` is refused, and the process that read it is killed.
- A process is started when it is first needed, and again after it ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

import msgspec

from gangline.dialects.contract import Dialect, RawRequest
from gangline.domain import errors
from gangline.domain.errors import GanglineError, LimitExceeded, NodeError
from gangline.gateway.call_limits import CallLimits
from gangline.gateway.model_session import ModelSession
from gangline.gateway.reader_child import HEAD, Answer, Question, Refusal
from gangline.gateway.reading import CallRead

__all__ = ["Readers"]

log = logging.getLogger("gangline.proxy")

_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_PIPE_BYTES = 1 << 20


class Readers:
    """Call `close` at the end."""

    def __init__(self, *, num_processes: int = 2, max_s: float = 30.0) -> None:
        self._children = [_Child(max_s) for _ in range(num_processes)]
        self._idle: asyncio.Queue[_Child] = asyncio.Queue()
        for child in self._children:
            self._idle.put_nowait(child)
        self._turns: dict[str, asyncio.Lock] = {}
        self._num_waiting: Counter[str] = Counter()
        self._reading: set[asyncio.Task[Answer]] = set()

    async def read(
        self,
        session: ModelSession,
        dialect: Dialect,
        request: RawRequest,
        kind: Literal["call", "count"],
        path: str,
        limits: CallLimits,
    ) -> CallRead:
        """Raises: LimitExceeded, InvalidRequest, NodeError."""
        question = Question(
            dialect=f"{type(dialect).__module__}:{type(dialect).__qualname__}",
            request=_as_utf8(request),
            kind=kind,
            path=path.encode(errors="replace").decode(),
            limits=limits.model_dump(),
            volatile=session.volatile_rules,
        )
        # A client that leaves must not leave half an answer in the pipe: the task goes on without it.
        task = asyncio.create_task(self._answer(session.session_id, question))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        return _result(await asyncio.shield(task))

    async def _answer(self, session_id: str, question: Question) -> Answer:
        turn = self._turns.setdefault(session_id, asyncio.Lock())
        self._num_waiting[session_id] += 1
        try:
            async with turn:
                child = await self._idle.get()
                try:
                    return await child.ask(question)
                finally:
                    self._idle.put_nowait(child)
        finally:
            self._num_waiting[session_id] -= 1
            if not self._num_waiting[session_id]:
                del self._num_waiting[session_id], self._turns[session_id]

    async def close(self) -> None:
        """Idempotent."""
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        for child in self._children:
            await child.kill()


class _Child:
    """One process, and what was asked of it."""

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, question: Question) -> Answer:
        """Raises: LimitExceeded, NodeError."""
        data = msgspec.msgpack.encode(question)
        try:
            async with asyncio.timeout(self._max_s):
                try:
                    return await self._asked(data)
                except (ConnectionError, asyncio.IncompleteReadError):
                    await self.kill()  # it had ended, or was ended; a new one has the same chance once
                    return await self._asked(data)
        except TimeoutError:
            await self.kill()
            log.warning("reader.killed after_s=%g bytes=%d", self._max_s, len(data))
            raise LimitExceeded(
                f"the request could not be read within {self._max_s:g} s. Send a simpler one."
            ) from None
        except (ConnectionError, asyncio.IncompleteReadError, OSError) as error:
            await self.kill()
            raise NodeError(
                f"the process that reads large requests cannot run: {error}. See the node's log."
            ) from error
        except asyncio.CancelledError:
            await self.kill()
            raise

    async def _asked(self, data: bytes) -> Answer:
        if self._process is None:
            self._process = await self._start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(HEAD.pack(len(data)))
        process.stdin.write(data)
        await process.stdin.drain()
        (length,) = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
        return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=Answer)

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "gangline.gateway.reader_child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_PIPE_BYTES,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
        )

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        await process.communicate()


def _result(answer: Answer) -> CallRead:
    """Raises: GanglineError."""
    if answer.refusal is not None:
        raise _error(answer.refusal)
    if answer.read is None:
        raise NodeError(f"the request could not be read: {answer.crash}")
    return answer.read


def _error(refusal: Refusal) -> GanglineError:
    kind = getattr(errors, refusal.kind, errors.InvalidRequest)
    return kind(refusal.message, **refusal.details)


def _as_utf8(request: RawRequest) -> RawRequest:
    """Bytes of a head that are no UTF-8 came as lone surrogates."""

    def clean(texts: Mapping[str, str]) -> dict[str, str]:
        return {name: value.encode(errors="replace").decode() for name, value in texts.items()}

    params, query, headers = clean(request.params), clean(request.query), clean(request.headers)
    return RawRequest(body=request.body, params=params, query=query, headers=headers)
