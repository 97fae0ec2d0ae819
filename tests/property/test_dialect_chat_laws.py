"""Any body is a call or a clear refusal; any conversation survives the way to the engine and back."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.domain.conversation import Message, Part, Text, Thinking, ToolCall, ToolResult
from gangline.domain.errors import InvalidRequest
from gangline.models.engines.vllm.wire import message_fields
from gangline.wire.dialects.chat.dialect import ChatDialect
from gangline.wire.dialects.contract import RawRequest

CHAT = ChatDialect()

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)
_names = st.sampled_from(
    ["model", "messages", "tools", "tool_choice", "stop", "n", "stream", "stream_options", "logprobs", "seed"]
) | st.sampled_from(["chat_template_kwargs", "logit_bias", "response_format", "max_tokens", "audio", "whatever"])
_almost = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "x"]) | _json},
    optional={
        "content": _json
        | st.lists(st.fixed_dictionaries({"type": _text | st.just("text"), "text": _json}), max_size=2),
        "tool_calls": _json,
        "tool_call_id": _json,
        "name": _json,
        "reasoning": _json,
    },
)


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=40)
    | _json.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(_names, _json, max_size=6).map(lambda value: json.dumps(value).encode())
    | st.lists(_almost, max_size=3).map(lambda value: json.dumps({"model": "m", "messages": value}).encode())
)
def test_any_body_is_a_call_or_a_400_in_shape(body: bytes) -> None:
    try:
        CHAT.parse_call(RawRequest(body=body))
    except InvalidRequest as refused:
        answer = CHAT.error_answer(refused)
        assert answer.status == 400
        assert json.loads(answer.body)["error"]["type"] == "invalid_request_error"


_texts = _text.filter(bool).map(Text)
_calls = st.builds(ToolCall, _text, _text, st.dictionaries(_text, st.integers() | _text, max_size=2).map(json.dumps))
_assistant = st.tuples(
    st.lists(_text.filter(bool).map(Thinking), max_size=1), st.lists(_texts, max_size=2), st.lists(_calls, max_size=2)
).map(lambda groups: Message("assistant", tuple[Part, ...](part for group in groups for part in group)))
_message = (
    _assistant
    | st.builds(lambda text: Message("user", (text,)), _text.map(Text))
    | st.builds(lambda text: Message("system", (text,)), _text.map(Text))
    | st.builds(lambda call_id, text: Message("tool", (ToolResult(call_id, (text,)),)), _text, _text.map(Text))
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_message, min_size=1, max_size=5))
def test_a_conversation_survives_the_way_to_the_engine_and_back(messages: list[Message]) -> None:
    body: dict[str, Any] = {"model": "m", "messages": [message_fields(message) for message in messages]}
    assert CHAT.parse_call(RawRequest(body=json.dumps(body).encode())).messages == tuple(messages)
