"""The lifecycle of one model call: it starts, has listeners, may be aborted, and ends.

Laws
- A call ends complete, as an aborted record, or, when the engine failed, without a record. Never half.
- The call runs in its own task: a slow or disconnected client delays neither the engine nor the session's end.
- A call that has ended keeps only its reply and the deltas of a replay.
"""

from __future__ import annotations

import asyncio
import secrets
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, Generic, Protocol, TypeVar

from gangline.domain.errors import SessionOver
from gangline.node.backends.engine import PooledEngine
from gangline.node.capture.parts import CallParts

NewsT = TypeVar("NewsT")
ReplyT = TypeVar("ReplyT")
_SampledT = TypeVar("_SampledT", covariant=True)


class Progress(Generic[NewsT]):
    """The visible part of one call: written by its sampler, read by its listeners."""

    def __init__(self, created_at: float) -> None:
        self.record_key = secrets.token_hex(8)
        self.created_at = created_at
        """Unix time, UTC, seconds."""
        self.num_prompt_tokens: int | None = None
        """As the engine reported it; None until then."""
        self.num_replays = 0
        """Number of retries that were answered with this call's answer."""
        self.shown: list[NewsT] = []
        """All deltas of the call so far."""
        self.listeners: set[_Listener] = set()
        self.abort_message: str | None = None
        """Why the call is being aborted; None: it is not."""

    def show(self, news: NewsT) -> None:
        self.shown.append(news)
        self.wake()

    def wake(self) -> None:
        for listener in self.listeners:
            listener.notify()


class Sampler(Protocol[_SampledT]):
    """The work of one call."""

    @property
    def is_committing(self) -> bool:
        """Whether sampling is done: from then on the call can no longer be aborted."""
        ...

    async def answer(self) -> _SampledT:
        """Sample and record. Raises: EngineError, StoreError."""
        ...

    async def record_aborted(self, message: str) -> None:
        """Record the tokens sampled so far. Raises nothing: a failure here must not hide why the call ended."""
        ...


