"""OpenAI Chat: the request body -> the canonical call.

Fields that would change the meaning of the call (audio, legacy functions, biases) are rejected with 400. Fields without
meaning here, and tools that run at the provider, are named in `ModelCall.dropped`.

Source: OpenAI API reference, chat completions; vLLM's additions `top_k`, `chat_template_kwargs`; other providers'
fields for thinking.

Also parses the parts of a message's content: text, refusals, images, files.
"""

from __future__ import annotations

import mimetypes
import re
from typing import Any, cast

import msgspec

from gangline.domain.conversation import (
    Document,
    Image,
    Message,
    ModelCall,
    Part,
    Role,
    SamplingParams,
    Text,
    Thinking,
    ThinkingWish,
    ToolCall,
    ToolResult,
)
from gangline.domain.errors import InvalidRequest
from gangline.domain.task_values import why_not_an_argument
from gangline.wire.dialects.bodies import THINKING_KINDS, DeclaredFields, decoded, role_in, wish_of_effort
from gangline.wire.dialects.chat.tools import ChatTool, read_allowed, read_tool_choice, read_tools, shimmed

MAX_CHOICES = 128

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"required field `(\w+)`")


def content_parts(
    content: str | list[dict[str, Any]] | None, where: str, *, may_hold_media: bool
) -> tuple[Text | Image | Document, ...]:
    """Raises: InvalidRequest."""
    if content is None:
        return ()
    if isinstance(content, str):
        return (Text(content),)
    return tuple(_part(part, f"{where}.content[{i}]", may_hold_media) for i, part in enumerate(content))


def _part(part: dict[str, Any], where: str, may_hold_media: bool) -> Text | Image | Document:
    kind = part.get("type")
    match kind:
        case "text":
            return Text(_string(part, "text", where))
        case "refusal":
            return Text(_string(part, "refusal", where))
        case "image_url" if may_hold_media:
            image = _record(part, "image_url", where)
            detail = image.get("detail")
            url = _url(_string(image, "url", f"{where}.image_url"), f"{where}.image_url.url")
            return Image(url, detail if isinstance(detail, str) else None)
        case "file" if may_hold_media:
            return _document(_record(part, "file", where), f"{where}.file")
        case _:
            raise InvalidRequest(f"{where} is of type {kind!r}, which is not supported here.", param=where)


def _document(file: dict[str, Any], where: str) -> Document:
    if "file_data" not in file:
        raise InvalidRequest(f"{where}.file_data is missing: there is no store of files here.", param=where)
    data, name = _string(file, "file_data", where), file.get("filename")
    name = name if isinstance(name, str) else None
    if not data.startswith("data:"):  # bare base64
        data = f"data:{mimetypes.guess_type(name or '')[0] or 'application/octet-stream'};base64,{data}"
    return Document(_url(data, f"{where}.file_data"), name)


def _record(part: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = part.get(name)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}.{name} must be an object.", param=f"{where}.{name}")
    return cast("dict[str, Any]", value)


