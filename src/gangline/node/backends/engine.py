"""The engine as a session sees it: its backend in the pool, or the next one when that dies. Also the pool's records of
engines and sessions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from gangline.domain.completion import SPAN
from gangline.domain.conversation import Message, ModelCall, Text, ToolDefinition
from gangline.domain.errors import EngineError, EngineRefused, EngineUnavailable, MessagesRefused
from gangline.domain.ids import root_span_of
from gangline.domain.node_views import BackendState, BackendView
from gangline.domain.template_findings import features, lacks
from gangline.domain.tokens import TokenIds, common_prefix_len
from gangline.models.engines.contract import (
    Engine,
    EngineCapabilities,
    EngineChoice,
    EngineDelta,
    EngineReply,
    EngineRequest,
)
from gangline.models.engines.fields import has_media
from gangline.models.engines.templates.fitting import RESULTS_AS_USER, SPLIT_CALLS, fit
from gangline.node.backends.gate import GateMeter
from gangline.node.backends.speed import SpeedMeter

Slots = AbstractAsyncContextManager[None]
"""Slots for calls in flight; a call waits until it gets one."""

FITTED = "fitted"
"""Name in the metadata of replies and records: the changes to the messages that the chat template required."""

ResultT = TypeVar("ResultT")
PartT = TypeVar("PartT", EngineChoice, EngineDelta)

_MAX_BACKENDS_PER_CALL = 3

_OF_TEMPLATES = (400, 422, 500)
"""Statuses with which engines report a chat template's error."""
_PLAIN = (Message("user", (Text("x"),)),)

Rank = tuple[int, int, int]
"""(sessions now, sessions ever, order of arrival); the lowest is chosen first."""


class BackendSpec(msgspec.Struct, frozen=True):
    """An engine as an operator specifies it."""

    url: str
    kind: str = "auto"
    """Kind of the engine plug-in; `auto` detects it."""
    label: str | None = None
    api_key_env: str | None = None
    """Name of the environment variable that contains its key."""
    options: dict[str, Any] = {}
    """Options of the plug-in, and `parsers`."""
    role: str | None = None
    """The role whose calls it answers; None: the policy's."""
    capture: Literal["ids", "text"] | None = None
    """`text` accepts a server that reports no token ids; None: the pool's setting."""


@dataclass(eq=False, slots=True)
class Backend:
    """A running engine and its state in the pool."""

    backend_id: str
    number: int
    spec: BackendSpec
    engine: Engine
    capabilities: EngineCapabilities
    identity: dict[str, Any]
    is_near: bool
    state: BackendState
    since: float
    num_sessions: int = 0
    num_assigned: int = 0
    num_calls: int = 0
    num_failures: int = 0
    failed_at: float = 0.0
    """When its last failed health check ended (Unix time, UTC, seconds); 0.0: no check failed."""
    error: str | None = None
    weights_known: bool = True
    has_page: bool = True
    """Whether it may have a metrics page."""
    page_read_at: float = 0.0
    """Unix time, UTC, seconds."""
    speed: SpeedMeter = field(default_factory=SpeedMeter)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its last call in flight has ended."""

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def label(self) -> str | None:
        return self.spec.label

    @property
    def rank(self) -> Rank:
        return self.num_sessions, self.num_assigned, self.number

    @contextmanager
    def in_use(self) -> Generator[Engine]:
        """Count a call in flight for the duration of the block."""
        self.num_calls += 1
        self.idle.clear()
        try:
            yield self.engine
        finally:
            self.num_calls -= 1
            if self.num_calls == 0:
                self.idle.set()

    def view(self) -> BackendView:
        return BackendView(
            backend_id=self.backend_id,
            url=self.url,
            engine=self.capabilities.engine,
            label=self.label,
            role=self.spec.role,
            api_key_env=self.spec.api_key_env,
            is_near=self.is_near,
            state=self.state,
            model=self.capabilities.model,
            version=self.capabilities.version,
            tier=self.capabilities.tier,
            template=self.capabilities.template,
            template_told=tuple(features(self.capabilities.template)),
            template_lacks=tuple(lacks(self.capabilities.template)),
            sees_images=self.capabilities.sees_images,
            num_sessions=self.num_sessions,
            num_assigned=self.num_assigned,
            num_calls=self.num_calls,
            num_failures=self.num_failures,
            error=self.error,
            speed=self.speed.view(),
            weights_known=self.weights_known,
            reports_versions=self.capabilities.reports_versions,
            since=self.since,
        )


@dataclass(eq=False, slots=True)
class Assignment:
    """A session's backend, and its moves that no completion has recorded yet."""

    session_id: str
    task_id: str
    backend: Backend | None = None
    moves: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    is_over: bool = False
    num_tokens: int = 0
    """Length of its last context, prompt and reply; 0 until an engine reported one."""
    keeps_prompt: bool = False
    last_prompt: TokenIds | None = None
    """The prompt of the last call that reported one, where `keeps_prompt`."""
    num_prompted: int = 0
    num_repeated: int = 0
    """Tokens of prompts, and how many of them a prompt began with as the one before it did; whoever counts them sets
    both back to 0."""

    def read(self, prompt_ids: TokenIds | None, num_prompt_tokens: int | None) -> None:
        """Note the prompt of a reply; afterwards count the sampled tokens."""
        self.num_tokens = (num_prompt_tokens or 0) if prompt_ids is None else len(prompt_ids)
        if self.keeps_prompt and prompt_ids is not None:
            self.num_prompted += len(prompt_ids)
            if self.last_prompt is not None:
                self.num_repeated += common_prefix_len(self.last_prompt, prompt_ids)
            self.last_prompt = prompt_ids


