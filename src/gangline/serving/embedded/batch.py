"""The running batch: decides which tokens of which sequences the model runs next. Synchronous; called by one thread.

Laws of a step:
- every sequence that only lacks its last token's logits decodes one token; prompts share a budget of tokens, so a long
  prompt delays other sequences by one chunk, never by its whole length;
- a sequence reuses the longest prefix that any other sequence has computed, and waits if another sequence is computing
  it: a group of samples of one prompt costs one prompt;
- a token is recorded with the version of the weights that sampled it. New weights empty all caches, so later tokens are
  conditioned on the new weights throughout, and teacher forcing under the recorded version gives the same log-prob.

*Not here*: threads and asyncio (`sampler.py`), the arithmetic of one pass (`model.py`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gangline.domain.errors import Conflict
from gangline.models.engine_server.sampler import FinishReason, PauseMode, SampledToken, SampleRequest
from gangline.serving.embedded.kv_cache import KvCache, PrefixStore, common_length
from gangline.serving.embedded.model import Chunk, LanguageModel
from gangline.serving.embedded.sampling import Draw, RowParameters, draw

# Copying a shorter prefix, or waiting for it, costs more than computing it.
_MIN_SHARED = 8


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence being sampled."""

    request: SampleRequest
    uniform: random.Random
    ids: list[int]
    cache: KvCache
    num_sampled: int = 0

    @property
    def num_pending(self) -> int:
        """Tokens not yet in the cache; 1 while decoding."""
        return len(self.ids) - self.cache.length

    def pending(self, limit: int) -> NDArray[np.int64]:
        start = self.cache.length
        return np.asarray(self.ids[start : start + limit], dtype=np.int64)

    def parameters(self) -> RowParameters:
        request = self.request
        banned = request.stop_ids if self.num_sampled < request.min_tokens else frozenset[int]()
        return RowParameters(
            request.temperature,
            request.top_p,
            request.top_k,
            banned,
            request.num_top_logprobs,
            self._penalties(),
            request.with_mask,
        )

    def _penalties(self) -> dict[int, float]:
        presence, frequency = self.request.presence_penalty, self.request.frequency_penalty
        if not (presence or frequency):
            return {}
        counts = Counter(self.ids[len(self.ids) - self.num_sampled :])
        return {token_id: presence + frequency * count for token_id, count in counts.items()}


