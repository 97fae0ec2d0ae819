"""Half a character in a tool's output: JavaScript agents cut text anywhere, and must not die of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.conversation import ModelCall, Text, ToolResult
from gangline.domain.errors import InvalidRequest
from gangline.settings import plugins
from gangline.wire.dialects.bodies import LONE_SURROGATES
from gangline.wire.dialects.contract import RawRequest

CUT_TEXT = st.text(st.characters(exclude_categories=()) | st.sampled_from('\ud83d\ude00\\"u'), min_size=1, max_size=12)
DIALECTS = ("openai_chat", "anthropic", "openai_responses", "google")


def _with_result(name: str, text: str) -> dict[str, Any]:
    """The body of a call whose last message is a tool's result."""
    match name:
        case "openai_chat":
            call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            said = [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call]}]
            return {"model": "m", "messages": [*said, {"role": "tool", "tool_call_id": "c1", "content": text}]}
        case "anthropic":
            call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": text}]}
            said = [{"role": "user", "content": "go"}, {"role": "assistant", "content": [call]}]
            return {"model": "m", "max_tokens": 9, "messages": [*said, {"role": "user", "content": [result]}]}
        case "openai_responses":
            call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
            result = {"type": "function_call_output", "call_id": "c1", "output": text}
            return {"model": "m", "input": [{"role": "user", "content": "go"}, call, result]}
        case _:
            call = {"functionCall": {"id": "c1", "name": "f", "args": {}}}
            result = {"functionResponse": {"id": "c1", "name": "f", "response": {"output": text}}}
            said = [{"role": "user", "parts": [{"text": "go"}]}, {"role": "model", "parts": [call]}]
            return {"contents": [*said, {"role": "user", "parts": [result]}]}


def _parsed(name: str, body: bytes) -> ModelCall:
    request = RawRequest(body=body, params={"model": "m", "method": "generateContent"})
    return plugins.load("dialect", name)().parse_call(request)


def _result_text(call: ModelCall) -> str:
    (result,) = call.messages[-1].parts
    assert isinstance(result, ToolResult)
    return "".join(part.text for part in result.content if isinstance(part, Text))


def _as_read(text: str) -> tuple[str, int]:
    """Halves that meet are one character; those that do not are replaced. And how many those are."""
    return re.subn("[\ud800-\udfff]", "\ufffd", json.loads(json.dumps(text)))


@pytest.mark.parametrize("name", DIALECTS)
@given(text=CUT_TEXT)
def test_half_a_character_in_a_tools_result_is_replaced_the_rest_is_kept_and_the_record_says_so(
    name: str, text: str
) -> None:
    call = _parsed(name, json.dumps(_with_result(name, text)).encode())
    expected, num_replaced = _as_read(text)
    assert _result_text(call) == expected
    assert (LONE_SURROGATES in call.dropped) == (num_replaced > 0)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_body_that_is_broken_otherwise_is_refused_as_before(name: str) -> None:
    body = json.dumps(_with_result(name, "a\ud83d")).encode()
    for broken in (body[:-1], b"[" + body + b"]", body.replace(b"\\ud83d", b"\xed\xa0\xbd")):
        with pytest.raises(InvalidRequest):
            _parsed(name, broken)


@pytest.mark.parametrize("name", DIALECTS)
def test_text_that_only_looks_like_an_escape_is_left_alone(name: str) -> None:
    call = _parsed(name, json.dumps(_with_result(name, "\\ud83d and \ude00")).encode())
    assert _result_text(call) == "\\ud83d and \ufffd"
