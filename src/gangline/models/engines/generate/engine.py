"""The client of an engine's raw generate route (tier T2): ids in, ids and log-probs out.

For servers without a chat route that takes exact ids: vLLM with `--tokens-only`, SGLang behind a router. Prompts are
rendered and replies parsed on this side, so every prompt is exact by construction, and stitching works as with any
engine that takes ids. The tool choice `required` or a named tool is not sent, since the engine would not enforce it.

The route is probed by sampling one token whole, and one streamed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text, ToolDefinition, Usage
from gangline.domain.errors import (
    ContextOverflow,
    EngineError,
    EngineIncapable,
    EngineMalformed,
    EngineRefused,
    EngineUnavailable,
    InvalidRequest,
)
from gangline.domain.evidence.contract import AskedEvidence
from gangline.domain.images import ImageEvidence, images_in
from gangline.domain.reply import TokenLogprob
from gangline.domain.tokens import TokenIds
from gangline.machine.event_loop import call_all
from gangline.models.engines.contract import (
    EngineCapabilities,
    EngineDelta,
    EngineReply,
    EngineRequest,
    ReplyAccumulator,
    whole_deltas,
)
from gangline.models.engines.evidence import WireEvidence
from gangline.models.engines.fields import has_documents, has_media
from gangline.models.engines.generate.text import ReplyReader, TextSide
from gangline.models.engines.generate.wire import GenerateAsk, GenerateRoute, Sampled, SglangGenerate, VllmGenerate
from gangline.models.engines.http import EngineClient, EngineHttp, call_headers, server_version
from gangline.models.engines.replies import ModelCard, decode
from gangline.models.engines.sight import Sight
from gangline.models.engines.templates.probe import probe_template
from gangline.models.engines.vocabulary import vocabulary_size

RouteName = Literal["auto", "vllm", "sglang"]


class _Choice(NamedTuple):
    delta: EngineDelta
    evidence: dict[str, Any]


class _Prompt(NamedTuple):
    ids: TokenIds
    """[T], with each image's placeholder expanded."""
    images: ImageEvidence | None


