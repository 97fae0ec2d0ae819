"""Google generateContent and countTokens: the request body -> the canonical call.

Fields that would change the reply and cannot be carried are rejected with 400; fields without meaning here (safety
settings, thinking budgets, hosted tools, unknown fields) are named in `ModelCall.dropped`.

Source: Gemini API reference, v1beta, models.generateContent and models.countTokens.
"""

from __future__ import annotations

from typing import Any

from gangline.domain.conversation import ModelCall, SamplingParams, ThinkingWish
from gangline.domain.errors import InvalidRequest
from gangline.wire.dialects.bodies import DeclaredFields, wish_of_effort
from gangline.wire.dialects.contract import RawRequest
from gangline.wire.dialects.google.contents import ContentReader
from gangline.wire.dialects.google.fields import Fields, decode_body, invalid
from gangline.wire.dialects.google.schema import json_schema
from gangline.wire.dialects.google.tools import read_tool_choice, read_tools

MAX_CHOICES = 8

_UNSET: tuple[Any, ...] = (None, "", [], {}, False)
_ONLY_TEXT = "only text is read and generated"
GOOGLE_FIELDS = DeclaredFields(
    served=frozenset({"contents", "generationConfig", "model", "systemInstruction", "toolConfig", "tools"}),
    refused={"cachedContent": _UNSET, "continuationToken": _UNSET},
    dropped={
        "labels": "they label the bill",
        "safetySettings": "the reply is not moderated",
        "serviceTier": "it says who pays",
        "store": "it says what the provider logs",
    },
)
GOOGLE_CONFIG_FIELDS = DeclaredFields(
    served=frozenset(
        {
            "_responseJsonSchema",
            "candidateCount",
            "frequencyPenalty",
            "logprobs",
            "maxOutputTokens",
            "presencePenalty",
            "responseJsonSchema",
            "responseLogprobs",
            "responseMimeType",
            "responseModalities",
            "responseSchema",
            "seed",
            "stopSequences",
            "temperature",
            "thinkingConfig",
            "topK",
            "topP",
        }
    ),
    refused=dict.fromkeys(("enableAffectiveDialog", "imageConfig", "responseFormat", "translationConfig"), _UNSET),
    dropped={
        "audioTimestamp": _ONLY_TEXT,
        "audioTranscriptionConfig": _ONLY_TEXT,
        "enableEnhancedCivicAnswers": "only the provider's models know it",
        "mediaResolution": "the engine decides how it reads images",
        "modelSelectionConfig": "the session has one model",
        "routingConfig": "the session has one model",
        "speechConfig": _ONLY_TEXT,
    },
)
"""Fields of `generationConfig`."""


def parse_google_call(request: RawRequest) -> ModelCall:
    """Raises: InvalidRequest; its details name the field as `param`."""
    streams = request.params.get("method") == "streamGenerateContent"
    as_array = streams and request.query.get("alt") != "sse"
    try:
        return _call(Fields(decode_body(request.body)), request, streams=streams, as_array=as_array)
    except RecursionError:
        raise InvalidRequest("Invalid JSON payload received. It is nested too deeply.") from None


def parse_google_count(request: RawRequest) -> ModelCall:
    """Raises: InvalidRequest; its details name the field as `param`."""
    try:
        body = Fields(decode_body(request.body))
        inner = body.object("generateContentRequest")
        if inner is not None:
            inner.take("model")
        return _call(inner or body, request)
    except RecursionError:
        raise InvalidRequest("Invalid JSON payload received. It is nested too deeply.") from None


def _call(body: Fields, request: RawRequest, *, streams: bool = False, as_array: bool = False) -> ModelCall:
    body.take("model")  # it is in the path
    _refuse(body, GOOGLE_FIELDS)
    reader = _contents(body)
    tools, hosted = read_tools(body)
    config = body.object("generationConfig") or Fields({}, "generationConfig")
    _refuse(config, GOOGLE_CONFIG_FIELDS)
    allowed, choice, choice_dropped = read_tool_choice(body, tools)
    shows_thoughts, thinking, thinking_dropped = _thinking(config)
    sampling, num_choices, num_top_logprobs = _sampling(config), _num_choices(config), _num_top_logprobs(config)
    response_format = _response_format(config)
    dropped = [*reader.dropped, *hosted, *choice_dropped, *thinking_dropped, *config.left(), *body.left()]
    return ModelCall(
        dialect="google",
        model=request.params.get("model", ""),
        messages=tuple(reader.messages),
        tools=allowed,
        tool_choice=choice,
        sampling=sampling,
        num_choices=num_choices,
        stream=streams,
        include_usage=True,
        num_top_logprobs=num_top_logprobs,
        response_format=response_format,
        thinking=thinking,
        dropped=tuple(sorted(dropped)),
        undeclared=body.unread(GOOGLE_FIELDS) | config.unread(GOOGLE_CONFIG_FIELDS),
        echo={"thoughts": shows_thoughts, "array": as_array},
    )