class Flight(Generic[ReplyT, NewsT]):
    """One admitted call. `start` it, then read `news()`, await `reply()`, or `abort` it. Any number of listeners."""

    def __init__(
        self,
        sampler: Sampler[ReplyT],
        progress: Progress[NewsT],
        parts: CallParts,
        replay: Callable[[ReplyT], list[NewsT]],
    ) -> None:
        """`replay`: returns the deltas of a reply that is delivered again."""
        self.progress = progress
        self._sampler: Sampler[ReplyT] | None = sampler
        """None once the call has ended."""
        self._parts = parts
        self._replay = replay
        self._waiting: list[asyncio.Future[None]] = []
        """Futures of callers that await the end."""
        self._task: asyncio.Task[ReplyT] | None = None

    def start(self, on_end: Callable[[Flight[ReplyT, NewsT]], None]) -> None:
        """`on_end` is called once when the call has ended for any reason."""
        assert self._sampler is not None
        self._task = asyncio.create_task(_run(self._sampler, self.progress, self._parts))
        self._task.add_done_callback(lambda _: self._end(on_end))

    def _end(self, on_end: Callable[[Flight[ReplyT, NewsT]], None]) -> None:
        try:
            on_end(self)
            self._sampler = None
            _clear_frames(self.error)
            self.compact()
            self.progress.wake()
        finally:
            for waiting in self._waiting:
                if not waiting.done():
                    waiting.set_result(None)

    @property
    def record_key(self) -> str:
        return self.progress.record_key

    @property
    def created_at(self) -> float:
        return self.progress.created_at

    @property
    def num_prompt_tokens(self) -> int | None:
        return self.progress.num_prompt_tokens

    @property
    def num_replays(self) -> int:
        return self.progress.num_replays

    def replayed(self) -> None:
        """Count a retry that is answered with this call's answer."""
        self.progress.num_replays += 1

    @property
    def error(self) -> BaseException | None:
        """The error that ended the call early; None while it runs, and when it was answered or aborted."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()

    @property
    def answered(self) -> bool:
        task = self._task
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    @property
    def ended_already(self) -> bool:
        return self._task is not None and self._task.done()

    @property
    def failed(self) -> bool:
        """Whether it ended without an answer."""
        task = self._task
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)

    def compact(self) -> None:
        """Replace an answered stream's deltas, one per token, by the few that a replay needs."""
        progress = self.progress
        if self._task is not None and progress.shown and not progress.listeners and self.answered:
            progress.shown = self._replay(self._task.result())

    def abort(self, message: str) -> None:
        """Cancel the call in the engine and keep an aborted record. A call that is fully sampled is committed
        instead."""
        if self._sampler is None or self._task is None:
            return
        if self.progress.abort_message is None and not self._sampler.is_committing:
            self.progress.abort_message = message
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until the call has ended for any reason. Raises none of its errors."""
        assert self._task is not None
        if not self._task.done():
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]

    async def reply(self) -> ReplyT:
        """Returns the whole reply once it is recorded. Raises: EngineError, StoreError; SessionOver when the call was
        aborted."""
        assert self._task is not None
        await self.ended()
        if self._task.cancelled():
            raise SessionOver(self.progress.abort_message or "the node is stopping")
        if (error := self.error) is not None:
            raise copy(error) from error  # a copy: it collects frames that hold this call
        return self._task.result()

    async def news(self, idle_s: float) -> AsyncGenerator[Sequence[NewsT], None]:
        """Yields batches of new deltas from the start until the call ends for any reason. An empty batch means that
        nothing came for `idle_s` seconds."""
        assert self._task is not None
        progress = self.progress
        num_read, listener = 0, _Listener(idle_s)
        progress.listeners.add(listener)
        try:
            while True:
                if num_read < len(progress.shown):
                    new = progress.shown[num_read:]
                    num_read = len(progress.shown)
                    yield new
                elif self._task.done():
                    return
                elif not await listener.heard():
                    yield ()
        finally:
            progress.listeners.discard(listener)
            listener.close()


async def _run(sampler: Sampler[ReplyT], progress: Progress[Any], parts: CallParts) -> ReplyT:
    """Do the call's work. Takes no flight: the error's traceback holds this frame, and the flight holds the error."""
    try:
        engine = parts.engine
        is_recorded = sampler.is_committing
        turn = engine.turn(parts.meter) if isinstance(engine, PooledEngine) and not is_recorded else nullcontext()
        async with turn, parts.gate.pass_through(parts.meter):
            return await sampler.answer()
    except asyncio.CancelledError:
        if progress.abort_message is None:
            raise
        await sampler.record_aborted(progress.abort_message)
        raise SessionOver(progress.abort_message) from None


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames of an error's traceback: they hold the task, which holds the error."""
    seen: set[int] = set()
    errors = [error]
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            errors += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


class _Listener:
    """Waits for something new, at most `idle_s` seconds. Uses one timer for all waits, since a stream has hundreds."""

    def __init__(self, idle_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_s = idle_s
        self._waiting: asyncio.Future[bool] | None = None
        self._waiting_since = self._loop.time()
        self._timer = self._loop.call_later(idle_s, self._check)

    def notify(self) -> None:
        self._tell(has_news=True)

    async def heard(self) -> bool:
        """Returns True when something new came, False when nothing came for `idle_s` seconds."""
        self._waiting_since = self._loop.time()
        self._waiting = self._loop.create_future()
        return await self._waiting

    def _tell(self, *, has_news: bool) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(has_news)

    def _check(self) -> None:
        left_s = self._waiting_since + self._idle_s - self._loop.time()
        if left_s <= 0:
            self._tell(has_news=False)
            left_s = self._idle_s
        self._timer = self._loop.call_later(left_s, self._check)

    def close(self) -> None:
        self._timer.cancel()
