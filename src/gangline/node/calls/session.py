"""The model calls of one session attempt: its key, its limits, its calls in flight, its records.

Also the failures of those calls, from which it is judged at the end whether the harness could work.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NoReturn

import msgspec

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import ModelCall, SamplingParams, Thinking
from gangline.domain.environment import SessionEnvironment
from gangline.domain.errors import (
    ContextOverflow,
    EngineRefused,
    Failure,
    ForkDiverged,
    GanglineError,
    InvalidRequest,
    MessagesRefused,
    SessionOver,
)
from gangline.domain.lifecycle import CallLimit
from gangline.domain.open_files import out_of_files
from gangline.domain.task import CaptureSpec, SamplingPolicy
from gangline.domain.tokens import TokenIds
from gangline.models.engines.contract import Engine
from gangline.models.engines.templates.fitting import in_template_words, with_task_arguments
from gangline.node.backends.engine import PooledEngine
from gangline.node.backends.gate import Gate, GateMeter
from gangline.node.calls.chat_call import CallInFlight, call_in_flight
from gangline.node.calls.flight import Flight
from gangline.node.calls.replay.answered import answered_calls
from gangline.node.calls.replay.replayed import replayed_call
from gangline.node.calls.retries import MAX_FINISHED, CallMark, Retries, Subscription
from gangline.node.calls.sampling_policy import SamplingRules
from gangline.node.calls.session_spec import SessionSpec
from gangline.node.calls.token_call import TokenCall, TokenRequest, token_call
from gangline.node.capture.ledger import CompletionJournal, Ledger
from gangline.node.capture.meaning import VolatileText
from gangline.node.capture.parts import CallParts, PartsByRole
from gangline.node.capture.placing import Digests, unknown
from gangline.node.capture.prompt_tier import CheckedStitcher, PromptTier, Renderings
from gangline.node.capture.references import resolved
from gangline.node.capture.stitch import Stitcher
from gangline.node.replay.replay import Match, Replay
from gangline.rows.repetition import is_loop
from gangline.settings.evidence import asked_kinds

_NEEDS_NONE = "If it needs no model, set allow_no_model_call."

_MOST_REFUSALS = 3
_MOST_CHARACTERS = 500


class SessionFailures:
    """Each is None if a call was answered since. Refusals are then forgotten."""

    def __init__(self) -> None:
        self.engine: Failure | None = None
        """The engine's failure of the last call."""
        self.store: Failure | None = None
        """The journal's failure of the last call."""
        self.node: Failure | None = None
        """This node died with calls in flight."""
        self.given_up: tuple[Engine, float] | None = None
        """The engine and the start (Unix time, UTC, seconds) of the first unanswered call whose client had left or
        whose session's time was over."""
        self.context: Failure | None = None
        """A call was refused because the model's context is full. Neither the node's fault nor the harness's."""
        self._refusals: dict[str, int] = {}
        """Error answer to the agent's requests -> count."""

    @property
    def broken(self) -> Failure | None:
        """The failure that kept calls from being answered, if any."""
        return self.engine or self.store

    def clear(self) -> None:
        """Record that a call was answered."""
        self.engine = self.store = self.node = self.context = self.given_up = None
        self._refusals.clear()

    def note_refusal(self, dialect: str, status: int, message: str) -> None:
        """Record an error that answered one of the agent's requests. dialect: its title."""
        answer = f"{dialect}, {status}: {message[:_MOST_CHARACTERS]}"
        if answer in self._refusals or len(self._refusals) < _MOST_REFUSALS:
            self._refusals[answer] = self._refusals.get(answer, 0) + 1

    @property
    def refusals(self) -> str:
        """The errors that answered the agent's requests; empty if no request was refused."""
        return "; ".join(
            answer if times == 1 else f"{answer} ({times} times)" for answer, times in self._refusals.items()
        )

    def no_model_call(self) -> Failure:
        """Returns the failure of an agent that ended by itself without an answered call."""
        if refused := self.refusals:
            message = f"the agent ended without a model call, for each of its requests was refused: {refused}"
            message = f"{message.rstrip('.')}. See its logs for what it made of that. {_NEEDS_NONE}"
        else:
            message = (
                "the agent ended without a model call. See its logs for why, and whether it uses the base URL and the "
                f"key that it was given. {_NEEDS_NONE}"
            )
        return Failure(boundary="harness", code="no_model_call", message=message, retryable=False)

    async def found(self) -> Failure | None:
        """Returns `broken`, or the failure of an engine that failed while the agent waited for it."""
        if self.broken is None and self.given_up is not None:
            engine, since = self.given_up
            gone = await engine.failed_since(since) if isinstance(engine, PooledEngine) else None
            return None if gone is None else gone.failure()
        return self.broken

    def note(self, error: BaseException) -> None:
        """Record the error that ended a call."""
        if (no_files := out_of_files(error)) is not None:
            self.engine = no_files.failure()
            return
        if isinstance(error, ContextOverflow):
            self.context = Failure(boundary="harness", code=error.code, message=error.message, retryable=False)
            return
        if not isinstance(error, GanglineError) or _is_about_the_call(error):
            return
        if error.boundary == "engine":
            self.engine = error.failure()
        elif error.boundary == "store":
            self.store = error.failure()


