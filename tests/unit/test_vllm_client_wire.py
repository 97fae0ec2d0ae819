"""vLLM's bodies: what is asked for, and what odd answers become."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text, ToolChoice, ToolDefinition
from gangline.domain.errors import EngineUnavailable
from gangline.domain.tokens import token_ids
from gangline.models.engines.contract import EngineCapabilities, EngineChoice, EngineRequest
from gangline.models.engines.fields import NEUTRAL_SAMPLING, messages_in_turns, sent_ids
from gangline.models.engines.sglang.wire import chat_body as sglang_body
from gangline.models.engines.vllm.wire import WireReply, chat_body, decode, decode_reply, engine_reply
from gangline.node.capture.capture import Prompt, completion_of
from gangline.node.capture.placing import PlaceIndex

CALL = ModelCall(dialect="openai_chat", model="asked", messages=(Message("developer", (Text("hi"),)),))
CAPABILITIES = EngineCapabilities(
    engine="vllm",
    version="0.32",
    model="served",
    max_context=None,
    reports_ids=True,
    takes_prompt_ids=True,
    streams_ids=True,
    renders=True,
    logprob_kind="processed",
)


def _choice(ids: list[int] | None, values: list[float | None] | None) -> EngineChoice:
    logprobs = None if values is None else {"content": [{"token": "t", "logprob": value} for value in values]}
    choice = {"index": 0, "message": {"content": "x"}, "finish_reason": "stop", "token_ids": ids, "logprobs": logprobs}
    body = json.dumps({"choices": [choice], "prompt_token_ids": [1]}).encode()
    return engine_reply(decode(body, WireReply, "URL")).choices[0]


def record_of(call: ModelCall, choice: EngineChoice) -> Completion:
    return completion_of(
        call,
        PlaceIndex(CompletionTree()).place(call),
        Prompt(source="engine", context="first", parent_id=None, shared=0, suffix_ids=token_ids([1])),
        choice,
        CAPABILITIES,
        session_id="s",
        attempt=1,
        started_at=0.0,
        finished_at=1.0,
    )


async def vllm_fields(request: EngineRequest, *, stream: bool = False) -> dict[str, Any]:
    """Of the body that vLLM is sent."""
    messages = await messages_in_turns(request.call.messages)
    return json.loads(
        b"".join(chat_body(request, "served", messages, sent_ids(request.prompt_ids, request.call), stream=stream))
    )


async def sglang_fields(request: EngineRequest) -> dict[str, Any]:
    messages, sent = await messages_in_turns(request.call.messages), sent_ids(request.prompt_ids, request.call)
    return json.loads(b"".join(sglang_body(request, "m", messages, sent)))


async def test_a_request_asks_for_everything_that_makes_it_trainable() -> None:
    body = await vllm_fields(EngineRequest(call=CALL, prompt_ids=token_ids([1, 2])), stream=True)
    assert body == {
        "model": "served",
        "messages": [{"role": "system", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": False,
        "return_weight_versions": True,
        "include_reasoning": True,
        "kv_transfer_params": {"prompt_token_ids": [1, 2]},
        **NEUTRAL_SAMPLING,
    }


async def test_what_a_request_does_not_say_is_said_so_that_no_model_says_it() -> None:
    """Else a server takes temperature and top-k from the model's `generation_config`."""
    asked = msgspec.structs.replace(CALL, sampling=SamplingParams(temperature=0.5, top_k=7))
    for fields in (await vllm_fields(EngineRequest(call=asked)), await sglang_fields(EngineRequest(call=asked))):
        said = {name: fields[name] for name in NEUTRAL_SAMPLING}
        assert said == NEUTRAL_SAMPLING | {"temperature": 0.5, "top_k": 7}