class GenerateEngine(EngineClient):
    """Implements `Engine` over one server, whose connections it owns."""

    def __init__(
        self,
        http: EngineHttp,
        text: TextSide,
        *,
        route: RouteName = "auto",
        model: str | None = None,
        max_context: int | None = None,
        processor: str | None = None,
    ) -> None:
        """
        route: the kind of generate route; `auto` tries both.
        model: served name. None takes the first listed model.
        max_context: tokens of prompt and reply together; None asks the engine.
        processor: folder of the served vision model; None refuses calls with images.

        Raises: InvalidRequest for an unknown route, and for a folder without an image processor.
        """
        super().__init__(http, model)
        self._sight = Sight(processor)
        if route != "auto" and route not in ROUTES:
            raise InvalidRequest(f"route must be auto, {' or '.join(ROUTES)}; got {route!r}.")
        self._calls = GenerateCalls(http)
        self._text = text
        self._route = None if route == "auto" else ROUTES[route]
        self._max_context = max_context
        self._evidence: WireEvidence | None = None
        """Set by the probe."""

    async def probe(self) -> EngineCapabilities:
        routes = list(ROUTES.values()) if self._route is None else [self._route]
        self._route, found = await probe_route(self._calls, self._text, routes, self._model, self._max_context)
        self._model, self._max_context = found.model, found.max_context
        self._evidence = WireEvidence(found.engine)
        self._capabilities = msgspec.structs.replace(
            found,
            takes_images=self._route.takes_images and self._sight.reader is not None,
            sees_images=self._sight.reader is not None,
            template=msgspec.structs.replace(await probe_template(self), reads_tools=self._text.reads_calls),
        )
        return self._capabilities

    # -- sampling ------------------------------------------------------------------------------------------------

    async def chat(self, request: EngineRequest) -> EngineReply:
        await self.capabilities()
        prompt = await self._prompt(request)
        choices = await call_all([self._choice(request, prompt, at) for at in range(request.call.num_choices)])
        folded = ReplyAccumulator()
        for choice in choices:
            folded.feed(choice.delta)
        reply = folded.reply()
        with_evidence = tuple(
            msgspec.structs.replace(whole, evidence=choice.evidence)
            for whole, choice in zip(reply.choices, choices, strict=True)
        )
        usage = _summed([choice.delta.usage for choice in choices])
        return msgspec.structs.replace(reply, choices=with_evidence, usage=usage)

    async def _choice(self, request: EngineRequest, prompt: _Prompt, index: int) -> _Choice:
        call = request.call
        reader = await self._text.reader(call, prompt.ids, index)
        ask = self._ask(request, prompt, index, stream=False)
        sampled = await self._calls.sample(self._new_route(), ask)
        delta = await self._delta(reader, call, prompt, sampled)
        # Tokens behind a stop string, which was found here, are cut off.
        num_cut = len(sampled.ids) - len(delta.sampled_ids or ())
        evidence = {
            kind.name: kind.without_last(sampled.evidence[kind.name], num_cut)
            for kind, _ in request.evidence
            if kind.name in sampled.evidence
        }
        return _Choice(delta, evidence)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Several choices are returned as one delta each."""
        if request.call.num_choices > 1:
            for delta in whole_deltas(await self.chat(request)):
                yield delta
            return
        await self.capabilities()
        prompt = await self._prompt(request)
        reader = await self._text.reader(request.call, prompt.ids, 0)
        ended = False
        ask = self._ask(request, prompt, 0, stream=True)
        async with aclosing(self._calls.chunks(self._new_route(), ask)) as chunks:
            async for sampled in chunks:
                if ended:
                    yield EngineDelta(usage=sampled.usage)
                    continue
                delta = await self._delta(reader, request.call, prompt, sampled)
                yield delta
                ended = delta.finish_reason is not None
                if delta.stop_reason is not None and sampled.finish_reason is None:
                    return  # a stop string was found; leaving ends the call in the engine

    async def _delta(self, reader: ReplyReader, call: ModelCall, prompt: _Prompt, sampled: Sampled) -> EngineDelta:
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
            images=prompt.images,
            prompt_ids=prompt.ids if sampled.prompt_ids is None else sampled.prompt_ids,
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

    async def _prompt(self, request: EngineRequest) -> _Prompt:
        """Raises: EngineRefused, ContextOverflow."""
        call = request.call
        if has_documents(call.messages):
            raise EngineRefused("a route of ids carries no documents that are not text", status=400)
        if has_media(call.messages) and not (await self.capabilities()).takes_images:
            raise EngineRefused(
                "this route of ids carries no images: vLLM's does, with the model's folder as `processor`", status=400
            )
        ids = request.prompt_ids
        if ids is None:
            ids = await self._text.render(call.messages, call.tools, call.template_kwargs)
        wanted, limit = call.sampling.max_tokens or 1, self._max_context or 0
        if len(ids) + wanted > limit:
            raise ContextOverflow(
                f"This model's maximum context length is {limit} tokens. However, you requested {wanted} output tokens "
                f"and your prompt contains {len(ids)} input tokens. Please reduce the length of one of them."
            )
        evidence = await self._sight.look(call.messages, ids)
        if evidence is not None and evidence.refused is not None:
            raise EngineRefused(f"images cannot go with ids: {evidence.refused}", status=400)
        return _Prompt(ids, evidence)

    def _ask(self, request: EngineRequest, prompt: _Prompt, index: int, *, stream: bool) -> GenerateAsk:
        call, sent_ids = request.call, prompt.ids
        seed = call.sampling.seed
        if prompt.images is not None:
            assert self._sight.reader is not None  # it provided the evidence
            sent_ids = self._sight.reader.collapsed(prompt.ids, prompt.images.placed)
        return GenerateAsk(
            model=self._model or "",
            prompt_ids=sent_ids,
            images=tuple(image.url for image in images_in(call.messages)),
            call=call,
            max_tokens=call.sampling.max_tokens or (self._max_context or 0) - len(prompt.ids),
            stop_ids=self._text.stop_ids,
            stops=() if self._text.stops_here else call.sampling.stop,
            # Choices of one call must differ, and still be reproducible.
            seed=None if seed is None else seed + index,
            stream=stream,
            evidence=request.evidence,
            headers=call_headers(request),
        )

    def _new_route(self) -> GenerateRoute:
        assert self._route is not None  # set by the probe
        return self._route(self._evidence)

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
        return await self._text.detokenize([int(token) for token in ids])


def _summed(usages: Sequence[Usage | None]) -> Usage | None:
    """Total usage of all choices of one prompt."""
    known = [usage for usage in usages if usage is not None]
    if not known or len(known) < len(usages):
        return None
    return msgspec.structs.replace(known[0], num_sampled_tokens=sum(usage.num_sampled_tokens for usage in known))


RouteKind = type[VllmGenerate] | type[SglangGenerate]
ROUTES: dict[str, RouteKind] = {"vllm": VllmGenerate, "sglang": SglangGenerate}

_PROBED = (Message("user", (Text("One word."),)),)
_HOW_TO_START = (
    "Start vLLM 0.32 or newer with --enable-scale-out or --tokens-only, or SGLang 0.5.23 or newer, and reach it "
    "without a router that strips fields."
)


async def probe_route(
    calls: GenerateCalls, text: TextSide, routes: Sequence[RouteKind], model: str | None, max_context: int | None
) -> tuple[RouteKind, EngineCapabilities]:
    """Returns the first of `routes` that answers, and its capabilities.

    Raises: EngineIncapable, naming the missing capability; EngineUnavailable.
    """
    card = await _card(calls.http, model)
    prompt_ids = await text.render(_PROBED)
    await _check_tokenizer(calls.http, text, card.id, prompt_ids)
    ask = _ask(card.id, prompt_ids)
    route, sampled = await _sampled(calls, routes, ask)
    values = _checked(sampled, calls.url)
    limit = max_context or card.max_model_len
    if limit is None:
        raise EngineIncapable(f"engine {calls.url} does not say how long its context is: give `max_context`.")
    raw_or_processed = "processed" if all(abs(value) < 1e-6 for value in values) else "raw"
    return route, EngineCapabilities(
        engine=f"generate_{route.name}",
        version=await server_version(calls.http, "/version", "/server_info", "/get_server_info"),
        model=card.id,
        max_context=limit,
        reports_ids=True,
        takes_prompt_ids=True,
        streams_ids=await _streams(calls, route, ask),
        renders=True,
        logprob_kind=route.logprob_kind or raw_or_processed,
        evidence=await WireEvidence(f"generate_{route.name}").reported(
            sampled.evidence, partial(_reported_apart, calls, route, ask)
        ),
        reports_versions=bool(sampled.version_spans),
        num_ids=text.num_ids or await vocabulary_size(calls.http, card.id),
        prompt_source="rendered",
    )


def _ask(model: str, prompt_ids: TokenIds) -> GenerateAsk:
    """With `top_k = 1` the sampled distribution has one token: its log-prob is 0 if it was processed, else raw."""
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_k=1)
    call = ModelCall(dialect="probe", model=model, messages=_PROBED, sampling=sampling)
    return GenerateAsk(model=model, prompt_ids=prompt_ids, call=call, max_tokens=1, stop_ids=())


async def _card(http: EngineHttp, model: str | None) -> ModelCard:
    """A server of ids may list no models; then the operator's name is used."""
    try:
        return await http.served_model(model)
    except EngineRefused:
        if model is None:
            raise
        return ModelCard(model)