class Batch:
    """Sequences that decode together. `max_batch` run at once; the others are queued."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_batch: int = 32,
        context_length: int | None = None,
        prefix_bytes: int = 1 << 30,
        version: int = 0,
    ) -> None:
        self._model = model
        self._max_batch = max_batch
        self._context_length = min(context_length or model.context_length, model.context_length)
        self._prefixes = PrefixStore(prefix_bytes)
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._held: list[Sequence] = []
        self._paused: PauseMode | None = None
        self.version = version
        """Weight version recorded for the next token."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._paused in (None, "wait") and bool(self._running or self._waiting)

    @property
    def is_draining(self) -> bool:
        """Paused by `wait`, with sequences still to finish."""
        return self._paused == "wait" and self.has_work

    def add(self, request: SampleRequest, seed: int | str) -> Sequence:
        """Queue a sequence; while paused, it waits for `resume`."""
        ids = [int(token_id) for token_id in request.prompt_ids]
        sequence = Sequence(request, random.Random(seed), ids, self._model.new_cache())
        (self._waiting if self._paused is None else self._held).append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence in any state. Its computed cache is kept for reuse as a prefix."""
        for queue in (self._waiting, self._held):
            if sequence in queue:
                queue.remove(sequence)
        if sequence in self._running:
            self._leave(sequence)

    def pause(self, mode: PauseMode) -> list[Sequence]:
        """Stop sampling. Returns the sequences ended by `abort`. `wait` is complete once `is_draining` is false."""
        self._paused = mode
        if mode != "abort":
            return []
        aborted = [*self._running, *self._waiting]
        for sequence in aborted:
            self.remove(sequence)
        return aborted

    def resume(self) -> None:
        self._paused = None
        self._waiting += self._held
        self._held = []

    def load_weights(self, folder: Path) -> None:
        """Replace the weights.

        Raises:
            Conflict: not paused: tokens of the new weights would be recorded with the old version.
        """
        if self._paused is None or self.is_draining:
            raise Conflict("weights are loaded only while the engine is paused: pause it first, resume it afterwards")
        self._model.load_weights(folder)
        self._prefixes.clear()
        for sequence in self._running:
            sequence.cache.clear()

    def score(self, ids: NDArray[np.int64]) -> list[float]:
        """See `LanguageModel.score`."""
        return self._model.score(ids)

    def drop_all(self) -> list[Sequence]:
        """Empty the batch and all caches, because the model failed or the engine closes."""
        dropped = [*self._running, *self._waiting, *self._held]
        for sequence in self._running:
            self._model.take_off(sequence.cache)
        self._running, self._waiting, self._held = [], [], []
        self._prefixes.clear()
        return dropped

    def step(self) -> list[tuple[Sequence, SampledToken]]:
        """Run the model once and sample a token for each sequence that is ready."""
        while self._waiting and len(self._running) < self._max_batch:
            self._running.append(self._waiting.pop(0))
        planned = list(self._plan())
        logits = self._model.forward([chunk for _, chunk in planned])
        ready = [i for i, (sequence, _) in enumerate(planned) if sequence.num_pending == 0]
        if not ready:
            return []
        sequences = [planned[i][0] for i in ready]
        uniforms = [sequence.uniform.random() for sequence in sequences]
        draws = draw(logits[ready], [sequence.parameters() for sequence in sequences], uniforms)
        return [(s, self._accept(s, drawn)) for s, drawn in zip(sequences, draws, strict=True)]

    def _plan(self) -> Iterator[tuple[Sequence, Chunk]]:
        budget = self._model.prompt_tokens
        computing: list[NDArray[np.int64]] = []
        for sequence in self._running:
            if sequence.num_pending > 1 and self._share_prefix(sequence, computing):
                continue
            if sequence.num_pending > 1:
                computing.append(np.asarray(sequence.ids, dtype=np.int64))
                if budget == 0:
                    continue
            ids = sequence.pending(budget if sequence.num_pending > 1 else 1)
            if sequence.num_pending > 1:
                budget -= len(ids)
            yield sequence, Chunk(sequence.cache, ids)

    def _share_prefix(self, sequence: Sequence, computing: list[NDArray[np.int64]]) -> bool:
        """Reuse the cache of other sequences with this prompt. True if it is better to wait, because another sequence
        is computing more of it.
        """
        # The last token always goes through the model, because its logits are sampled from.
        ids = np.asarray(sequence.ids[:-1], dtype=np.int64)
        source, length = self._prefixes.longest_prefix(ids)
        for other in self._running:
            common = common_length(other.cache.ids, ids)
            if common > length:
                source, length = other.cache, common
        if source is not None and length - sequence.cache.length >= _MIN_SHARED:
            sequence.cache.copy_prefix(source, length)
        coming = max((common_length(other, ids) for other in computing), default=0)
        return coming - sequence.cache.length >= _MIN_SHARED

    def _accept(self, sequence: Sequence, drawn: Draw) -> SampledToken:
        sequence.ids.append(drawn.token_id)
        sequence.num_sampled += 1
        reason = self._finish_reason(sequence, drawn.token_id)
        if reason is not None:
            self._leave(sequence)
        return SampledToken(
            drawn.token_id, drawn.logprob, self.version, reason, drawn.top_logprobs, kept_ids=drawn.kept_ids
        )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        if token_id in sequence.request.stop_ids:
            return "stop"
        full = len(sequence.ids) >= self._context_length
        return "length" if full or sequence.num_sampled >= sequence.request.max_tokens else None

    def _leave(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._model.take_off(sequence.cache)
        if sequence.cache.length:
            self._prefixes.keep(sequence.cache)
