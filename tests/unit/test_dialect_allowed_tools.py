"""A choice among allowed tools: the two forms of OpenAI, and Google's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gangline.domain.conversation import ModelCall, ToolChoice
from gangline.domain.errors import InvalidRequest
from gangline.wire.dialects.chat.request import parse_chat_call
from gangline.wire.dialects.contract import RawRequest
from gangline.wire.dialects.google.dialect import GoogleDialect
from gangline.wire.dialects.responses.request import parse_responses_call


def _chat(mode: str, names: list[str]) -> ModelCall:
    def function(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name}}

    allowed = {"mode": mode, "tools": [function(name) for name in names]}
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    body |= {"tools": [function(name) for name in "abc"]}
    body |= {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    return parse_chat_call(json.dumps(body).encode())


def _responses(mode: str, names: list[str]) -> ModelCall:
    tools = [{"type": "function", "name": name} for name in "abc"]
    allowed: list[Any] = [{"type": "function", "name": name} for name in names]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [*allowed, {"type": "image_generation"}]}
    body = {"model": "m", "input": "x", "tools": tools, "tool_choice": choice}
    return parse_responses_call(json.dumps(body).encode())


def _google(mode: str, names: list[str]) -> ModelCall:
    calling = {"mode": {"auto": "AUTO", "required": "ANY"}[mode], "allowedFunctionNames": names}
    body: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "x"}]}]}
    body |= {"tools": [{"functionDeclarations": [{"name": name} for name in "abc"]}]}
    body |= {"toolConfig": {"functionCallingConfig": calling}}
    return GoogleDialect().parse_call(RawRequest(body=json.dumps(body).encode(), params={"model": "m"}))


@pytest.mark.parametrize("parse", [_chat, _responses, _google])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_the_allowed_tools_are_offered_in_the_order_of_the_request(parse: Any, mode: Any) -> None:
    call = parse(mode, ["c", "a"])
    assert [tool.name for tool in call.tools] == ["a", "c"]
    assert call.tool_choice == ToolChoice(mode)
    assert call.dropped == () or parse is _responses


@pytest.mark.parametrize("parse", [_chat, _responses])
@pytest.mark.parametrize(("mode", "names"), [("auto", ["d"]), ("auto", []), ("none", ["a"])])
def test_what_cannot_be_allowed_is_refused(parse: Any, mode: str, names: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(mode, names)
    assert str(caught.value.details["param"]).startswith("tool_choice")
