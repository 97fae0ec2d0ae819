"""The embedded engine as a `Sampler`: one decode thread, and its communication with asyncio.

Only the thread accesses the batch. The event loop sends it commands, which run between two steps, and receives tokens,
with one wake-up of the loop per step. Closing an iterator, cancelled or not, sends the command that removes its
sequence from the batch.
"""

from __future__ import annotations

import asyncio
import os
import queue
import random
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from gangline.domain.errors import ContextOverflow, EngineUnavailable, GanglineError, InvalidRequest
from gangline.models.engine_server.sampler import PauseMode, SampledToken, SampleRequest
from gangline.models.language.contract import ChatTokenizer
from gangline.serving.embedded.batch import Batch, Sequence
from gangline.serving.embedded.model import LanguageModel

ResultT = TypeVar("ResultT")
# Items of a reader's queue: a token, None for the end of an aborted sequence, or an error.
_Item = SampledToken | GanglineError | None


class EmbeddedSampler:
    """Samples from a model on this machine. Start it once; `close` ends the thread.

    An iterator of `sample` that ends without a finish reason was aborted. `threads` defaults to all cores but one: the
    threads of a step wait for each other, so one that shares its core with an agent delays all of them.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: ChatTokenizer,
        *,
        model_name: str,
        max_batch: int = 32,
        max_context: int | None = None,
        seed: int | None = None,
        threads: int | None = None,
        returns_masks: bool = False,
    ) -> None:
        self.model_name = model_name
        self.returns_masks = returns_masks
        self.tokenizer: ChatTokenizer = tokenizer
        self.weight_version = 0
        self._batch = Batch(model, max_batch=max_batch, context_length=max_context)
        self.context_length = self._batch.context_length
        self.num_ids = model.vocab_size
        self._seeds = random.Random(seed)
        self._num_threads = threads or max(1, (os.cpu_count() or 1) - 1)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._readers: dict[Sequence, _Reader] = {}
        self._drained: list[Future[None]] = []
        self._closed = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gangline-decode", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Sequences in the running batch."""
        return self._batch.num_running

    async def sample(self, request: SampleRequest) -> AsyncGenerator[SampledToken, None]:
        """Yield sampled tokens; see `Sampler.sample`.

        Raises:
            ContextOverflow: the prompt leaves no room for a token. A longer reply ends with `length`.
            InvalidRequest: an empty prompt, or ids that the model does not have.
            EngineUnavailable: the engine was closed, or the model failed.
        """
        if self._closed:
            raise EngineUnavailable("the embedded engine is closed")
        self._check(request)
        reader = _Reader(asyncio.get_running_loop())
        seed = self._seeds.getrandbits(64) if request.seed is None else request.seed
        self._send(partial(self._add, request, seed, reader))
        try:
            while (item := await reader.items.get()) is not None:
                if isinstance(item, GanglineError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._send(partial(self._remove, reader))

    async def score(self, ids: list[int]) -> list[float]:
        """See `Scorer.score`. Sampling waits meanwhile. Raises: as `sample`."""
        self._check(SampleRequest(prompt_ids=ids, max_tokens=1))
        return await self._call(partial(self._batch.score, np.array(ids, np.int64)))

    async def pause(self, mode: PauseMode) -> None:
        """See `Sampler.pause`. Returns once no more tokens are sampled."""
        await self._call(partial(self._pause, mode))
        if mode == "wait":
            drained: Future[None] = Future()
            self._send(partial(self._drained.append, drained))
            await asyncio.wrap_future(drained)

    async def resume(self) -> None:
        await self._call(self._batch.resume)

    async def load_weights(self, path: Path) -> None:
        """See `Sampler.load_weights`.

        Raises:
            Conflict: the engine is not paused.
            InvalidRequest: the checkpoint does not fit; the weights are unchanged.
        """
        await self._call(partial(self._batch.load_weights, path))

    async def set_version(self, version: int) -> None:
        await self._call(partial(self._set_version, version))

    async def close(self) -> None:
        """End the decode thread; sequences in flight fail with `EngineUnavailable`. Idempotent."""
        if not self._closed:
            self._closed = True
            self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    def _check(self, request: SampleRequest) -> None:
        ids = request.prompt_ids
        if not len(ids):
            raise InvalidRequest("the prompt is empty")
        if not 0 <= min(ids) <= max(ids) < self.num_ids:
            raise InvalidRequest(f"the prompt has ids outside the vocabulary: 0 to {self.num_ids - 1}")
        if len(ids) >= self.context_length:
            raise ContextOverflow(
                f"the prompt has {len(ids)} tokens and the context {self.context_length}: no room for a reply"
            )

    def _send(self, command: Callable[[], None]) -> None:
        if not self._closed:
            self._commands.put(command)

    async def _call(self, action: Callable[[], ResultT]) -> ResultT:
        """Run `action` on the decode thread, between two steps."""
        if self._closed:
            raise EngineUnavailable("the embedded engine is closed")
        answer: Future[ResultT] = Future()
        self._commands.put(partial(_answer, answer, action))
        return await asyncio.wrap_future(answer)

    # From here on: the decode thread.

    def _run(self) -> None:
        # A per-thread setting, so it must be set in this thread.
        torch.set_num_threads(self._num_threads)
        while not self._stopping:
            self._run_commands()
            if self._batch.has_work and not self._stopping:
                self._step()
            if not self._batch.is_draining:
                self._release_drained()
        self._fail(EngineUnavailable("the embedded engine was closed"))

    def _run_commands(self) -> None:
        """Run the received commands; wait for one if there is nothing to sample."""
        try:
            self._commands.get(block=not self._batch.has_work)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _stop(self) -> None:
        self._stopping = True

    def _add(self, request: SampleRequest, seed: int, reader: _Reader) -> None:
        reader.sequence = self._batch.add(request, seed)
        self._readers[reader.sequence] = reader

    def _remove(self, reader: _Reader) -> None:
        if reader.sequence is not None and self._readers.pop(reader.sequence, None) is not None:
            self._batch.remove(reader.sequence)

    def _pause(self, mode: PauseMode) -> None:
        self._hand_over([(sequence, None) for sequence in self._batch.pause(mode)])

    def _set_version(self, version: int) -> None:
        self.weight_version = self._batch.version = version

    def _release_drained(self) -> None:
        for drained in self._drained:
            if drained.set_running_or_notify_cancel():
                drained.set_result(None)
        self._drained.clear()

    def _step(self) -> None:
        try:
            tokens = self._batch.step()
        except Exception as error:
            self._fail(EngineUnavailable(f"the model failed: {type(error).__name__}: {error}"))
            return
        self._hand_over(tokens)

    def _fail(self, error: GanglineError) -> None:
        self._hand_over([(sequence, error) for sequence in self._batch.drop_all()])

    def _hand_over(self, items: Iterable[tuple[Sequence, _Item]]) -> None:
        """Give each reader its item, waking each event loop once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Reader, _Item]]] = {}
        for sequence, item in items:
            reader = self._readers[sequence]
            by_loop.setdefault(reader.loop, []).append((reader, item))
        for loop, group in by_loop.items():
            # A closed loop has no readers left.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_put_all, group)


class _Reader:
    """The queue from which one iterator receives its tokens."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.items: asyncio.Queue[_Item] = asyncio.Queue()
        self.sequence: Sequence | None = None
        """Set and read by the decode thread."""


def _put_all(group: list[tuple[_Reader, _Item]]) -> None:
    for reader, item in group:
        reader.items.put_nowait(item)


def _answer(answer: Future[ResultT], action: Callable[[], ResultT]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(action())
    except Exception as error:
        answer.set_exception(error)
