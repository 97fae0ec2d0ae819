"""The life of one model call: it runs, is listened to, is aborted, ends.

Laws
- A call ends complete, as an aborted record, or, when the engine failed it, without a record. Never half.
- The call runs in its own task: a slow or vanished client holds up neither the engine nor the session's end.
- A call that has ended holds its reply and what a replay of it shows, and nothing else.
"""

from __future__ import annotations

import asyncio
import secrets
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from copy import copy
from typing import Any, Generic, Protocol, TypeVar

from gangline.domain.errors import SessionOver
from gangline.node.capture.parts import CallParts

NewsT = TypeVar("NewsT")
ReplyT = TypeVar("ReplyT")
_SampledT = TypeVar("_SampledT", covariant=True)


class Progress(Generic[NewsT]):
    """The visible part of one call: written by its sampler, read by whoever listens."""

    def __init__(self, created_at: float) -> None:
        self.record_key = secrets.token_hex(8)
        self.created_at = created_at
        """Unix time, UTC, seconds."""
        self.num_prompt_tokens: int | None = None
        """As the engine reported it; None until it did."""
        self.num_replays = 0
        """Retries that were given this call's answer."""
        self.shown: list[NewsT] = []
        """All news of the call so far."""
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
        """Whether all is sampled: from then on the call is not aborted any more."""
        ...

    async def answer(self) -> _SampledT:
        """Sample and record. Raises: EngineError, StoreError."""
        ...

    async def record_aborted(self, message: str) -> None:
        """Record what was sampled until now. Raises nothing: its loss must not hide why the call ended."""
        ...


class Flight(Generic[ReplyT, NewsT]):
    """One admitted call. `start` it; then read `news()`, wait for `reply()`, or `abort` it. Any number may listen."""

    def __init__(
        self,
        sampler: Sampler[ReplyT],
        progress: Progress[NewsT],
        parts: CallParts,
        replay: Callable[[ReplyT], list[NewsT]],
    ) -> None:
        """`replay`: the news of a reply that is given again."""
        self.progress = progress
        self._sampler: Sampler[ReplyT] | None = sampler
        """None once the call has ended."""
        self._parts = parts
        self._replay = replay
        self._waiting: list[asyncio.Future[None]] = []
        """Futures of callers that await the end."""
        self._task: asyncio.Task[ReplyT] | None = None

    def start(self, on_end: Callable[[Flight[ReplyT, NewsT]], None]) -> None:
        """`on_end` is called once, when the call has ended in any way."""
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
        """Count a retry that is given this call's answer."""
        self.progress.num_replays += 1

    @property
    def error(self) -> BaseException | None:
        """The error that ended the call early; None while it runs, when it was answered and when it was aborted."""
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
        """Ended without an answer."""
        task = self._task
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)

    def compact(self) -> None:
        """Keep of an answered stream what a replay needs, not one piece of news for each token."""
        progress = self.progress
        if self._task is not None and progress.shown and not progress.listeners and self.answered:
            progress.shown = self._replay(self._task.result())

    def abort(self, message: str) -> None:
        """End the call: cancelled in the engine, kept as an aborted record. One that is wholly sampled is committed."""
        if self._sampler is None or self._task is None:
            return
        if self.progress.abort_message is None and not self._sampler.is_committing:
            self.progress.abort_message = message
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until the call has ended in any way. Raises nothing of the call's."""
        assert self._task is not None
        if not self._task.done():
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]

    async def reply(self) -> ReplyT:
        """The whole reply, recorded. Raises: EngineError, StoreError; SessionOver when the call was aborted."""
        assert self._task is not None
        await self.ended()
        if self._task.cancelled():
            raise SessionOver(self.progress.abort_message or "the node is stopping")
        if (error := self.error) is not None:
            raise copy(error) from error  # a copy, for it collects the frames that it passes, and they hold this call
        return self._task.result()

    async def news(self, idle_s: float) -> AsyncGenerator[Sequence[NewsT], None]:
        """All news from the beginning, as it comes: each time all that is new; ends with the call, however that ends.
        Empty: nothing came for `idle_s` seconds."""
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
    """The call's work. Its error's traceback holds what is here: so not the flight, which holds the error."""
    try:
        async with parts.gate.pass_through(parts.meter):
            return await sampler.answer()
    except asyncio.CancelledError:
        if progress.abort_message is None:
            raise
        await sampler.record_aborted(progress.abort_message)
        raise SessionOver(progress.abort_message) from None


def _clear_frames(error: BaseException | None) -> None:
    """Let go of what the functions held that an error came from: its task among it, which holds the error."""
    seen: set[int] = set()
    errors = [error]
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            errors += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


class _Listener:
    """Waits for something new, or for `idle_s` seconds without. One timer for all waits: a stream has hundreds."""

    def __init__(self, idle_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_s = idle_s
        self._waiting: asyncio.Future[bool] | None = None
        self._waiting_since = self._loop.time()
        self._timer = self._loop.call_later(idle_s, self._check)

    def notify(self) -> None:
        self._tell(has_news=True)

    async def heard(self) -> bool:
        """True: there is something new. False: nothing came for `idle_s` seconds."""
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