@pytest.mark.parametrize(
    ("changes", "constraint"),
    [
        ({}, None),
        ({"tools": (ToolDefinition("f"),), "tool_choice": ToolChoice("auto")}, None),
        ({"tools": (ToolDefinition("f"),), "tool_choice": ToolChoice("required")}, "tool_choice"),
        ({"tools": (ToolDefinition("f"),), "tool_choice": ToolChoice("named", "f")}, "tool_choice"),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_bends_the_distribution_beyond_the_sampling_parameters_is_recorded(
    changes: dict[str, Any], constraint: str | None
) -> None:
    assert (
        record_of(msgspec.structs.replace(CALL, **changes), _choice([1], [-0.5])).certificate.constraint == constraint
    )


async def test_tools_and_their_choice_are_asked_for_in_openais_words() -> None:
    call = ModelCall(
        dialect="d",
        model="m",
        messages=(),
        tools=(ToolDefinition("f", None, {"type": "object"}),),
        tool_choice=ToolChoice("named", "f"),
        parallel_tool_calls=False,
    )
    body = await vllm_fields(EngineRequest(call=call))
    assert body["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert body["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("ids", "values", "reason"),
    [
        ([1, 2], [-0.5, -1.0], None),
        ([1, 2], [-0.5, 0.0], None),
        ([1, 2], [-0.5, None], "log-prob of sampled token 1 is not finite"),
        ([1, 2], [-0.5, float("nan")], "log-prob of sampled token 1 is not finite"),
        ([1, 2], [-9999.0, -0.5], "log-prob of sampled token 0 is -9999.0"),
        ([1, 2], [0.5, -0.5], "log-prob of sampled token 0 is positive"),
        ([1, 2], [-0.5], "1 log-probs for 2 sampled ids"),
        ([1, 2], None, "no log-probs"),
        ([], [], "no sampled ids"),
    ],
)
def test_a_record_is_trainable_only_with_one_good_log_prob_per_id(
    ids: list[int], values: list[Any] | None, reason: str | None
) -> None:
    completion = record_of(CALL, _choice(ids, values))
    assert completion.certificate.untrainable == reason
    assert completion.trainable == (reason is None)
    assert len(completion.logprobs) == len(completion.sampled_ids) == len(ids)
    assert completion.certificate.logprobs == ("missing" if values is None else "processed")


def test_versions_are_numbers_with_or_without_a_v() -> None:
    spans = [{"version": version, "start": 0, "end": 1} for version in ("v7", "8", 9, "main")]
    choice = {"finish_reason": "stop", "token_ids": [1], "weight_versions": spans}
    body = json.dumps({"choices": [choice], "prompt_token_ids": [1]}).encode()
    found = engine_reply(decode(body, WireReply, "URL")).choices[0]
    assert [span.version for span in found.version_spans] == [7, 8, 9]
    assert found.sampled_ids is not None
    assert found.sampled_ids.dtype == np.int32


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"choices": 3}', b"[]", b'{"choices": [{"token_ids": ["x"]}]}'])
def test_an_answer_that_is_no_reply_is_the_engines_fault_and_is_quoted(body: bytes) -> None:
    with pytest.raises(EngineUnavailable, match="URL"):
        decode(body, WireReply, "URL")


def test_the_prompts_ids_are_the_replys_own_whatever_else_has_their_name() -> None:
    echoed: dict[str, Any] = {"choices": [], "kv_transfer_params": {"prompt_token_ids": [7, 8]}}
    for fields, ids in (
        (echoed, None),
        (echoed | {"prompt_token_ids": [1, 2]}, [1, 2]),
        ({"prompt_token_ids": [3]}, [3]),
    ):
        reply = engine_reply(decode_reply(json.dumps(fields).encode(), WireReply, "URL"))
        assert (None if reply.prompt_ids is None else reply.prompt_ids.tolist()) == ids
    with pytest.raises(EngineUnavailable, match="no token ids"):
        engine_reply(decode_reply(b'{"prompt_token_ids": [1, "x"]}', WireReply, "URL"))
