"""Probes a generate route by sampling one token whole, and one streamed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text
from gangline.domain.errors import EngineError, EngineIncapable, EngineRefused, EngineUnavailable
from gangline.domain.evidence.contract import AskedEvidence
from gangline.domain.tokens import TokenIds
from gangline.models.engines.contract import EngineCapabilities
from gangline.models.engines.evidence import WireEvidence
from gangline.models.engines.generate.calls import GenerateCalls
from gangline.models.engines.generate.text import TextSide
from gangline.models.engines.generate.wire import GenerateAsk, Sampled, SglangGenerate, VllmGenerate
from gangline.models.engines.http import EngineHttp, server_version
from gangline.models.engines.replies import ModelCard, decode
from gangline.models.engines.vocabulary import vocabulary_size

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
    prompt_ids = await text.render(_PROBED, (), None, True)
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
    theirs, ours = answer.get("prompt", answer.get("text")), await text.decode(prompt_ids.tolist())
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
