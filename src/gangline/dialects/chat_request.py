"""OpenAI Chat: the request body -> the canonical call.

Strict about what would change the meaning of the call (images, legacy functions, biases: 400), forgiving about fields
that mean nothing here: those are named in `ModelCall.dropped`.

Source: OpenAI API reference, chat completions; vLLM's additions `top_k`, `chat_template_kwargs`.
"""

from __future__ import annotations

import re
from typing import Any, cast

import msgspec

from gangline.domain.conversation import (
    Message,
    ModelCall,
    Part,
    Role,
    SamplingParams,
    Text,
    Thinking,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    ToolResult,
)
from gangline.domain.errors import InvalidRequest

__all__ = ["parse_chat_call"]

MAX_CHOICES = 128

# Fields that would change the reply and that cannot be carried -> the values at which they change nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "modalities": (None, [], ["text"]),
    "repetition_penalty": (None, 1),
}

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"required field `(\w+)`")


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Function
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


class _ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    function: _ToolFunction | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str
    messages: list[_Message]
    tools: list[_Tool] | None = None
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
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_KNOWN = frozenset(_Body.__struct_fields__)


def parse_chat_call(body: bytes) -> ModelCall:
    """Raises: InvalidRequest; its details name the field as `param`."""
    fields = _decode(body, dict[str, msgspec.Raw])
    _refuse_what_cannot_be_carried(fields)
    request = _decode(body, _Body)
    if not request.messages:
        raise InvalidRequest("messages must not be empty.", param="messages")
    return ModelCall(
        dialect="openai_chat",
        model=request.model,
        messages=tuple(_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)),
        tools=tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        sampling=_sampling(request),
        num_choices=_num_choices(request.n),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        num_top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        response_format=request.response_format,
        template_kwargs=request.chat_template_kwargs or {},
        dropped=tuple(sorted(set(fields) - _KNOWN - set(_REFUSED))),
    )


def _decode(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}") from None


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
    for name, neutral in _REFUSED.items():
        if name in fields and _decode(bytes(fields[name]), Any) not in neutral:
            raise InvalidRequest(f"{name!r} is not supported here; leave it out.", param=name)


def _message(message: _Message, where: str) -> Message:
    if message.audio is not None or message.function_call is not None:
        raise InvalidRequest(
            f"{where}: audio and function_call are not supported; use text and tool_calls.", param=where
        )
    texts = _texts(message.content, where)
    match message.role:
        case "system" | "developer" | "user":
            return Message(cast("Role", message.role), texts, message.name)
        case "assistant":
            return Message("assistant", _assistant_parts(message, texts, where), message.name)
        case "tool":
            if message.tool_call_id is None:
                raise InvalidRequest(f"{where}.tool_call_id is missing.", param=f"{where}.tool_call_id")
            return Message("tool", (ToolResult(message.tool_call_id, texts),), message.name)
        case _:
            known = "system, developer, user, assistant, tool"
            raise InvalidRequest(f"{where}.role {message.role!r} is none of {known}.", param=f"{where}.role")


def _assistant_parts(message: _Message, texts: tuple[Text, ...], where: str) -> tuple[Part, ...]:
    thought = message.reasoning_content or message.reasoning
    parts: list[Part] = [Thinking(thought)] if thought else []
    parts += [text for text in texts if text.text]
    parts += [Text(message.refusal)] if message.refusal else []
    for i, call in enumerate(message.tool_calls or ()):
        if call.type != "function":
            at = f"{where}.tool_calls[{i}]"
            raise InvalidRequest(f"{at} is of type {call.type!r}; only function is supported.", param=at)
        parts.append(ToolCall(call.id, call.function.name, _arguments(call.function.arguments)))
    return tuple(parts)


def _arguments(arguments: str | dict[str, Any] | None) -> str:
    if isinstance(arguments, dict):
        return msgspec.json.encode(arguments).decode()
    return arguments or ""


def _texts(content: str | list[dict[str, Any]] | None, where: str) -> tuple[Text, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (Text(content),)
    return tuple(_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _text_part(part: dict[str, Any], where: str) -> Text:
    kind = part.get("type")
    text = part.get("refusal") if kind == "refusal" else part.get("text")
    if kind not in ("text", "refusal"):
        raise InvalidRequest(
            f"{where} is of type {kind!r}; the model behind this session reads text only.", param=where
        )
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string.", param=f"{where}.text")
    return Text(text)


def _tool(tool: _Tool, where: str) -> ToolDefinition:
    if tool.type != "function" or tool.function is None:
        raise InvalidRequest(f"{where} is of type {tool.type!r}; only function tools are supported.", param=where)
    function = tool.function
    if not function.name:
        raise InvalidRequest(f"{where}.function.name is empty.", param=f"{where}.function.name")
    return ToolDefinition(function.name, function.description, function.parameters, function.strict)


def _tool_choice(choice: str | dict[str, Any] | None) -> ToolChoice | None:
    if choice is None:
        return None
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        return ToolChoice(choice)
    function: object = choice.get("function") if isinstance(choice, dict) else None
    name: object = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice must be auto, none, required or name a function.", param="tool_choice")
    return ToolChoice("named", name)


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


def _num_choices(n: int | None) -> int:
    if n is not None and not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}, got {n}.", param="n")
    return n or 1