def _string(part: dict[str, Any], name: str, where: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    return value


def _url(url: str, where: str) -> str:
    if url.startswith(("https://", "http://")) or (url.startswith("data:") and ";base64," in url[:200]):
        return url
    raise InvalidRequest(f"{where}: expected a URL, or data:MEDIA_TYPE;base64,DATA.", param=where)


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Custom(msgspec.Struct):
    name: str
    input: str = ""


class _ToolCall(msgspec.Struct):
    function: _Function | None = None
    custom: _Custom | None = None
    id: str = ""
    type: str = "function"


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Thinking(msgspec.Struct):
    type: str | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    enabled: bool | None = None


class _Body(msgspec.Struct):
    model: str
    messages: list[_Message]
    tools: list[ChatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None
    """In vLLM's API."""
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    """In Qwen's API."""
    thinking: _Thinking | bool | None = None
    """In DeepSeek's, GLM's and Kimi's APIs."""
    reasoning: _Reasoning | None = None
    """In the APIs of model routers."""
    reasoning_effort: str | None = None
    metadata: dict[str, Any] | None = None


class _KnownBody(_Body, forbid_unknown_fields=True):
    """A body without fields to reject or drop."""


_CACHING = "prefixes are cached by the engine itself"
_ABOUT_THE_USER = "it names a user to the provider"
CHAT_FIELDS = DeclaredFields(
    served=frozenset(_Body.__struct_fields__),
    refused={
        "audio": (None,),
        "function_call": (None, "none", "auto"),
        "functions": (None, []),
        "logit_bias": (None, {}),
        "min_p": (None, 0),
        "modalities": (None, [], ["text"]),
        "repetition_penalty": (None, 1),
        "web_search_options": (None,),
    },
    dropped={
        "moderation": "the reply is not moderated",
        "prediction": "it makes the same reply come faster",
        "prompt_cache_key": _CACHING,
        "prompt_cache_options": _CACHING,
        "prompt_cache_retention": _CACHING,
        "safety_identifier": _ABOUT_THE_USER,
        "service_tier": "it says who pays",
        "store": "replies cannot be fetched later: that is answered with 404",
        "user": _ABOUT_THE_USER,
        "verbosity": "no chat template knows it",
    },
)


def parse_chat_call(body: bytes) -> ModelCall:
    """Raises: InvalidRequest; its details name the field as `param`."""
    request, unread = _read(body)
    tools, left_out = read_tools(request.tools or [])
    allowed = read_allowed(request.tool_choice, tools)
    tools, choice = allowed or (tools, read_tool_choice(request.tool_choice, tools))
    if not request.messages:
        raise InvalidRequest("messages must not be empty.", param="messages")
    return ModelCall(
        dialect="openai_chat",
        model=request.model,
        messages=tuple(_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        sampling=_sampling(request),
        num_choices=_num_choices(request.n),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        num_top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        wants_token_ids=bool(request.return_token_ids),
        response_format=request.response_format,
        template_kwargs=_template_kwargs(request),
        thinking=_thinking(request),
        agent_role=role_in(request.metadata),
        dropped=(*sorted(unread), *left_out),
        undeclared={name: bytes(unread[name]).decode() for name in CHAT_FIELDS.undeclared(unread)},
    )


_OF_TOKENIZE: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "add_special_tokens": (None, False),
    "continue_final_message": (None, False),
    "return_token_strs": (None, False),
}
"""vLLM's fields -> values that have no effect here."""


def parse_tokenize(body: bytes) -> ModelCall:
    """The conversation whose prompt is requested, in the form of vLLM's `/tokenize`. Raises: InvalidRequest."""
    fields: dict[str, Any] = decoded(body, dict[str, Any], _invalid)
    if "messages" not in fields:
        raise InvalidRequest(
            "messages: the route tells the tokens of a conversation, as the engine renders it; bare text (`prompt`) "
            "has none here.",
            param="prompt" if "prompt" in fields else "messages",
        )
    for name, neutral in _OF_TOKENIZE.items():
        if fields.pop(name, None) not in neutral:
            raise InvalidRequest(f"{name!r} is not supported here; leave it out.", param=name)
    return parse_chat_call(msgspec.json.encode({"model": ""} | fields))


def _read(body: bytes) -> tuple[_Body, dict[str, msgspec.Raw]]:
    """The body, and its fields without meaning here. Raises: InvalidRequest."""
    try:
        return msgspec.json.decode(body, type=_KnownBody), {}  # one pass, for nearly all there are
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        fields: dict[str, msgspec.Raw] = decoded(body, dict[str, msgspec.Raw], _invalid)
    _refuse_what_cannot_be_carried(fields)
    read = CHAT_FIELDS.served | CHAT_FIELDS.refused.keys()
    return decoded(body, _Body, _invalid), {name: value for name, value in fields.items() if name not in read}


def _invalid(error: msgspec.ValidationError) -> InvalidRequest:
    text = str(error)
    path = _PATH.search(text)
    missing = _MISSING.search(text)
    where = path.group(1) if path else ""
    if missing:
        where = f"{where}.{missing.group(1)}" if where else missing.group(1)
    reason = text[: path.start()] if path else text
    return InvalidRequest(f"{where or 'body'}: {reason}.", param=where or None)


def _refuse_what_cannot_be_carried(fields: dict[str, msgspec.Raw]) -> None:
    for name in CHAT_FIELDS.refused.keys() & fields.keys():
        if CHAT_FIELDS.refuses(name, decoded(fields[name], Any, _invalid)):
            raise InvalidRequest(f"{name!r} is not supported here; leave it out.", param=name)


def _message(message: _Message, where: str) -> Message:
    if message.audio is not None or message.function_call is not None:
        raise InvalidRequest(
            f"{where}: audio and function_call are not supported; use text and tool_calls.", param=where
        )
    pieces = content_parts(message.content, where, may_hold_media=message.role in ("user", "tool"))
    match message.role:
        case "system" | "developer" | "user":
            return Message(cast("Role", message.role), pieces, message.name)
        case "assistant":
            return Message("assistant", _assistant_parts(message, pieces, where), message.name)
        case "tool":
            if message.tool_call_id is None:
                raise InvalidRequest(f"{where}.tool_call_id is missing.", param=f"{where}.tool_call_id")
            return Message("tool", (ToolResult(message.tool_call_id, pieces),), message.name)
        case _:
            known = "system, developer, user, assistant, tool"
            raise InvalidRequest(f"{where}.role {message.role!r} is none of {known}.", param=f"{where}.role")


def _assistant_parts(message: _Message, pieces: tuple[Text | Image | Document, ...], where: str) -> tuple[Part, ...]:
    thought = message.reasoning_content or message.reasoning
    parts: list[Part] = [Thinking(thought)] if thought else []
    parts += [piece for piece in pieces if isinstance(piece, Text) and piece.text]
    parts += [Text(message.refusal)] if message.refusal else []
    parts += [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
    return tuple(parts)


def _tool_call(call: _ToolCall, where: str) -> ToolCall:
    if call.type == "function" and call.function is not None:
        return ToolCall(call.id, call.function.name, _arguments(call.function.arguments))
    if call.type == "custom" and call.custom is not None:
        return ToolCall(call.id, call.custom.name, shimmed(call.custom.input))
    raise InvalidRequest(f"{where} of type {call.type!r} is neither a function call nor a custom one.", param=where)


def _arguments(arguments: str | dict[str, Any] | None) -> str:
    if isinstance(arguments, dict):
        return msgspec.json.encode(arguments).decode()
    return arguments or ""


def _sampling(request: _Body) -> SamplingParams:
    both = (request.max_completion_tokens, request.max_tokens)
    return SamplingParams(
        max_tokens=both[1] if both[0] is None else both[0],
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
    )


def _template_kwargs(request: _Body) -> dict[str, Any]:
    """Raises: InvalidRequest for an argument that would replace a part of the call."""
    arguments = request.chat_template_kwargs
    if not arguments:
        return {}
    if (why := why_not_an_argument(arguments)) is not None:
        raise InvalidRequest(f"chat_template_kwargs: {why}.", param="chat_template_kwargs")
    return arguments


def _thinking(request: _Body) -> ThinkingWish:
    reasoning = request.reasoning or _Reasoning()
    wish = wish_of_effort(request.reasoning_effort or reasoning.effort)
    kind = request.thinking
    kind = THINKING_KINDS.get(kind.type or "") if isinstance(kind, _Thinking) else kind
    switches = (request.enable_thinking, kind, reasoning.enabled, wish.is_on)
    is_on = next((switch for switch in switches if switch is not None), None)
    return ThinkingWish(is_on=is_on, effort=None if is_on is False else wish.effort)


def _num_choices(n: int | None) -> int:
    if n is not None and not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}, got {n}.", param="n")
    return n or 1
