"""OpenAI Responses: the request body -> the canonical call.

Fields that would change the meaning of the call (stored prompts, conversations, background runs) are rejected with 400.
Fields without meaning here are named in `ModelCall.dropped`.

Source: OpenAI API reference, responses; requests of Codex. `seed`, `stop`, `top_k` and the penalties are additions that
engines' own Responses routes accept.
"""

from __future__ import annotations

from typing import cast

import msgspec

from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text
from gangline.wire.dialects.bodies import DeclaredFields, role_in, wish_of_effort
from gangline.wire.dialects.responses.fields import (
    Fields,
    decode_body,
    flag,
    integer,
    invalid,
    number,
    optional_record,
    record,
    string,
    text,
)
from gangline.wire.dialects.responses.items import read_input
from gangline.wire.dialects.responses.tools import read_allowed, read_tool_choice, read_tools

RESPONSE_ID_PREFIX = "resp_"

MAX_TOP_LOGPROBS = 20

_ECHOED = frozenset(
    {
        "frequency_penalty",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "parallel_tool_calls",
        "presence_penalty",
        "previous_response_id",
        "prompt_cache_key",
        "reasoning",
        "safety_identifier",
        "store",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "truncation",
        "user",
    }
)
"""Fields that the reply repeats."""

_CACHING = "prefixes are cached by the engine itself"
_ABOUT_THE_USER = "it names a user to the provider"
RESPONSES_FIELDS = DeclaredFields(
    served=frozenset(
        {
            "frequency_penalty",
            "include",
            "input",
            "instructions",
            "max_output_tokens",
            "metadata",
            "model",
            "parallel_tool_calls",
            "presence_penalty",
            "previous_response_id",
            "reasoning",
            "seed",
            "stop",
            "store",
            "stream",
            "temperature",
            "text",
            "tool_choice",
            "tools",
            "top_k",
            "top_logprobs",
            "top_p",
            "truncation",
        }
    ),
    limits={"truncation": "nothing is cut off: a conversation that does not fit is refused"},
    refused={
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "personality": (None,),
        "prompt": (None,),
    },
    dropped={
        "access_programs": "only the provider's models know it",
        "client_metadata": _ABOUT_THE_USER,
        "image": "the engine decides how it reads images",
        "max_tool_calls": "it limits tools that the provider runs",
        "moderation": "the reply is not moderated",
        "prompt_cache_key": _CACHING,
        "prompt_cache_options": _CACHING,
        "prompt_cache_retention": _CACHING,
        "safety_identifier": _ABOUT_THE_USER,
        "service_tier": "it says who pays",
        "stream_options": "it hides the length of tokens from eavesdroppers",
        "user": _ABOUT_THE_USER,
    },
)

_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = frozenset({_LOGPROBS, "reasoning.encrypted_content"})


def parse_responses_call(body: bytes) -> ModelCall:
    """Raises: InvalidRequest; its details name the field as `param`."""
    return _call(body, counting=False)


def parse_responses_count(body: bytes) -> ModelCall:
    """Only the prompt's length is requested; `model` may be missing. Raises: InvalidRequest."""
    return _call(body, counting=True)


def _call(body: bytes, *, counting: bool) -> ModelCall:
    fields = decode_body(body)
    _refuse_what_cannot_be_carried(fields)
    tools, tools_left_out = read_tools(fields.get("tools"))
    allowed = read_allowed(fields.get("tool_choice"), tools)
    tools, choice = allowed or (tools, read_tool_choice(fields.get("tool_choice"), tools))
    messages, items_left_out = _messages(fields)
    response_format, text_left_out = _response_format(fields)
    num_top_logprobs, includes_left_out = _includes(fields)
    read = RESPONSES_FIELDS.served | RESPONSES_FIELDS.refused.keys()
    unread = [name for name in fields if name not in read and fields[name] is not None]
    thinking_left_out = _others(fields, "reasoning", "summary", "effort")
    reasoning = optional_record(fields, "reasoning") or {}
    left_out = [
        *unread,
        *tools_left_out,
        *items_left_out,
        *text_left_out,
        *thinking_left_out,
        *includes_left_out,
    ]
    return ModelCall(
        dialect="openai_responses",
        model=(string(fields, "model") or "") if counting else text(fields, "model"),
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=flag(fields, "parallel_tool_calls"),
        sampling=_sampling(fields),
        stream=bool(flag(fields, "stream")),
        include_usage=True,
        num_top_logprobs=num_top_logprobs,
        response_format=response_format,
        thinking=wish_of_effort(string(reasoning, "effort", "reasoning")),
        agent_role=role_in(fields.get("metadata")),
        dropped=tuple(sorted(left_out)),
        undeclared={name: msgspec.json.encode(fields[name]).decode() for name in RESPONSES_FIELDS.undeclared(unread)},
        previous_reply_id=string(fields, "previous_response_id"),
        leads_with_instructions=bool(fields.get("instructions")),
        echo=_echo(fields, tools_left_out),
    )


