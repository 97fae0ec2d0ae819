"""Every field that the pinned SDKs can send, as they send it: it is served, refused or dropped, as the tables say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from google import genai
from google.genai import types
from openai.types.chat import completion_create_params
from openai.types.responses import input_token_count_params, response_create_params

from gangline.domain.conversation import ModelCall
from gangline.domain.errors import InvalidRequest
from gangline.settings import plugins
from gangline.wire.dialects.anthropic.request import MESSAGES_FIELDS
from gangline.wire.dialects.bodies import DeclaredFields
from gangline.wire.dialects.chat.request import CHAT_FIELDS
from gangline.wire.dialects.contract import Dialect, RawRequest
from gangline.wire.dialects.google.request import GOOGLE_CONFIG_FIELDS, GOOGLE_FIELDS
from gangline.wire.dialects.responses.request import RESPONSES_FIELDS

SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
USER: list[Any] = [{"role": "user", "content": "x"}]


class _Sent(Exception):
    def __init__(self, body: bytes) -> None:
        self.body = body


def _wire(client: Callable[..., Any], transport: Any) -> Any:
    def caught(request: Any) -> Any:
        raise _Sent(request.content)

    return client(transport=transport(caught))


def sent(ask: Callable[[], Any]) -> bytes:
    """The body that the SDK sends."""
    try:
        ask()
    except Exception as error:
        found: BaseException | None = error
        while found is not None and not isinstance(found, _Sent):
            found = found.__cause__ or found.__context__
        if isinstance(found, _Sent):
            return found.body
        raise
    raise AssertionError("nothing was sent")


def fields_of(*params: Any) -> set[str]:
    return {name for one in params for name in one.__required_keys__ | one.__optional_keys__}


CHAT: dict[str, Any] = {
    "audio": {"format": "mp3", "voice": "alloy"},
    "frequency_penalty": 0.5,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "logit_bias": {"1": 1},
    "logprobs": True,
    "max_completion_tokens": 5,
    "max_tokens": 5,
    "messages": USER,
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "model": "m",
    "moderation": {"model": "m"},
    "n": 2,
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 0.5,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "safety_identifier": "s",
    "seed": 1,
    "service_tier": "auto",
    "stop": ["x"],
    "store": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "top_logprobs": 2,
    "top_p": 0.5,
    "user": "u",
    "verbosity": "low",
    "web_search_options": {},
}
RESPONSES: dict[str, Any] = {
    "access_programs": {"cyber": {}},
    "background": True,
    "context_management": [{"type": "compaction", "compact_threshold": 9}],
    "conversation": "conv_1",
    "image": {"detail": "low"},
    "include": ["reasoning.encrypted_content"],
    "input": "x",
    "instructions": "s",
    "max_output_tokens": 5,
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "model": "m",
    "moderation": {"model": "m"},
    "parallel_tool_calls": True,
    "personality": "friendly",
    "previous_response_id": "resp_1",
    "prompt": {"id": "pmpt_1"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "reasoning": {},
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": True,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}],
    "top_logprobs": 2,
    "top_p": 0.5,
    "truncation": "auto",
    "user": "u",
}
ANTHROPIC: dict[str, Any] = {
    "billing_policy": {"type": "billing_policy", "bill_to": "self"},
    "cache_control": {"type": "ephemeral"},
    "compaction": {"type": "summarize"},
    "container": "container_1",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "diagnostics": {"previous_message_id": "msg_1"},
    "fallback_credit_token": "t",
    "fallbacks": [{"model": "m"}],
    "inference_geo": "us",
    "max_tokens": 5,
    "mcp_servers": [{"type": "url", "name": "n", "url": "https://x"}],
    "messages": USER,
    "metadata": {"user_id": "u"},
    "model": "m",
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "service_tier": "auto",
    "speed": "fast",
    "stop_sequences": ["x"],
    "stream": True,
    "system": "s",
    "thinking": {"type": "disabled"},
    "thread": {"type": "create"},
    "tool_choice": {"type": "auto"},
    "tools": [{"name": "f", "input_schema": SCHEMA}],
}
ANTHROPIC_HEADERS = {"betas": ["b"], "user_profile_id": "u", "workspace_id": "w"}
"""Arguments that the SDK sends as headers."""
GOOGLE: dict[str, Any] = {
    "audio_transcription_config": {},
    "cached_content": "cachedContents/1",
    "candidate_count": 2,
    "continuation_token": b"x",
    "enable_enhanced_civic_answers": True,
    "frequency_penalty": 0.5,
    "image_config": {"aspect_ratio": "1:1"},
    "labels": {"a": "b"},
    "logprobs": 2,
    "max_output_tokens": 5,
    "media_resolution": "MEDIA_RESOLUTION_LOW",
    "presence_penalty": 0.5,
    "response_json_schema": SCHEMA,
    "response_logprobs": True,
    "response_mime_type": "application/json",
    "response_modalities": ["TEXT"],
    "response_schema": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}},
    "safety_settings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
    "seed": 1,
    "service_tier": "flex",
    "speech_config": "Kore",
    "stop_sequences": ["x"],
    "store": True,
    "system_instruction": "s",
    "temperature": 0.5,
    "thinking_config": {"include_thoughts": True},
    "tool_config": {"function_calling_config": {"mode": "AUTO"}},
    "tools": [{"function_declarations": [{"name": "f"}]}],
    "top_k": 2,
    "top_p": 0.5,
}
GOOGLE_IN_THE_SDK = {
    "automatic_continuation",
    "automatic_function_calling",
    "http_options",
    "should_return_http_response",
}
"""Settings of the SDK that it never sends."""
GOOGLE_CLOUD_ONLY = {
    "audio_timestamp",
    "generation_output_config",
    "model_armor_config",
    "model_selection_config",
    "routing_config",
}
"""Fields that the SDK refuses to send to the Gemini API."""
GOOGLE_WITH: dict[str, dict[str, Any]] = {
    "logprobs": {"response_logprobs": True},
    "response_json_schema": {"response_mime_type": "application/json"},
    "response_schema": {"response_mime_type": "application/json"},
}


def _openai_chat(field: str) -> bytes:
    with openai.OpenAI(api_key="k", max_retries=0, http_client=_wire(httpx.Client, httpx.MockTransport)) as client:
        extra = {"stream": True} if field == "stream_options" else {}
        return sent(
            lambda: client.chat.completions.create(**{"model": "m", "messages": USER, field: CHAT[field]} | extra)
        )


def _openai_responses(field: str) -> bytes:
    with openai.OpenAI(api_key="k", max_retries=0, http_client=_wire(httpx.Client, httpx.MockTransport)) as client:
        if field == "personality":
            return sent(lambda: client.responses.input_tokens.count(model="m", input="x", personality="friendly"))
        return sent(lambda: client.responses.create(**{"model": "m", "input": "x", field: RESPONSES[field]}))


def _anthropic(field: str) -> bytes:
    transport = _wire(httpx2.Client, httpx2.MockTransport)
    value = (ANTHROPIC | ANTHROPIC_HEADERS)[field]
    with anthropic.Anthropic(api_key="k", max_retries=0, http_client=transport) as client:
        ask: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": USER, field: value}
        return sent(lambda: client.beta.messages.create(**ask))


def _google(field: str) -> bytes:
    options = types.HttpOptions(httpx_client=_wire(httpx.Client, httpx.MockTransport))
    client = genai.Client(api_key="k", http_options=options)
    config = types.GenerateContentConfig(**GOOGLE_WITH.get(field, {}) | {field: GOOGLE[field]})
    return sent(lambda: client.models.generate_content(model="m", contents="x", config=config))


def outcome(dialect: str, body: bytes) -> ModelCall | InvalidRequest:
    spoken: Dialect = plugins.load("dialect", dialect)()
    try:
        return spoken.parse_call(RawRequest(body=body, params={"model": "m", "method": "generateContent"}))
    except InvalidRequest as error:
        return error


def assert_as_declared(found: ModelCall | InvalidRequest, path: str, field: str, declared: DeclaredFields) -> None:
    if field in declared.refused:
        assert isinstance(found, InvalidRequest)
        assert found.details["param"] == path
        return
    assert isinstance(found, ModelCall), found
    assert (path in found.dropped) == (field in declared.dropped)
    assert found.undeclared == {}
    assert field in declared.served | declared.dropped.keys()


@pytest.mark.parametrize("field", sorted(CHAT))
def test_a_field_of_openai_chat_is_treated_as_declared(field: str) -> None:
    assert_as_declared(outcome("openai_chat", _openai_chat(field)), field, field, CHAT_FIELDS)


@pytest.mark.parametrize("field", sorted(RESPONSES))
def test_a_field_of_openai_responses_is_treated_as_declared(field: str) -> None:
    assert_as_declared(outcome("openai_responses", _openai_responses(field)), field, field, RESPONSES_FIELDS)


@pytest.mark.parametrize("field", sorted(ANTHROPIC))
def test_a_field_of_anthropic_is_treated_as_declared(field: str) -> None:
    assert_as_declared(outcome("anthropic", _anthropic(field)), field, field, MESSAGES_FIELDS)


@pytest.mark.parametrize("field", sorted(GOOGLE))
def test_a_field_of_google_is_treated_as_declared(field: str) -> None:
    body = _google(field)
    found = outcome("google", body)
    fields = json.loads(body)
    for name in fields.keys() - {"contents", "generationConfig"}:
        assert_as_declared(found, name, name, GOOGLE_FIELDS)
    for name in fields.get("generationConfig", {}):
        assert_as_declared(found, f"generationConfig.{name}", name, GOOGLE_CONFIG_FIELDS)
    assert len(fields) > 1  # the field was sent


@pytest.mark.parametrize("field", sorted(ANTHROPIC_HEADERS))
def test_what_anthropics_sdk_sends_as_a_header_is_in_no_body(field: str) -> None:
    assert json.loads(_anthropic(field)).keys() == {"model", "max_tokens", "messages"}


@pytest.mark.parametrize("field", sorted(GOOGLE_CLOUD_ONLY))
def test_what_googles_sdk_sends_to_its_cloud_only_is_not_sent(field: str) -> None:
    client = genai.Client(api_key="k")
    value = types.GenerateContentConfig.model_fields[field].annotation
    config = types.GenerateContentConfig.model_construct(**{field: True if value == bool | None else {}})
    with pytest.raises(ValueError, match="Gemini"):
        client.models.generate_content(model="m", contents="x", config=config)


def test_each_field_that_the_sdks_know_is_tried() -> None:
    """A new SDK with a new field fails here: decide about it."""
    assert fields_of(completion_create_params.CompletionCreateParamsStreaming) == CHAT.keys()
    assert (
        fields_of(
            response_create_params.ResponseCreateParamsStreaming,
            input_token_count_params.InputTokenCountParams,
        )
        == RESPONSES.keys()
    )
    assert (
        fields_of(
            message_create_params.MessageCreateParamsStreaming,
            message_count_tokens_params.MessageCountTokensParams,
            beta_create_params.MessageCreateParamsStreaming,
            beta_count_tokens_params.MessageCountTokensParams,
        )
        == ANTHROPIC.keys() | ANTHROPIC_HEADERS.keys()
    )
    unsent = GOOGLE_IN_THE_SDK | GOOGLE_CLOUD_ONLY
    assert set(types.GenerateContentConfig.model_fields) == GOOGLE.keys() | unsent


@pytest.mark.parametrize(
    "declared", [CHAT_FIELDS, RESPONSES_FIELDS, MESSAGES_FIELDS, GOOGLE_FIELDS, GOOGLE_CONFIG_FIELDS]
)
def test_each_field_is_declared_once(declared: DeclaredFields) -> None:
    kinds = [declared.served, declared.refused.keys(), declared.dropped.keys()]
    assert sum(len(kind) for kind in kinds) == len(set[str]().union(*kinds))


# -- fields that carry state: served or refused, never dropped --------------------------------------------------------

HEADS: dict[str, dict[str, Any]] = {
    "openai_chat": {"model": "m", "messages": USER},
    "openai_responses": {"model": "m", "input": "x"},
    "anthropic": {"model": "m", "max_tokens": 5, "messages": USER},
    "google": {"contents": [{"parts": [{"text": "x"}]}]},
}
STATE: dict[str, Any] = {
    "assistant_id": "asst_1",
    "checkpoint": "c",
    "compaction_control": {"enabled": True},
    "container": "c",
    "contextId": "c",
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "conversation": {"id": "conv_1"},
    "conversation_id": "c",
    "continue_final_message": True,
    "dataSources": [{"type": "azure_search"}],
    "data_sources": [{"type": "azure_search", "parameters": {}}],
    "datastore": "d",
    "documents": [{"text": "x"}],
    "fallbacks": [{"model": "n"}],
    "fallback_models": ["n"],
    "historyToken": "h",
    "knowledge_base": "k",
    "mcp_servers": [{"type": "url", "url": "https://x"}],
    "memory": True,
    "memory_store": {"id": "ms_1"},
    "memoryStoreId": "ms_1",
    "parent_thread": "t",
    "previousInteractionId": "i",
    "search_parameters": {"mode": "on"},
    "server_state": "s",
    "skills": [{"skill_id": "pdf"}],
    "system_prompt": "Be brief.",
    "thread_id": "t",
    "transforms": ["middle-out"],
    "vector_store_ids": ["vs_1"],
}
EXTRAS: dict[str, Any] = {
    "cache_salt": "s",
    "extra_body": {"a": 1},
    "include_reasoning": True,
    "keep_alive": "5m",
    "litellm_metadata": {"a": "b"},
    "priority": 1,
    "provider": {"order": ["a"]},
    "session_id": "s",
    "skip_special_tokens": False,
    "tags": ["a"],
    "trace_id": "t",
    "usage": {"include": True},
    "user_id": "u",
}
EMPTY: list[Any] = [None, "", [], {}, False]


def with_field(dialect: str, field: str, value: Any) -> ModelCall | InvalidRequest:
    return outcome(dialect, json.dumps(HEADS[dialect] | {field: value}).encode())


@pytest.mark.parametrize("dialect", HEADS)
@pytest.mark.parametrize("field", STATE)
def test_a_field_that_carries_state_is_refused_by_its_name(dialect: str, field: str) -> None:
    found = with_field(dialect, field, STATE[field])
    assert isinstance(found, InvalidRequest), found
    assert found.details["param"].startswith(field)
    assert "eave" in found.message, "it says what to do"


@pytest.mark.parametrize("dialect", HEADS)
@pytest.mark.parametrize("field", STATE)
def test_a_field_that_would_carry_state_is_harmless_while_it_is_empty(dialect: str, field: str) -> None:
    of_its_type = [None, type(STATE[field])()]
    for value in EMPTY if field not in {"container", "conversation", "context_management"} else of_its_type[:1]:
        if field in {"fallbacks", "mcp_servers"} and dialect == "anthropic" and value not in (None, []):
            continue
        assert isinstance(with_field(dialect, field, value), ModelCall), value


@pytest.mark.parametrize("dialect", HEADS)
@pytest.mark.parametrize("field", EXTRAS)
def test_a_vendors_extra_without_state_goes_by_and_is_named(dialect: str, field: str) -> None:
    found = with_field(dialect, field, EXTRAS[field])
    assert isinstance(found, ModelCall), found
    assert field in found.dropped
    assert field in found.undeclared


THOUGHT: list[Any] = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "a"}]
TALK: list[Any] = [*USER, {"role": "assistant", "content": THOUGHT}] * 2 + USER

THINKING: dict[str, Any] = {"type": "clear_thinking_20251015"}
CLEARING: dict[str, Any] = {"type": "clear_tool_uses_20250919"}


@pytest.mark.parametrize(
    ("messages", "edits", "refused"),
    [
        (TALK, [], None),
        (TALK, None, None),
        (TALK, [{"type": "clear_thinking_20251015", "keep": "all"}], None),
        (TALK, [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}], None),
        (TALK, [THINKING | {"keep": {"type": "thinking_turns", "value": 2}}], None),
        (TALK, [THINKING | {"keep": {"type": "thinking_turns", "value": 1}}], THINKING["type"]),
        (TALK, [{"type": "clear_thinking_20251015"}], THINKING["type"]),
        (USER, [{"type": "clear_thinking_20251015"}], None),
        (TALK, [{"type": "clear_thinking_20251015", "keep": "some"}], "keep"),
        (USER, [CLEARING | {"trigger": {"type": "tool_uses", "value": 3}}], CLEARING["type"]),
        (USER, [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "compact_20260112"}], "compact_20260112"),
        (USER, [{"type": "clear_all_20990101"}], "clear_all_20990101"),
    ],
)
def test_an_edit_of_the_context_is_refused_where_it_would_take_effect(
    messages: list[Any], edits: list[Any] | None, refused: str | None
) -> None:
    fields = {"model": "claude", "max_tokens": 5, "messages": messages, "context_management": {"edits": edits}}
    found = outcome("anthropic", json.dumps(fields).encode())
    if refused is None:
        assert isinstance(found, ModelCall), found
        assert "context_management" not in found.dropped
    else:
        assert isinstance(found, InvalidRequest)
        assert refused in found.message


def test_claude_code_understands_which_edit_and_which_field_it_is_to_leave_out() -> None:
    """By these patterns, in version 2.1, it tries the same call again without them."""
    edit = with_field("anthropic", "context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]})
    pattern = r"\S{1,128} does not support the \W?clear_tool_uses_20250919\W? context management strategy"
    assert re.match(pattern, edit.message if isinstance(edit, InvalidRequest) else "")
    fallbacks = with_field("anthropic", "fallbacks", [{"model": "n"}])
    assert re.search("The `fallbacks?` parameter is not supported ", str(fallbacks))


@pytest.mark.parametrize("value", ["auto", "disabled", None])
def test_truncation_cuts_nothing_off_and_is_repeated(value: str | None) -> None:
    found = with_field("openai_responses", "truncation", value)
    assert isinstance(found, ModelCall)
    assert (found.dropped, found.echo.get("truncation")) == ((), value)


def test_an_unknown_truncation_is_refused() -> None:
    found = with_field("openai_responses", "truncation", "middle")
    assert isinstance(found, InvalidRequest)
    assert found.details["param"] == "truncation"
