"""A choice that forces a tool where there is none to call: as each provider answers it, never dropped in silence."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from gangline.domain.conversation import ModelCall
from gangline.domain.errors import InvalidRequest
from gangline.wire.dialects.anthropic.dialect import AnthropicDialect
from gangline.wire.dialects.chat.dialect import ChatDialect
from gangline.wire.dialects.contract import Dialect, RawRequest
from gangline.wire.dialects.google.dialect import GoogleDialect
from gangline.wire.dialects.responses.dialect import ResponsesDialect

Force = Literal["any", "named"]

SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
USER = [{"role": "user", "content": "hi"}]
DIALECTS: dict[str, Dialect] = {
    "chat": ChatDialect(),
    "responses": ResponsesDialect(),
    "anthropic": AnthropicDialect(),
    "google": GoogleDialect(),
}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": USER},
    "responses": {"model": "m", "input": "hi"},
    "anthropic": {"model": "m", "messages": USER, "max_tokens": 9},
    "google": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}
CHOICES: dict[str, dict[Force, dict[str, Any]]] = {
    "chat": {
        "any": {"tool_choice": "required"},
        "named": {"tool_choice": {"type": "function", "function": {"name": "ls"}}},
    },
    "responses": {
        "any": {"tool_choice": "required"},
        "named": {"tool_choice": {"type": "function", "name": "ls"}},
    },
    "anthropic": {
        "any": {"tool_choice": {"type": "any"}},
        "named": {"tool_choice": {"type": "tool", "name": "ls"}},
    },
    "google": {
        "any": {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
        "named": {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["ls"]}}},
    },
}


def function(dialect: str, name: str) -> dict[str, Any]:
    return {
        "chat": {"type": "function", "function": {"name": name, "parameters": SCHEMA}},
        "responses": {"type": "function", "name": name, "parameters": SCHEMA},
        "anthropic": {"name": name, "input_schema": SCHEMA},
        "google": {"functionDeclarations": [{"name": name, "parameters": SCHEMA}]},
    }[dialect]


HOSTED: dict[str, dict[str, Any]] = {
    "responses": {"type": "web_search"},
    "anthropic": {"type": "web_search_20250305", "name": "web_search"},
    "google": {"googleSearch": {}},
}


def parsed(dialect: str, force: Force, tools: list[dict[str, Any]] | None) -> ModelCall:
    body = BODIES[dialect] | CHOICES[dialect][force] | ({} if tools is None else {"tools": tools})
    params = {"model": "m", "method": "generateContent"}
    return DIALECTS[dialect].parse_call(RawRequest(body=msgspec.json.encode(body), params=params))


@pytest.mark.parametrize("force", ["any", "named"])
@pytest.mark.parametrize("tools", [None, []])
def test_claude_code_keeps_its_choice_while_it_compacts_and_the_record_names_what_was_dropped(
    force: Force, tools: list[dict[str, Any]] | None
) -> None:
    call = parsed("anthropic", force, tools)
    assert call.tool_choice is None
    assert "tool_choice" in call.dropped


@pytest.mark.parametrize("force", ["any", "named"])
@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("dialect", ["chat", "responses", "google"])
def test_other_providers_refuse_a_forced_choice_without_tools(
    dialect: str, force: Force, tools: list[dict[str, Any]] | None
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parsed(dialect, force, tools)
    assert str(refused.value.details["param"]).startswith(("tool_choice", "toolConfig"))


@pytest.mark.parametrize("force", ["any", "named"])
@pytest.mark.parametrize("dialect", HOSTED)
def test_a_forced_choice_among_tools_of_the_provider_alone_is_refused(dialect: str, force: Force) -> None:
    with pytest.raises(InvalidRequest):
        parsed(dialect, force, [HOSTED[dialect]])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_named_tool_that_is_not_offered_is_refused(dialect: str) -> None:
    with pytest.raises(InvalidRequest):
        parsed(dialect, "named", [function(dialect, "cat")])


@pytest.mark.parametrize(("force", "mode"), [("any", "required"), ("named", "named")])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_forced_choice_of_a_tool_that_is_there_is_kept(dialect: str, force: Force, mode: str) -> None:
    choice = parsed(dialect, force, [function(dialect, "ls")]).tool_choice
    assert choice is not None
    assert choice.mode == mode