async def _check_tokenizer(http: EngineHttp, text: TextSide, model: str, prompt_ids: TokenIds) -> None:
    """Raises: EngineIncapable when the engine can detokenise and decodes the ids to other text."""
    body = msgspec.json.encode({"model": model, "tokens": prompt_ids.tolist(), "skip_special_tokens": False})
    try:
        answer = decode(await http.post("/detokenize", body), dict[str, Any], http.url)
    except EngineError:
        return
    theirs, ours = answer.get("prompt", answer.get("text")), await text.detokenize(prompt_ids.tolist())
    if isinstance(theirs, str) and theirs != ours:
        raise EngineIncapable(
            f"engine {http.url} has another tokenizer than the one given: it reads {theirs[:80]!r} where this one "
            f"reads "
            f"{ours[:80]!r}."
        )


async def _sampled(calls: GenerateCalls, routes: Sequence[RouteKind], ask: GenerateAsk) -> tuple[RouteKind, Sampled]:
    for route in routes:
        try:
            return route, await calls.sample(route(), ask)
        except EngineRefused as refused:
            if refused.details.get("status") not in (404, 405) or len(routes) == 1:
                raise EngineIncapable(f"{refused.message}. {_HOW_TO_START}") from refused
    raise EngineIncapable(f"engine {calls.url} has no generate route. {_HOW_TO_START}")


def _checked(sampled: Sampled, url: str) -> list[float]:
    """Returns the log-probs. Raises: EngineIncapable."""
    if not sampled.ids:
        raise EngineIncapable(f"engine {url} returned no token ids. {_HOW_TO_START}")
    if sampled.logprobs is None or len(sampled.logprobs) != len(sampled.ids):
        raise EngineIncapable(f"engine {url} returned no log-prob for each token. {_HOW_TO_START}")
    return sampled.logprobs


async def _streams(calls: GenerateCalls, route: RouteKind, ask: GenerateAsk) -> bool:
    num_ids = num_logprobs = 0
    ended = False
    try:
        async with aclosing(calls.chunks(route(), msgspec.structs.replace(ask, stream=True))) as chunks:
            async for sampled in chunks:
                num_ids += len(sampled.ids)
                num_logprobs += len(sampled.logprobs or ())
                ended = ended or sampled.finish_reason is not None
    except (EngineRefused, EngineUnavailable):
        return False
    return ended and 0 < num_ids == num_logprobs


async def _reported_apart(
    calls: GenerateCalls, route: RouteKind, ask: GenerateAsk, asked: AskedEvidence
) -> list[dict[str, Any]]:
    return [(await calls.sample(route(), msgspec.structs.replace(ask, evidence=(asked,)))).evidence]


class GenerateCalls:
    """All methods may raise EngineUnavailable, EngineRefused, ContextOverflow."""

    def __init__(self, http: EngineHttp) -> None:
        self.http = http
        self.url = http.url

    async def sample(self, route: GenerateRoute, ask: GenerateAsk) -> Sampled:
        sampled = route.read(await self.http.post(route.path, route.body(ask), ask.headers), self.url)
        if sampled is None or sampled.finish_reason is None:
            raise EngineMalformed(f"engine {self.url} answered without a finish reason")
        return sampled

    async def chunks(self, route: GenerateRoute, ask: GenerateAsk) -> AsyncGenerator[Sampled, None]:
        """Closing it early cancels the call in the engine."""
        async with aclosing(self.http.events(route.path, route.body(ask), ask.headers)) as reads:
            async for events in reads:
                for data in events:
                    sampled = route.read(data, self.url)
                    if sampled is not None:
                        yield sampled