def _is_about_the_call(error: GanglineError) -> bool:
    """Whether the engine refused the harness's own input."""
    is_refused = isinstance(error, EngineRefused) and not isinstance(error, MessagesRefused)
    return is_refused and error.details.get("status") in (400, 413, 422)


def _of_policy(_role: str) -> None:
    """Default: no role has its own engine."""


def _whole(call: ModelCall, ledger: Ledger, arguments: Mapping[str, Any]) -> ModelCall:
    """Returns the call with the earlier replies it names and the task's template arguments. Raises: InvalidRequest."""
    call = resolved(call, ledger) if _may_refer(call) else call
    return with_task_arguments(call, arguments) if arguments else call


def _may_refer(call: ModelCall) -> bool:
    """Whether the call may name an earlier reply: see `resolved`."""
    if call.undeclared or call.previous_reply_id is not None:
        return True
    return any(type(part) is Thinking for message in call.messages for part in message.parts)


def key_digest(key: str) -> bytes:
    """Returns the digest of a key, to be stored in its place: [32] bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _tier(capture: CaptureSpec, ledger: Ledger, renderings: Renderings, engine: Engine) -> PromptTier:
    """Returns the prompt tier for one engine. Also gives the engine the ids of the session's calls."""
    if isinstance(engine, PooledEngine):
        engine.engine_ids = ledger.engine_call_ids
    stitcher = Stitcher(engine, ledger.tree, capture.thinking)
    return PromptTier(capture.tier, CheckedStitcher(engine, ledger.tree, stitcher, capture.not_as_rendered, renderings))


