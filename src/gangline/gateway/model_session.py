"""The model-calling side of one session attempt: its key, its limits, its calls in flight, its records."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NoReturn

import msgspec

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import ModelCall, SamplingParams
from gangline.domain.errors import (
    ContextOverflow,
    EngineRefused,
    Failure,
    GanglineError,
    SessionOver,
)
from gangline.domain.open_files import out_of_files
from gangline.domain.seeds import derived_seed
from gangline.domain.task import SamplingPolicy
from gangline.engines.contract import Engine
from gangline.gateway.answered import answered_calls
from gangline.gateway.calls import CallInFlight
from gangline.gateway.gate import Gate, GateMeter
from gangline.gateway.ledger import CompletionJournal, Ledger
from gangline.gateway.placing import Digests, unknown
from gangline.gateway.references import resolved
from gangline.gateway.retries import MAX_FINISHED, Attendance, CallMark, Retries
from gangline.gateway.sampling_policy import apply_policies
from gangline.gateway.stitch import PromptTier, Stitcher, ThinkingPolicy, Tier
from gangline.gateway.token_call import TokenCall, TokenRequest
from gangline.gateway.volatile import VolatileText

__all__ = ["ModelSession", "key_digest"]

_NUM_SEEDS = 2**30
"""Seeds that engines are sent: each choice of a call adds its index, and SGLang has kept the sum in 32 bits."""


def key_digest(key: str) -> bytes:
    """What is kept of a key that must outlive the process: [32] bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class ModelSession:
    """Admits calls until it is fenced or its turns are used up; owns every call until that has ended."""

    def __init__(
        self,
        session_id: str,
        attempt: int,
        key: str | bytes,
        engine: Engine,
        journal: CompletionJournal,
        max_turns: int | None = None,
        max_sampled_tokens: int | None = None,
        thinking: ThinkingPolicy = "follow_template",
        tier: Tier = "auto",
        clock: Callable[[], float] = time.time,
        completions: Iterable[Completion] = (),
        gate: Gate | None = None,
        sampling: Sequence[SamplingPolicy] = (),
        seed: int | None = None,
        retry_window_s: float = 600.0,
        retry_grace_s: float = 5.0,
        volatile_system_text: Sequence[str] | None = None,
        token_texts: bool = False,
    ) -> None:
        """
        key: the session's key, or its digest where nobody here knows the key any more.
        completions: what the journal already has of this attempt; their conversations go on.
        gate: the node's; None is one of its own, open.
        sampling: the operator's policies over what the harness wishes, the last one last.
        seed: what each call's own is made from, see `CaptureSpec`; None leaves them to the harness.
        retry_grace_s: how long a call whose client vanished before anything was sent waits for a retry.
        volatile_system_text, token_texts: see `CaptureSpec`.
        """
        self.session_id = session_id
        self.attempt = attempt
        self.key = key if isinstance(key, str) else ""
        """Empty where only its digest is known."""
        self.key_digest = key_digest(key) if isinstance(key, str) else key
        self.engine = engine
        self.limit_reached = asyncio.Event()
        """Set by the first call beyond `max_turns` or `max_sampled_tokens`; that call was refused."""
        self.limit: Literal["turn_limit", "token_limit"] | None = None
        """Which one it was beyond."""
        self.engine_failure: Failure | None = None
        """How the engine failed the last call; None when calls were answered since."""
        self.store_failure: Failure | None = None
        """Likewise, of the journal."""
        self.node_failure: Failure | None = None
        """That this node died, and took calls in flight along; None when calls were answered since."""
        self._ledger = Ledger(session_id, attempt, journal, completions, VolatileText(volatile_system_text))
        self._tier = PromptTier(tier, Stitcher(engine, self._ledger.tree, thinking))
        self._gate = gate or Gate()
        self.meter = GateMeter()
        """How long the gate has held this session: budgets stand still meanwhile."""
        self._sampling = tuple(sampling)
        self._seed = seed
        self._token_texts = token_texts
        ledger = self._ledger  # nothing that the session holds holds the session: one that is over is freed at once
        self._retries = Retries(
            lambda flight: ledger.is_continued(flight.record_key),
            window_s=retry_window_s,
            grace_s=retry_grace_s,
            answered=answered_calls(self.tree, clock() - retry_window_s, MAX_FINISHED),
        )
        self._max_turns = max_turns
        self._max_sampled_tokens = max_sampled_tokens
        self._clock = clock
        # The choices of one call share its start.
        self._num_calls = len({completion.started_at for completion in self.tree})
        self._fence_message: str | None = None
        self._in_flight: dict[CallInFlight | TokenCall, int] = {}
        """With the call's number."""
        self._free_numbers: list[int] = []
        """A heap. Of calls that failed: with the numbers in use they are all those up to the highest."""

    @property
    def tree(self) -> CompletionTree:
        return self._ledger.tree

    @property
    def volatile_rules(self) -> tuple[str, ...]:
        """See `VolatileText`."""
        return self._ledger.index.volatile.rules

    @property
    def num_calls(self) -> int:
        """Model calls that were admitted, without those that failed and left no record."""
        return self._num_calls

    def attend(self, call: ModelCall, mark: CallMark, known: Digests = unknown) -> Attendance:
        """Listen to `call`: a new one, or the one that it is a retry of. Raises: SessionOver, InvalidRequest."""
        if self._fence_message is not None:
            raise SessionOver(self._fence_message)
        return self._retries.attend(mark, lambda: self.start_call(call, mark.retry_key, known))

    def start_call(self, call: ModelCall, retry_key: str | None = None, known: Digests = unknown) -> CallInFlight:
        """`retry_key`: see `CallMark`; `known`: see `PlaceIndex.place`. Raises: SessionOver, InvalidRequest."""
        call = resolved(call, self._ledger)
        number = self._admit()
        used = self._used(call.sampling, number)
        wished = None if used == call.sampling else call.sampling
        call = call if wished is None else msgspec.structs.replace(call, sampling=used)
        flight = CallInFlight(
            call,
            self.engine,
            self._ledger,
            self._tier,
            self._clock,
            gate=self._gate,
            meter=self.meter,
            wished=wished,
            retry_key=retry_key,
            known=known,
            with_texts=self._token_texts,
        )
        self._in_flight[flight] = number
        flight.start(self._ended)
        return flight

    async def count(self, call: ModelCall) -> int:
        """Tokens of the call's prompt, as the engine renders it. Samples nothing, and is no turn.

        Raises: SessionOver, InvalidRequest, EngineError.
        """
        if self._fence_message is not None:
            raise SessionOver(self._fence_message)
        call = resolved(call, self._ledger)
        return len(await self.engine.render(call.messages, call.tools, call.template_kwargs))

    def start_tokens(self, request: TokenRequest) -> TokenCall:
        """A call in tokens. Seed and sampling policies hold for it too. Raises: SessionOver."""
        wished = request.sampling
        number = self._admit()
        used = self._used(wished, number)
        request = msgspec.structs.replace(request, sampling=used)
        flight = TokenCall(
            *(request, self.engine, self._ledger, self._clock),
            gate=self._gate,
            meter=self.meter,
            wished=None if used == wished else wished,
            with_texts=self._token_texts,
        )
        self._in_flight[flight] = number
        flight.start(self._ended)
        return flight

    def _used(self, wished: SamplingParams, number: int) -> SamplingParams:
        """What the engine is sent for the call of that number."""
        if self._seed is not None:
            wished = msgspec.structs.replace(wished, seed=derived_seed(self._seed, number) % _NUM_SEEDS)
        return apply_policies(self._sampling, wished)

    def _admit(self) -> int:
        """The call's number, from 0: the lowest that no call has, so that one after a failure is what that was to be.

        Raises: SessionOver.
        """
        if self._fence_message is not None:
            raise SessionOver(self._fence_message)
        if self._max_turns is not None and self._num_calls >= self._max_turns:
            self._refuse("turn_limit", f"{self._max_turns} model calls")
        if self._max_sampled_tokens is not None and self._ledger.num_sampled_tokens >= self._max_sampled_tokens:
            self._refuse("token_limit", f"{self._max_sampled_tokens} sampled tokens")
        number = heapq.heappop(self._free_numbers) if self._free_numbers else self._num_calls
        self._num_calls += 1
        return number

    def _refuse(self, limit: Literal["turn_limit", "token_limit"], what: str) -> NoReturn:
        self.limit = self.limit or limit
        self.limit_reached.set()
        raise SessionOver(f"the session's limit of {what} is reached")

    async def fence(self, message: str) -> None:
        """Take no more calls; abort those in flight. Returns when all have ended and are recorded. Idempotent."""
        self._fence_message = self._fence_message or message
        flights = list(self._in_flight)
        for flight in flights:
            flight.abort(message)
        for flight in flights:
            await flight.ended()

    def _ended(self, flight: CallInFlight | TokenCall) -> None:
        number = self._in_flight.pop(flight)
        error = flight.error
        if flight.answered:
            self.engine_failure = self.store_failure = self.node_failure = None
        elif error is not None and not isinstance(error, SessionOver):
            self._num_calls -= 1
            heapq.heappush(self._free_numbers, number)
            self._note(error)

    def _note(self, error: BaseException) -> None:
        if (no_files := out_of_files(error)) is not None:
            self.engine_failure = no_files.failure()
            return
        if not isinstance(error, GanglineError) or _is_about_the_call(error):
            return
        if error.boundary == "engine":
            self.engine_failure = error.failure()
        elif error.boundary == "store":
            self.store_failure = error.failure()


def _is_about_the_call(error: GanglineError) -> bool:
    """What the engine refuses because of what the harness sent is the harness's own doing."""
    if isinstance(error, ContextOverflow):
        return True
    return isinstance(error, EngineRefused) and error.details.get("status") in (400, 413, 422)