class Backends(Protocol):
    """The pool as one session sees it."""

    def turn(self, assignment: Assignment, meter: GateMeter) -> AbstractAsyncContextManager[None]: ...

    async def backend_of(self, assignment: Assignment) -> Backend: ...

    async def is_lost(self, backend: Backend) -> bool: ...


class PooledEngine:
    """Implements `Engine`. Retries a call on another backend when its backend dies, unless part of the stream was sent.

    The first reply from a session's new backend has `backend_replaced` in its metadata: a list of moves. A reply to
    messages that were fitted to the backend's template has `fitted`: kind of change -> count.
    """

    def __init__(
        self, pool: Backends, assignment: Assignment, slots: Slots | None = None, *, is_traced: bool = False
    ) -> None:
        """slots: each call holds one while in flight; None: no limit. is_traced: engines get the ids of spans."""
        self._pool = pool
        self._assignment = assignment
        self._slots = slots or nullcontext()
        self._is_traced = is_traced
        self.engine_ids: dict[str, str] = {}
        """Call id as the client knows it -> call id from the engine or the model."""

    def turn(self, meter: GateMeter) -> AbstractAsyncContextManager[None]:
        """Wait until the session may call; for the duration of a call."""
        return self._pool.turn(self._assignment, meter)

    async def probe(self) -> EngineCapabilities:
        return await self._ask(lambda backend: backend.engine.probe())

    async def capabilities(self) -> EngineCapabilities:
        return (await self._pool.backend_of(self._assignment)).capabilities

    async def chat(self, request: EngineRequest) -> EngineReply:
        async with self._slots:
            reply = await self._ask(lambda backend: self._chat(backend, request))
        usage = reply.usage
        self._assignment.read(reply.prompt_ids, None if usage is None else usage.num_prompt_tokens)
        self._assignment.num_tokens += max(
            (len(one.sampled_ids) for one in reply.choices if one.sampled_ids is not None), default=0
        )
        return msgspec.structs.replace(reply, metadata=reply.metadata | self._take_moves())

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        async with self._slots:
            for attempt in range(_MAX_BACKENDS_PER_CALL):
                backend = await self._pool.backend_of(self._assignment)
                started = False
                is_known = backend.weights_known
                fitted, changes = self._fitted(backend, request)
                try:
                    with backend.in_use() as engine, backend.speed.call(is_streamed=True) as timed:
                        async with aclosing(engine.stream(fitted)) as deltas:
                            async for delta in deltas:
                                if delta.sampled_ids or not delta.shown.shows_nothing:
                                    timed.sampled(len(delta.sampled_ids or ()))
                                if not started:
                                    started = True
                                    metadata = delta.metadata | changes | self._take_moves()
                                    delta = msgspec.structs.replace(delta, metadata=metadata)
                                if delta.prompt_ids is not None:
                                    self._assignment.read(delta.prompt_ids, None)
                                self._assignment.num_tokens += len(delta.sampled_ids or ())
                                yield delta if is_known else _of_unknown_weights(delta)
                    return
                except EngineUnavailable as error:
                    is_lost = await self._pool.is_lost(backend)
                    if started:
                        raise
                    if not is_lost or attempt + 1 == _MAX_BACKENDS_PER_CALL:
                        await _raise_if_of_template(backend, fitted.call, error)
                        raise
                except EngineRefused as error:
                    await _raise_if_of_template(backend, fitted.call, error)
                    raise

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        async def rendered(backend: Backend) -> TokenIds:
            fitted, changes = fit(tuple(messages), backend.capabilities.template, self.engine_ids)
            if RESULTS_AS_USER in changes or SPLIT_CALLS in changes:
                # The stitcher renders a placeholder reply: it must see this as a refusal of the template.
                raise EngineRefused("the template takes each result only after its own call", status=400)
            return await backend.engine.render(fitted, tools, template_kwargs, add_generation_prompt)

        return await self._ask(rendered)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return await self._ask(lambda backend: backend.engine.detokenize(ids))

    async def check_health(self, timeout_s: float) -> None:
        backend = await self._pool.backend_of(self._assignment)
        await backend.engine.check_health(timeout_s)

    async def failed_since(self, at: float) -> EngineUnavailable | None:
        """Returns the error of a call that began at `at` (Unix time, UTC, seconds) and was not answered, if its backend
        has failed since; else None."""
        backend = self._assignment.backend
        if backend is None:
            return EngineUnavailable("the agent gave up on a call for which no engine was healthy")
        if backend.failed_at < at and backend.state == "healthy" and not await self._pool.is_lost(backend):
            return None
        why = "" if backend.error is None else f": {backend.error}"
        return EngineUnavailable(
            f"the agent gave up on a call while engine {backend.url} did not answer its health checks{why}"
        )

    async def close(self) -> None:
        """Does nothing: the pool owns the backends, and `BackendPool.release` ends the session's assignment."""

    async def _ask(self, call: Callable[[Backend], Awaitable[ResultT]]) -> ResultT:
        attempt = 1
        while True:
            backend = await self._pool.backend_of(self._assignment)
            try:
                with backend.in_use():
                    return await call(backend)
            except EngineUnavailable:
                if not await self._pool.is_lost(backend) or attempt == _MAX_BACKENDS_PER_CALL:
                    raise
            attempt += 1

    async def _chat(self, backend: Backend, request: EngineRequest) -> EngineReply:
        is_known = backend.weights_known
        fitted, changes = self._fitted(backend, request)
        try:
            with backend.speed.call(is_streamed=False) as timed:
                reply = await backend.engine.chat(fitted)
                timed.sampled(sum(0 if one.sampled_ids is None else len(one.sampled_ids) for one in reply.choices))
        except (EngineRefused, EngineUnavailable) as error:
            await _raise_if_of_template(backend, fitted.call, error)
            raise
        if changes:
            reply = msgspec.structs.replace(reply, metadata=reply.metadata | changes)
        if is_known:
            return reply
        return msgspec.structs.replace(reply, choices=tuple(map(_of_unknown_weights, reply.choices)))

    def _fitted(self, backend: Backend, request: EngineRequest) -> tuple[EngineRequest, dict[str, Any]]:
        """Returns the request with messages that the backend's template accepts, and metadata for the reply."""
        request, span = msgspec.structs.replace(request, session_id=self._assignment.session_id), dict[str, Any]()
        if self._is_traced:
            span[SPAN] = secrets.token_hex(8)
            trace_id, _ = root_span_of(self._assignment.task_id)
            request = msgspec.structs.replace(request, traceparent=f"00-{trace_id:032x}-{span[SPAN]}-01")
        call = request.call
        messages, changes = fit(call.messages, backend.capabilities.template, self.engine_ids)
        if messages is call.messages:
            return request, span
        call = msgspec.structs.replace(call, messages=messages)
        return msgspec.structs.replace(request, call=call), {FITTED: changes, **span} if changes else span

    def _take_moves(self) -> dict[str, Any]:
        moves, self._assignment.moves = self._assignment.moves, []
        return {"backend_replaced": moves} if moves else {}


async def _raise_if_of_template(backend: Backend, call: ModelCall, error: EngineError) -> None:
    """Raises: MessagesRefused when the chat template refused the messages: the engine renders a plain conversation but
    not this one. vLLM and SGLang answer a template's error with 400 or 500, and a client's mistake with 400."""
    if error.details.get("status") not in _OF_TEMPLATES or not backend.capabilities.renders or has_media(call.messages):
        return
    try:
        await backend.engine.render(_PLAIN, (), call.template_kwargs)
    except EngineError:
        return
    try:
        await backend.engine.render(call.messages, call.tools, call.template_kwargs)
    except EngineError as refused:
        if refused.details.get("status") not in _OF_TEMPLATES:
            return
        why = refused.message
    else:
        return
    raise MessagesRefused(
        f"{why}. The model's chat template takes other messages, so neither the agent nor its request is at fault: "
        "serve the model with another template, or use another harness. `gangline harness check HARNESS --tokenizer "
        "DIR` shows which go together.",
        status=400,
    ) from error


def _of_unknown_weights(part: PartT) -> PartT:
    return msgspec.structs.replace(part, weights_known=False)
