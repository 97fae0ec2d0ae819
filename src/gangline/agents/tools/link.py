"""Requests and answers over a channel to an action server. All data from the server is untrusted.

A valid answer is one line of at most 8 MB, for a known request, of the right type, and in time. Anything else ends the
link with `ActionServerFailed`, since later data could not be trusted either.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from gangline.domain.errors import ActionRefused, ActionServerFailed, LimitExceeded, RuntimeFailed
from gangline.domain.sandbox import Channel, ExecResult

_T = TypeVar("_T")

MAX_ANSWER_BYTES = 8 << 20
_MAX_REQUEST_BYTES = 24 << 20
_MAX_ABANDONED = 256
_END_S = 5.0
_MAX_SAID = 2000


class _Refusal(msgspec.Struct):
    reason: str
    message: str


class _Answer(msgspec.Struct):
    id: str
    ok: msgspec.Raw = msgspec.Raw(b"")
    refused: _Refusal | None = None


class Link:
    """The only user of a channel. Call `listen` once, and `close` at the end."""

    def __init__(self, channel: Channel, grace_s: float) -> None:
        """grace_s: seconds by which an answer may exceed its action's own limit."""
        self._channel = channel
        self._grace_s = grace_s
        self._prefix = secrets.token_hex(8)
        self._count = itertools.count()
        self._pending: dict[str, asyncio.Future[_Answer]] = {}
        self._abandoned: dict[str, None] = {}
        """Ids of requests whose callers have gone; their answers may still arrive."""
        self._writing = asyncio.Lock()
        self._failure: str | None = None
        self.reason = ""
        """Why the link ended."""
        self._reader: asyncio.Task[None] | None = None

    async def listen(self, program: bytes, timeout_s: float) -> None:
        """Begin: send the server its program. Raises: ActionServerFailed."""
        self._reader = asyncio.create_task(self._read())
        await self._asked("", program, timeout_s)

    async def ask(self, do: str, order: Mapping[str, Any], kind: type[_T], timeout_s: float) -> _T:
        """Do an action. timeout_s: the action's own limit.

        Raises: ActionRefused if the action could not be run, ActionServerFailed if the server no longer works,
        LimitExceeded if the request is too large.
        """
        id_ = f"{self._prefix}-{next(self._count)}"
        line = json.dumps({"id": id_, "do": do, "with": order}).encode() + b"\n"
        if len(line) > _MAX_REQUEST_BYTES:
            raise LimitExceeded(f"the action has {len(line)} bytes; at most {_MAX_REQUEST_BYTES} are taken")
        answer = await self._asked(id_, line, timeout_s + self._grace_s)
        if answer.refused is not None:
            raise ActionRefused(answer.refused.message[:_MAX_SAID], answer.refused.reason[:100])
        try:
            return msgspec.json.decode(answer.ok, type=kind)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise await self.fail(f"its answer to {do} cannot be read: {error}") from error

    async def _asked(self, id_: str, data: bytes, timeout_s: float) -> _Answer:
        if self._failure is not None:
            raise ActionServerFailed(self._failure)
        future: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._pending[id_] = future
        try:
            async with asyncio.timeout(timeout_s):
                async with self._writing:
                    await self._channel.write(data)
                return await future
        except TimeoutError:
            raise await self.fail(f"it did not answer within {timeout_s:g} s") from None
        except RuntimeFailed:
            raise await self.fail(await self._described_end()) from None
        finally:
            del self._pending[id_]
            if future.done() and not future.cancelled():
                future.exception()  # already raised, or this caller raises its own
            else:
                self._abandoned[id_] = None
                while len(self._abandoned) > _MAX_ABANDONED:
                    del self._abandoned[next(iter(self._abandoned))]
            del future  # its error's traceback refers to this frame

    @property
    def has_ended(self) -> bool:
        """Whether it failed or was closed."""
        return self._failure is not None

    async def fail(self, reason: str) -> ActionServerFailed:
        """End the link and return the error for the caller. The first reason is kept."""
        if self._failure is None:
            self.reason = reason
            self._failure = (
                f"the sandbox's action server is of no use any more: {reason}. It runs as the agent's user, whose"
                " programs can end or disturb it. Start another one; the shell and the variables of this one are lost"
            )
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(ActionServerFailed(self._failure))
            await self._channel.close()
        return ActionServerFailed(self._failure)

    async def close(self) -> None:
        """Kill the server and all processes that it has started. Idempotent."""
        await self.fail("it was closed")
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
            with suppress(asyncio.CancelledError):
                await self._reader

    async def _read(self) -> None:
        kept = bytearray()
        searched = 0
        while piece := await self._channel.read():
            kept += piece
            while (end := kept.find(b"\n", searched)) >= 0:
                line = bytes(kept[:end])
                del kept[: end + 1]
                searched = 0
                if reason := self._take(line):
                    await self.fail(reason)
                    return
            searched = len(kept)
            if searched > MAX_ANSWER_BYTES:
                await self.fail(f"it sent more than {MAX_ANSWER_BYTES} bytes in one answer")
                return
        if self._failure is None:
            await self.fail(await self._described_end())

    def _take(self, line: bytes) -> str | None:
        """Pass an answer to its caller. Returns a complaint if it is invalid."""
        try:
            answer = msgspec.json.decode(line, type=_Answer)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            return f"it sent a line that is not an answer: {error}"
        future = self._pending.get(answer.id)
        if future is not None and not future.done():
            future.set_result(answer)
        elif answer.id in self._abandoned:
            del self._abandoned[answer.id]
        else:
            return "it answered a request that was not asked"
        return None

    async def _described_end(self) -> str:
        try:
            async with asyncio.timeout(_END_S):
                return _described(await self._channel.ended())
        except TimeoutError:
            return "it closed its channel"
        except RuntimeFailed as error:
            return error.message


def _described(end: ExecResult) -> str:
    how = f"it was ended by signal {end.signal}" if end.signal is not None else f"it ended with code {end.exit_code}"
    if end.memory_kill:
        how = f"it was {end.memory_kill} (limits.memory_bytes)"
    errors = end.stderr[-_MAX_SAID:].decode(errors="replace").strip()
    return f"{how} ({errors})" if errors else how