class ModelSession:
    """Admits calls until it is fenced or its turns are used up. Owns every call until it has ended."""

    def __init__(
        self,
        spec: SessionSpec,
        engine: Engine,
        journal: CompletionJournal,
        *,
        completions: Iterable[Completion] = (),
        gate: Gate | None = None,
        renderings: Renderings | None = None,
        sampling: SamplingPolicy | None = None,
        checkpoint: Callable[[], Awaitable[str | None]] | None = None,
        engine_of: Callable[[str], Engine | None] = _of_policy,
        replay: Replay | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Long because it assembles the session's parts.

        engine: the policy's.
        completions: this attempt's records in the journal; their conversations continue.
        gate: the node's; None: a private one that is open. renderings: likewise.
        sampling: the operator's policy, applied after the task's.
        checkpoint: see `CallParts`.
        engine_of: a role's own engine; None: the policy's engine answers it.
        replay: the recorded calls that a fork repeats.
        """
        self.spec = spec
        self.key_digest = key_digest(spec.key) if isinstance(spec.key, str) else spec.key
        self.limit_reached = asyncio.Event()
        """Set by the first call beyond one of the session's limits, or by a fork that diverged; that call was
        refused."""
        self.limit: CallLimit | None = None
        """The limit that was exceeded."""
        self.failures = SessionFailures()
        self.replay = replay
        self.environments: Mapping[str, SessionEnvironment] = {}
        """Environments whose tools the agent calls over HTTP: see `ToolRoutes`."""
        capture = spec.capture
        role_after_fork = None if replay is None else replay.engine
        volatile = VolatileText(capture.volatile_system_text)
        ledger = Ledger(spec.session_id, spec.attempt, journal, completions, volatile, role_after_fork)
        tier_of = partial(_tier, capture, ledger, renderings or Renderings())
        parts = CallParts(
            engine=engine,
            ledger=ledger,
            tier=tier_of(engine),
            gate=gate or Gate(),
            meter=GateMeter(),
            clock=clock,
            with_texts=capture.token_texts,
            evidence=asked_kinds(capture) if capture.asks_evidence else (),
            empty_retries=capture.empty_generation_retries,
            checkpoint=checkpoint,
        )
        self._parts = PartsByRole(parts, engine_of=engine_of, tier_of=tier_of, role_after_fork=role_after_fork)
        seed = capture.session_seed(spec.sample_index)
        policies = [policy for policy in (capture.sampling, sampling) if policy is not None]
        self._sampling = SamplingRules(seed, policies) if policies or seed is not None else None
        # No reference cycle through the session: it is freed at once when it is over.
        self._retries = Retries(
            lambda flight: ledger.is_continued(flight.record_key),
            window_s=spec.retry_window_s,
            grace_s=spec.retry_grace_s,
            answered=answered_calls(self.tree, clock() - spec.retry_window_s, MAX_FINISHED) if self.tree else None,
        )
        self._numbers, self._environment_numbers = (
            # The choices of one call have the same start.
            _CallNumbers(len({one.started_at for one in self.tree if one.of_environment == of_environment}))
            for of_environment in (False, True)
        )
        self._fence_message: str | None = None
        self._in_flight: dict[Flight[Any, Any], tuple[_CallNumbers, int, Engine]] = {}
        """With the call's number and its engine."""

    @property
    def session_id(self) -> str:
        return self.spec.session_id

    @property
    def key(self) -> str:
        """Empty if only its digest is known."""
        return self.spec.key if isinstance(self.spec.key, str) else ""

    @property
    def key_digests(self) -> tuple[bytes, ...]:
        """Digests of the agent's key and, if there is one, the environments' key."""
        others = self.spec.environment_key
        return (self.key_digest,) if others is None else (self.key_digest, key_digest(others))

    @property
    def _ledger(self) -> Ledger:
        return self._parts.policy.ledger

    @property
    def meter(self) -> GateMeter:
        """How long the gate has held this session; budgets are paused meanwhile."""
        return self._parts.policy.meter

    @property
    def tree(self) -> CompletionTree:
        return self._ledger.tree

    def engine_of(self, role: str | None) -> Engine:
        """Returns the engine that answers a role's calls; None: calls without a role."""
        return self._parts.of(role).engine

    async def committed(self, after: int, wait_s: float) -> list[Completion]:
        """Returns the records after the first `after`, in commit order. Waits at most `wait_s` for one if there are
        none. All returned records are in the journal."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._ledger.beyond(after)
        return list(islice(self.tree, after, None))

    @property
    def in_flight(self) -> Collection[Flight[Any, Any]]:
        """Calls that have not ended."""
        return self._in_flight.keys()

    @property
    def volatile_rules(self) -> tuple[str, ...]:
        """See `VolatileText`."""
        return self._ledger.volatile.rules

    @property
    def num_calls(self) -> int:
        """Number of the agent's admitted calls, without failed ones that left no record."""
        return self._numbers.num_calls

    def subscribe(self, call: ModelCall, mark: CallMark, known: Digests = unknown) -> Subscription:
        """Listen to `call`: a new one, or the call it retries. Raises: SessionOver, InvalidRequest."""
        if self._fence_message is not None:
            raise SessionOver(self._fence_message)
        return self._retries.subscribe(mark, lambda: self.start_call(call, mark.retry_key, known))

    def start_call(self, call: ModelCall, retry_key: str | None = None, known: Digests = unknown) -> CallInFlight:
        """Start a call.

        retry_key: see `CallMark`. known: see `PlaceIndex.place`.

        Raises: SessionOver, InvalidRequest; NotFound for its model; EngineUnavailable when a fork's other engine is
        gone.
        """
        call = _whole(call, self._ledger, self.spec.capture.template_kwargs)
        if not call.of_environment:
            self._refuse_loop(call)
        recorded = None
        if self.replay is not None:
            call, recorded = self._matched(call, self.replay)
        parts = self._parts.of_call(call)
        numbers = self._environment_numbers if call.of_environment else self._numbers
        number = self._admit(numbers)
        used = self._used(call.sampling, number)
        requested = None if used == call.sampling else call.sampling
        call = call if requested is None else msgspec.structs.replace(call, sampling=used)
        if recorded is not None and self.replay is not None:
            flight = replayed_call(call, recorded, self.replay, parts, retry_key=retry_key)
        else:
            flight = call_in_flight(call, parts, requested=requested, retry_key=retry_key, known=known)
        self._in_flight[flight] = numbers, number, parts.engine
        flight.start(self._ended)
        return flight

    def _matched(self, call: ModelCall, replay: Replay) -> Match:
        """Raises: SessionOver, ForkDiverged, which ends the session."""
        if self._fence_message is not None:
            raise SessionOver(self._fence_message)
        try:
            return replay.match(call)
        except ForkDiverged:
            self.limit_reached.set()
            raise

    async def render(self, call: ModelCall) -> TokenIds:
        """Returns the tokens of the call's prompt as the engine renders it: [T]. Samples nothing, and is not a turn.

        Raises: SessionOver, InvalidRequest, EngineError.
        """
        if self._fence_message is not None:
            raise SessionOver(self._fence_message)
        call = _whole(call, self._ledger, self.spec.capture.template_kwargs)
        engine = self._parts.of_call(call).engine
        call = in_template_words(call, (await engine.capabilities()).template)
        return await engine.render(call.messages, call.tools, call.template_kwargs)

    def start_tokens(self, request: TokenRequest) -> TokenCall:
        """Start a call in tokens, to the policy. Seed and sampling policies apply to it too. Raises: SessionOver."""
        if self.replay is not None:
            raise InvalidRequest("a fork takes no calls in tokens: they cannot be compared with the recorded ones.")
        requested = request.sampling
        number = self._admit(self._numbers)
        used = self._used(requested, number)
        request = msgspec.structs.replace(request, sampling=used)
        flight = token_call(request, self._parts.policy, requested=None if used == requested else requested)
        self._in_flight[flight] = self._numbers, number, self._parts.policy.engine
        flight.start(self._ended)
        return flight

    def _used(self, wished: SamplingParams, number: int) -> SamplingParams:
        """Returns the parameters to send to the engine for the call with this number."""
        return wished if self._sampling is None else self._sampling.used(wished, number)

    def _admit(self, numbers: _CallNumbers) -> int:
        """Returns the call's number. Limits apply only to the agent's calls. Raises: SessionOver."""
        if self._fence_message is not None:
            raise SessionOver(self._fence_message)
        if numbers is self._environment_numbers:
            return numbers.take()
        max_turns, max_tokens = self.spec.max_turns, self.spec.max_sampled_tokens
        if max_turns is not None and numbers.num_calls >= max_turns:
            self._refuse("turn_limit", f"{max_turns} model calls")
        if max_tokens is not None and self._ledger.num_sampled_tokens >= max_tokens:
            self._refuse("token_limit", f"{max_tokens} sampled tokens")
        return numbers.take()

    def _refuse_loop(self, call: ModelCall) -> None:
        """Raises: SessionOver."""
        most = self.spec.max_repeated_actions
        if most is not None and self._fence_message is None and is_loop(call.messages, most):
            self._refuse("agent_loop", f"{most} times the same actions with the same results")

    def _refuse(self, limit: CallLimit, what: str) -> NoReturn:
        self.limit = self.limit or limit
        self.limit_reached.set()
        raise SessionOver(f"the session's limit of {what} is reached")

    async def fence(self, message: str) -> None:
        """Refuse further calls, to the model or an environment, and abort those in flight. Returns when all have ended
        and are recorded. Idempotent."""
        self._fence_message = self._fence_message or message
        for environment in self.environments.values():
            await environment.fence()
        flights = list(self._in_flight)
        for flight in flights:
            flight.abort(message)
        for flight in flights:
            await flight.ended()

    def _ended(self, flight: Flight[Any, Any]) -> None:
        numbers, number, engine = self._in_flight.pop(flight)
        error = flight.error
        if flight.answered:
            self.failures.clear()
        elif error is not None and not isinstance(error, SessionOver):
            numbers.give_back(number)
            self.failures.note(error)
        elif self.failures.given_up is None:
            self.failures.given_up = engine, flight.created_at


class _CallNumbers:
    """Numbers of a session's calls, from 0."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls
        """Calls that have a number."""
        self._free: list[int] = []
        """A heap of the numbers of failed calls. Together with the numbers in use they are all numbers up to the
        highest."""

    def take(self) -> int:
        """Returns the lowest free number: a retry after a failure reuses its seed."""
        number = heapq.heappop(self._free) if self._free else self.num_calls
        self.num_calls += 1
        return number

    def give_back(self, number: int) -> None:
        self.num_calls -= 1
        heapq.heappush(self._free, number)
