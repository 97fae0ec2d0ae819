"""Integers of more than 64 bits: refused where a record or an engine would be given them, and the field is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gangline.domain.conversation import ModelCall, ToolCall
from gangline.domain.errors import InvalidRequest
from gangline.settings import plugins
from gangline.wire.dialects.contract import Dialect, RawRequest

USER = [{"role": "user", "content": "x"}]
CHAT: dict[str, Any] = {"model": "m", "messages": USER}
RESPONSES: dict[str, Any] = {"model": "m", "input": "x"}
ANTHROPIC: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": USER}
GOOGLE: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "x"}]}]}
BEYOND = [2**63, 2**64, -(2**63) - 1, 2**70, 10**400]


def parsed(name: str, body: dict[str, Any]) -> ModelCall:
    dialect: Dialect = plugins.load("dialect", name)()
    params = {"model": "m", "method": "generateContent"}
    return dialect.parse_call(RawRequest(body=json.dumps(body).encode(), params=params))


def _with(path: str, body: dict[str, Any], number: int) -> dict[str, Any]:
    """The body with the number at the path, such as `tools.0.parameters`."""
    body = json.loads(json.dumps(body))
    at: Any = body
    *way, last = path.split(".")
    for name in way:
        at = at[int(name)] if name.isdigit() else at[name]
    at[last] = number
    return body


FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"maximum": 1}}}}
CASES = [
    ("openai_chat", CHAT, "seed", "seed"),
    ("openai_chat", CHAT, "max_tokens", "max_tokens"),
    ("openai_chat", CHAT, "top_k", "top_k"),
    ("openai_chat", CHAT | {"chat_template_kwargs": {}}, "chat_template_kwargs.a", "chat_template_kwargs.a"),
    (
        "openai_chat",
        CHAT | {"tools": [{"type": "function", "function": FUNCTION}]},
        "tools.0.function.parameters.properties.a.maximum",
        "tools[0].function.parameters.properties.a.maximum",
    ),
    ("openai_responses", RESPONSES, "seed", "seed"),
    ("openai_responses", RESPONSES, "max_output_tokens", "max_output_tokens"),
    (
        "openai_responses",
        RESPONSES | {"tools": [FUNCTION | {"type": "function"}]},
        "tools.0.parameters.properties.a.maximum",
        "tools[0].parameters.properties.a.maximum",
    ),
    ("anthropic", ANTHROPIC, "top_k", "top_k"),
    ("anthropic", ANTHROPIC, "max_tokens", "max_tokens"),
    (
        "anthropic",
        ANTHROPIC | {"tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}]},
        "tools.0.input_schema.properties.a.maximum",
        "tools.0.input_schema.properties.a.maximum",
    ),
    ("google", GOOGLE | {"generationConfig": {}}, "generationConfig.seed", "generationConfig.seed"),
    (
        "google",
        GOOGLE | {"tools": [{"functionDeclarations": [FUNCTION | {"parametersJsonSchema": {}}]}]},
        "tools.0.functionDeclarations.0.parametersJsonSchema.maximum",
        "tools[0].functionDeclarations[0].parametersJsonSchema.maximum",
    ),
]


@pytest.mark.parametrize("number", BEYOND, ids=["2^63", "2^64", "-2^63-1", "2^70", "10^400"])
@pytest.mark.parametrize(("name", "body", "path", "field"), CASES)
def test_an_integer_beyond_64_bits_is_refused_and_its_field_is_named(
    name: str, body: dict[str, Any], path: str, field: str, number: int
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(name, _with(path, body, number))
    assert caught.value.details["param"] == field
    assert caught.value.status == 400


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63)])
def test_the_last_integers_of_64_bits_are_served(number: int) -> None:
    assert parsed("openai_chat", CHAT | {"seed": number}).sampling.seed == number


@pytest.mark.parametrize("name", ["anthropic", "google"])
def test_arguments_that_a_model_wrote_are_carried_whatever_their_size(name: str) -> None:
    """Refused, every later request of the agent would be: it holds the same history."""
    called: dict[str, Any] = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 2**70}}
    answered = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
    said = [{"role": "assistant", "content": [called]}, {"role": "user", "content": [answered]}]
    body = ANTHROPIC | {"messages": [*USER, *said]}
    if name == "google":
        parts = [{"functionCall": {"name": "f", "args": {"a": 2**70}}}]
        body = {"contents": [*GOOGLE["contents"], {"role": "model", "parts": parts}]}
    (call,) = [part for message in parsed(name, body).messages for part in message.parts if isinstance(part, ToolCall)]
    assert json.loads(call.arguments) == {"a": 2**70}


def test_long_numbers_in_texts_are_only_texts() -> None:
    call = parsed("openai_chat", CHAT | {"messages": [{"role": "user", "content": str(2**70)}]})
    assert call.dropped == ()