def _refuse_what_cannot_be_carried(fields: Fields) -> None:
    for name in RESPONSES_FIELDS.refused:
        if RESPONSES_FIELDS.refuses(name, fields.get(name)):
            raise invalid(name, "not supported here; leave it out.")


def _messages(fields: Fields) -> tuple[tuple[Message, ...], list[str]]:
    instructions = string(fields, "instructions")
    messages, left_out = read_input(fields.get("input"))
    if not messages and fields.get("previous_response_id") is None:
        raise invalid("input", "must not be empty.")
    first = (Message("system", (Text(instructions),)),) if instructions else ()
    return (*first, *messages), left_out


def _response_format(fields: Fields) -> tuple[Fields | None, list[str]]:
    """In OpenAI Chat's form; None for plain text."""
    config = optional_record(fields, "text") or {}
    left_out = _others(fields, "text", "format")
    chosen = optional_record(config, "format", "text") or {"type": "text"}
    match string(chosen, "type", "text.format"):
        case "text":
            return None, left_out
        case "json_object":
            return {"type": "json_object"}, left_out
        case "json_schema":
            return {"type": "json_schema", "json_schema": _json_schema(chosen)}, left_out
        case kind:
            raise invalid("text.format.type", f"{kind!r} is none of text, json_object, json_schema.")


def _others(fields: Fields, name: str, *carried: str) -> list[str]:
    """The fields of the settings object `name` except `carried`."""
    settings = optional_record(fields, name) or {}
    return [f"{name}.{key}" for key, value in settings.items() if key not in carried and value is not None]


def _json_schema(chosen: Fields) -> Fields:
    where = "text.format"
    described: Fields = {
        "name": text(chosen, "name", where),
        "schema": record(chosen.get("schema"), f"{where}.schema"),
        "strict": flag(chosen, "strict", where),
        "description": string(chosen, "description", where),
    }
    return {name: value for name, value in described.items() if value is not None}


def _includes(fields: Fields) -> tuple[int | None, list[str]]:
    """(log-probs requested, names of the dropped fields). Thinking's encrypted content is always sent."""
    wanted = fields.get("include")
    if wanted is not None and not isinstance(wanted, list):
        raise invalid("include", "expected an array of strings.")
    names = cast("list[object]", wanted or [])
    for i, name in enumerate(names):
        if not isinstance(name, str):
            raise invalid(f"include[{i}]", "expected a string.")
    num_top = integer(fields, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    asked = _LOGPROBS in names or bool(num_top)
    return (num_top or 0) if asked else None, [f"include: {name}" for name in names if name not in _INCLUDES]


def _sampling(fields: Fields) -> SamplingParams:
    return SamplingParams(
        max_tokens=integer(fields, "max_output_tokens", 1),
        temperature=number(fields, "temperature"),
        top_p=number(fields, "top_p"),
        top_k=integer(fields, "top_k", -1),
        seed=integer(fields, "seed", -(2**63)),
        stop=_stop(fields.get("stop")),
        presence_penalty=number(fields, "presence_penalty"),
        frequency_penalty=number(fields, "frequency_penalty"),
    )


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    entries = cast("list[object]", value) if isinstance(value, list) else [value]
    strings = tuple(entry for entry in entries if isinstance(entry, str))
    if len(strings) != len(entries):
        raise invalid("stop", "expected a string or an array of strings.")
    return strings


def _echo(fields: Fields, tools_left_out: list[str]) -> Fields:
    """The request's fields for the reply. Tools are those in effect, without the omitted ones."""
    if string(fields, "truncation") not in (None, "auto", "disabled"):
        raise invalid("truncation", "expected one of auto, disabled.")
    flag(fields, "store")
    optional_record(fields, "metadata")
    echo = {name: fields[name] for name in _ECHOED if fields.get(name) is not None}
    if "tools" in echo:
        gone = {entry.partition(":")[0] for entry in tools_left_out}
        echo["tools"] = [tool for i, tool in enumerate(echo["tools"]) if f"tools[{i}]" not in gone]
    return echo
