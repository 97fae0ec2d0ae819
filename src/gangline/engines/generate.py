"""The client of an engine's raw generate route (tier T2): ids in, ids and log-probs out.

For servers that have no chat route, or none that takes exact ids: vLLM with `--tokens-only`, SGLang behind a router.
Prompts are rendered and replies are read on this side, so every prompt is exact by construction, and stitching works as
with any engine that takes ids. Tool choices `required` and a named one are told to nobody: nothing enforces them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text, ToolDefinition, Usage
from gangline.domain.errors import (
    ContextOverflow,
    EngineError,
    EngineIncapable,
    EngineRefused,
    EngineUnavailable,
    InvalidRequest,
)
from gangline.domain.reply import TokenLogprob
from gangline.domain.tokens import TokenIds
from gangline.engines.chat_fields import has_media
from gangline.engines.chat_replies import ModelCard, SseLines, decode
from gangline.engines.contract import (
    EngineCapabilities,
    EngineDelta,
    EngineReply,
    EngineRequest,
    ReplyAccumulator,
    whole_deltas,
)
from gangline.engines.generate_text import ReplyReader, TextSide
from gangline.engines.generate_wire import GenerateAsk, GenerateRoute, Sampled, SglangGenerate, VllmGenerate
from gangline.engines.http import EngineHttp
from gangline.engines.serving.generation import call_all
from gangline.engines.template_probe import probe_template

__all__ = ["GenerateEngine", "RouteName"]

RouteName = Literal["auto", "vllm", "sglang"]

_ROUTES: dict[str, type[VllmGenerate] | type[SglangGenerate]] = {"vllm": VllmGenerate, "sglang": SglangGenerate}
_PROBED = (Message("user", (Text("One word."),)),)
_HOW_TO_START = (
    "Start vLLM 0.32 or newer with --enable-scale-out or --tokens-only, or SGLang 0.5.23 or newer, and reach it "
    "without a router that strips fields."
)


class GenerateEngine:
    """Implements `Engine` over one server, whose connections it owns."""

    def __init__(
        self,
        http: EngineHttp,
        text: TextSide,
        *,
        route: RouteName = "auto",
        model: str | None = None,
        max_context: int | None = None,
    ) -> None:
        """
        route: whose generate route the server has; `auto` tries both.
        model: served name; None takes the first that the engine lists.
        max_context: tokens of prompt and reply together; None asks the engine.

        Raises: InvalidRequest for an unknown route.
        """
        if route != "auto" and route not in _ROUTES:
            raise InvalidRequest(f"route must be auto, {' or '.join(_ROUTES)}; got {route!r}.")
        self._http = http
        self.url = http.url
        self._text = text
        self._route = None if route == "auto" else _ROUTES[route]
        self._model = model
        self._max_context = max_context
        self._capabilities: EngineCapabilities | None = None
        self._probing = asyncio.Lock()

    # -- probing -------------------------------------------------------------------------------------------------

    async def capabilities(self) -> EngineCapabilities:
        async with self._probing:
            return self._capabilities or await self.probe()

    async def probe(self) -> EngineCapabilities:
        card = await self._card()
        prompt_ids = await self._text.render(_PROBED, (), None, True)
        await self._check_tokenizer(prompt_ids)
        route, sampled = await self._probe_route(card.id, prompt_ids)
        values = _checked(sampled, self.url)
        self._route, self._model = route, card.id
        self._max_context = self._max_context or card.max_model_len
        if self._max_context is None:
            raise EngineIncapable(f"engine {self.url} does not say how long its context is: give `max_context`.")
        raw_or_processed = "processed" if all(abs(value) < 1e-6 for value in values) else "raw"
        self._capabilities = EngineCapabilities(
            engine=f"generate_{route.name}",
            version=await self._version(),
            model=card.id,
            max_context=self._max_context,
            reports_ids=True,
            takes_prompt_ids=True,
            streams_ids=await self._probe_stream(route, _probe_ask(card.id, prompt_ids)),
            renders=True,
            logprob_kind=route.logprob_kind or raw_or_processed,
            reports_versions=bool(sampled.version_spans),
            prompt_source="rendered",
            template=await probe_template(self),
        )
        return self._capabilities

    async def _card(self) -> ModelCard:
        """A server of ids alone may list no models: then the operator's name stands."""
        try:
            return await self._http.served_model(self._model)
        except EngineRefused:
            if self._model is None:
                raise
            return ModelCard(self._model)

    async def _check_tokenizer(self, prompt_ids: TokenIds) -> None:
        """Raises: EngineIncapable when the engine, where it can be asked, reads other text out of the ids."""
        body = msgspec.json.encode({"model": self._model, "tokens": prompt_ids.tolist(), "skip_special_tokens": False})
        try:
            answer = decode(await self._http.post("/detokenize", body), dict[str, Any], self.url)
        except EngineError:
            return
        said, ours = answer.get("prompt", answer.get("text")), await self._text.decode(prompt_ids.tolist())
        if isinstance(said, str) and said != ours:
            raise EngineIncapable(
                f"engine {self.url} has another tokenizer than the one given: it reads {said[:80]!r} where this one "
                f"reads {ours[:80]!r}."
            )

    async def _probe_route(
        self, model: str, prompt_ids: TokenIds
    ) -> tuple[type[VllmGenerate] | type[SglangGenerate], Sampled]:
        """One token. Raises: EngineIncapable when no route answers; its own refusal where only one is tried."""
        routes = list(_ROUTES.values()) if self._route is None else [self._route]
        for route in routes:
            try:
                return route, await self._sample(route(), _probe_ask(model, prompt_ids))
            except EngineRefused as refused:
                if refused.details.get("status") not in (404, 405) or len(routes) == 1:
                    raise EngineIncapable(f"{refused.message}. {_HOW_TO_START}") from refused
        raise EngineIncapable(f"engine {self.url} has no generate route. {_HOW_TO_START}")

    async def _probe_stream(self, route: type[GenerateRoute], ask: GenerateAsk) -> bool:
        num_ids = num_logprobs = 0
        ended = False
        try:
            async with aclosing(self._chunks(route(), msgspec.structs.replace(ask, stream=True))) as chunks:
                async for sampled in chunks:
                    num_ids += len(sampled.ids)
                    num_logprobs += len(sampled.logprobs or ())
                    ended = ended or sampled.finish_reason is not None
        except (EngineRefused, EngineUnavailable):
            return False
        return ended and 0 < num_ids == num_logprobs

    async def _version(self) -> str:
        for path in ("/version", "/server_info", "/get_server_info"):
            try:
                return str(decode(await self._http.get(path), dict[str, Any], self.url).get("version", ""))
            except EngineError:
                continue
        return ""

    # -- sampling ------------------------------------------------------------------------------------------------

    async def chat(self, request: EngineRequest) -> EngineReply:
        await self.capabilities()
        prompt_ids = await self._prompt_ids(request)
        choices = range(request.call.num_choices)
        deltas = await call_all([self._choice(request.call, prompt_ids, index) for index in choices])
        folded = ReplyAccumulator()
        for delta in deltas:
            folded.feed(delta)
        return msgspec.structs.replace(folded.reply(), usage=_summed([delta.usage for delta in deltas]))

    async def _choice(self, call: ModelCall, prompt_ids: TokenIds, index: int) -> EngineDelta:
        reader = await self._text.reader(call, prompt_ids, index)
        sampled = await self._sample(self._new_route(), self._ask(call, prompt_ids, index, stream=False))
        return await self._delta(reader, call, prompt_ids, sampled)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Several choices come as one delta each."""
        if request.call.num_choices > 1:
            for delta in whole_deltas(await self.chat(request)):
                yield delta
            return
        await self.capabilities()
        prompt_ids = await self._prompt_ids(request)
        reader = await self._text.reader(request.call, prompt_ids, 0)
        ended = False
        ask = self._ask(request.call, prompt_ids, 0, stream=True)
        async with aclosing(self._chunks(self._new_route(), ask)) as chunks:
            async for sampled in chunks:
                if ended:
                    yield EngineDelta(usage=sampled.usage)
                    continue
                delta = await self._delta(reader, request.call, prompt_ids, sampled)
                yield delta
                ended = delta.finish_reason is not None
                if delta.stop_reason is not None and sampled.finish_reason is None:
                    return  # a stop string was found here; leaving ends the call in the engine

    async def _delta(self, reader: ReplyReader, call: ModelCall, prompt_ids: TokenIds, sampled: Sampled) -> EngineDelta:
        read = await reader.feed(sampled.ids, sampled.finish_reason)
        kept = read.num_kept
        shown = read.shown
        if call.num_top_logprobs is not None:
            shown = msgspec.structs.replace(shown, logprobs=self._shown_logprobs(call, sampled, kept))
        return EngineDelta(
            shown=shown,
            sampled_ids=sampled.ids[:kept],
            logprobs=None if sampled.logprobs is None else sampled.logprobs[:kept],
            version_spans=sampled.version_spans if kept == len(sampled.ids) else (),
            finish_reason=read.finish_reason,
            stop_reason=read.stop_reason or sampled.stop_string,
            parse=read.parse,
            prompt_ids=prompt_ids if sampled.prompt_ids is None else sampled.prompt_ids,
            usage=sampled.usage if kept == len(sampled.ids) else None,
        )

    def _shown_logprobs(self, call: ModelCall, sampled: Sampled, kept: int) -> tuple[TokenLogprob, ...]:
        num_top = call.num_top_logprobs or 0
        values = sampled.logprobs or []
        tops = sampled.candidates or [[] for _ in values]
        entries = list(zip(sampled.ids, values, tops, strict=False))[:kept]
        return tuple(
            self._shown_logprob(token, value, tuple(self._shown_logprob(*top) for top in candidates[:num_top]))
            for token, value, candidates in entries
        )

    def _shown_logprob(self, token: int, value: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        text = self._text.token_text(token)
        return TokenLogprob(text, value if value > -9999.0 else -9999.0, tuple(text.encode()), top)

    async def _prompt_ids(self, request: EngineRequest) -> TokenIds:
        """Raises: EngineRefused, ContextOverflow."""
        call = request.call
        if has_media(call.messages):
            raise EngineRefused("a route of ids carries no images and no documents that are not text", status=400)
        ids = request.prompt_ids
        if ids is None:
            ids = await self._text.render(call.messages, call.tools, call.template_kwargs, True)
        wanted, limit = call.sampling.max_tokens or 1, self._max_context or 0
        if len(ids) + wanted > limit:
            raise ContextOverflow(
                f"This model's maximum context length is {limit} tokens. However, you requested {wanted} output tokens "
                f"and your prompt contains {len(ids)} input tokens. Please reduce the length of one of them."
            )
        return ids

    def _ask(self, call: ModelCall, prompt_ids: TokenIds, index: int, *, stream: bool) -> GenerateAsk:
        seed = call.sampling.seed
        return GenerateAsk(
            model=self._model or "",
            prompt_ids=prompt_ids,
            call=call,
            max_tokens=call.sampling.max_tokens or (self._max_context or 0) - len(prompt_ids),
            stop_ids=self._text.stop_ids,
            stops=() if self._text.stops_here else call.sampling.stop,
            # Choices of one call must differ, and still be reproducible.
            seed=None if seed is None else seed + index,
            stream=stream,
        )

    def _new_route(self) -> GenerateRoute:
        assert self._route is not None  # since the probe
        return self._route()

    async def _sample(self, route: GenerateRoute, ask: GenerateAsk) -> Sampled:
        sampled = route.read(await self._http.post(route.path, route.body(ask)), self.url)
        if sampled is None or sampled.finish_reason is None:
            raise EngineUnavailable(f"engine {self.url} answered without a finish reason")
        return sampled

    async def _chunks(self, route: GenerateRoute, ask: GenerateAsk) -> AsyncGenerator[Sampled, None]:
        """Raises: EngineUnavailable when the stream ends before it is done."""
        events = SseLines()
        async with self._http.request("POST", route.path, route.body(ask)) as response:
            async for piece in response.pieces():
                for data in events.feed(piece):
                    if data == b"[DONE]":
                        return
                    sampled = route.read(data, self.url)
                    if sampled is not None:
                        yield sampled
        raise EngineUnavailable(f"engine {self.url} ended its stream before it was done")

    # -- the rest ------------------------------------------------------------------------------------------------

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        return await self._text.render(messages, tools, template_kwargs, add_generation_prompt)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return await self._text.decode([int(token) for token in ids])

    async def check_health(self, timeout_s: float) -> None:
        await self._http.check_health(timeout_s)

    async def close(self) -> None:
        await self._http.close()


def _probe_ask(model: str, prompt_ids: TokenIds) -> GenerateAsk:
    """With `top_k = 1` the sampled distribution has one token: its log-prob is 0 if it was processed, else raw."""
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_k=1)
    call = ModelCall(dialect="probe", model=model, messages=_PROBED, sampling=sampling)
    return GenerateAsk(model=model, prompt_ids=prompt_ids, call=call, max_tokens=1, stop_ids=())


def _checked(sampled: Sampled, url: str) -> list[float]:
    """The log-probs of a probe. Raises: EngineIncapable."""
    if not sampled.ids:
        raise EngineIncapable(f"engine {url} returned no token ids. {_HOW_TO_START}")
    if sampled.logprobs is None or len(sampled.logprobs) != len(sampled.ids):
        raise EngineIncapable(f"engine {url} returned no log-prob for each token. {_HOW_TO_START}")
    return sampled.logprobs


def _summed(usages: Sequence[Usage | None]) -> Usage | None:
    """Of all choices of one prompt."""
    known = [usage for usage in usages if usage is not None]
    if not known or len(known) < len(usages):
        return None
    return msgspec.structs.replace(known[0], num_sampled_tokens=sum(usage.num_sampled_tokens for usage in known))