def _refuse(fields: Fields, declared: DeclaredFields) -> None:
    for name in declared.refused:
        if declared.refuses(name, fields.take(name)):
            raise invalid(fields.at(name), "It is not supported here; leave it out.")


def _contents(body: Fields) -> ContentReader:
    reader = ContentReader()
    system = body.take("systemInstruction")
    if system is not None:
        reader.add_system(system, "systemInstruction")
    contents = body.items("contents")
    if not contents:
        raise invalid("contents", "contents is not specified.")
    for content, where in contents:
        reader.add(content, where)
    return reader


def _sampling(config: Fields) -> SamplingParams:
    max_tokens = config.integer("maxOutputTokens")
    if max_tokens is not None and max_tokens < 0:
        raise invalid(config.at("maxOutputTokens"), "It must be positive.")
    return SamplingParams(
        max_tokens=max_tokens or None,  # 0 is "not set" in proto3
        temperature=config.number("temperature"),
        top_p=config.number("topP"),
        top_k=config.integer("topK"),
        seed=config.integer("seed"),
        stop=config.texts("stopSequences"),
        presence_penalty=config.number("presencePenalty"),
        frequency_penalty=config.number("frequencyPenalty"),
    )


def _num_choices(config: Fields) -> int:
    count = config.integer("candidateCount")
    if count is not None and not 0 <= count <= MAX_CHOICES:
        raise invalid(config.at("candidateCount"), f"It must be between 1 and {MAX_CHOICES}, got {count}.")
    return count or 1


def _num_top_logprobs(config: Fields) -> int | None:
    if not config.flag("responseLogprobs"):
        return None
    count = config.integer("logprobs") or 0
    if not 0 <= count <= 20:
        raise invalid(config.at("logprobs"), f"It must be between 0 and 20, got {count}.")
    return count


def _thinking(config: Fields) -> tuple[bool, ThinkingWish, list[str]]:
    """Returns whether to show thoughts to the client, its thinking wish, and the dropped fields. For a budget only 0 is
    distinguished: -1 lets the model decide how much it thinks.
    """
    thinking = config.object("thinkingConfig")
    if thinking is None:
        return False, ThinkingWish(), []
    shows = thinking.flag("includeThoughts")
    wish = wish_of_effort(thinking.text("thinkingLevel"))
    budget = thinking.integer("thinkingBudget")
    if budget is not None:
        wish = ThinkingWish(is_on=False) if budget == 0 else ThinkingWish(is_on=True, effort=wish.effort)
    dropped = [] if budget in (None, 0, -1) else [thinking.at("thinkingBudget")]
    return shows, wish, [*dropped, *thinking.left()]


def _response_format(config: Fields) -> dict[str, Any] | None:
    modalities = {modality.upper() for modality in config.texts("responseModalities")}
    if modalities - {"TEXT", "MODALITY_UNSPECIFIED"}:
        raise invalid(config.at("responseModalities"), "Only TEXT is generated here.")
    schema = _response_schema(config)
    match config.text("responseMimeType") or "text/plain":
        case "text/plain" if schema is None:
            return None
        case "application/json" if schema is None:
            return {"type": "json_object"}
        case "application/json":
            return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema, "strict": True}}
        case "text/plain":
            raise invalid(config.at("responseMimeType"), "A response schema needs the MIME type application/json.")
        case kind:
            raise invalid(config.at("responseMimeType"), f"{kind!r} is not supported; use application/json.")


def _response_schema(config: Fields) -> dict[str, Any] | None:
    for name in ("responseJsonSchema", "_responseJsonSchema"):
        schema = config.raw_object(name)
        if schema is not None:
            return schema
    schema = config.take("responseSchema")
    return None if schema is None else json_schema(schema, config.at("responseSchema"))
