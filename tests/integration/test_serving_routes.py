"""The engine routes, judged by the official SDK."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from gangline.models.engine_server.app import PortUnavailable, run_app
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler, open_tokenizer, scripted_server
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.engines.tokenizers import qwen3_folder, smollm2_name
from support.sdk.http_calls import status_of

TEXT = "Hello wörld 日本, done.\nThe end."
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
SCRIPT: dict[str, Any] = {
    "model": "m",
    "context_length": 2000,
    "weight_version": 3,
    "rules": [
        {"pattern": "think", "thinking": "hm, 日", "text": "yes"},
        {"pattern": "bytes", "text": TEXT, "split": "bytes"},
        {"pattern": "twice", "tool_calls": [{"run": "ls"}, {"run": "ls"}]},
        {"pattern": "call", "text": "I look.", "tool_calls": [{"run": "echo hé"}, {"run": "ls"}]},
    ],
    "default": {"text": TEXT},
}
IDS = {"return_token_ids": True}


@pytest_asyncio.fixture
async def url() -> AsyncGenerator[str, None]:
    async with scripted_server(SCRIPT) as base_url:
        yield base_url


@pytest_asyncio.fixture
async def client(url: str) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as sdk:
        yield sdk


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def chat(client: openai.AsyncOpenAI, text: str = "hi", **fields: Any) -> dict[str, Any]:
    reply = await client.chat.completions.create(model="m", messages=says(text), **fields)
    return reply.model_dump()


async def streamed(client: openai.AsyncOpenAI, text: str = "hi", **fields: Any) -> list[dict[str, Any]]:
    stream = await client.chat.completions.create(model="m", messages=says(text), stream=True, **fields)
    return [chunk.model_dump() async for chunk in stream]


def joined(chunks: list[dict[str, Any]], field: str, index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(choice["delta"].get(field) or "" for choice in choices)


async def post(url: str, body: dict[str, Any] | bytes) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, data=data) as response:
        return response.status, await response.json()


async def test_a_chat_reply_carries_text_ids_logprobs_versions_and_usage(client: openai.AsyncOpenAI) -> None:
    reply = await chat(client, logprobs=True, top_logprobs=1, extra_body={**IDS, "return_weight_versions": True})
    (choice,) = reply["choices"]
    tokenizer = TinyTokenizer()
    assert choice["message"]["content"] == TEXT
    assert choice["token_ids"] == [*tokenizer.encode(TEXT), *tokenizer.eos_ids]
    assert reply["prompt_token_ids"] == tokenizer.render(says("hi"))
    entries = choice["logprobs"]["content"]
    assert [e["token"] for e in entries] == [tokenizer.decode([i]) for i in choice["token_ids"]]
    assert all(e["logprob"] < 0 and e["top_logprobs"][0]["logprob"] == e["logprob"] for e in entries)
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": len(entries)}]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert reply["usage"]["completion_tokens"] == len(entries)
    assert reply["usage"]["prompt_tokens"] == len(reply["prompt_token_ids"])


async def test_token_fields_come_only_when_asked_for(url: str) -> None:
    _, reply = await post(f"{url}/v1/chat/completions", {"messages": says("hi")})
    assert "prompt_token_ids" not in reply
    assert reply["choices"][0]["logprobs"] is None
    assert not {"token_ids", "weight_versions"} & reply["choices"][0].keys()


@pytest.mark.parametrize("text", ["hi", "bytes", "think", "call"])
async def test_a_stream_says_what_the_whole_reply_says(client: openai.AsyncOpenAI, text: str) -> None:
    asked: dict[str, Any] = {"logprobs": True, "tools": [BASH], "extra_body": IDS}
    whole = await chat(client, text, **asked)
    chunks = await streamed(client, text, **asked, stream_options={"include_usage": True})
    message, choices = whole["choices"][0]["message"], [c for chunk in chunks for c in chunk["choices"]]
    assert joined(chunks, "content") == (message["content"] or "")
    assert joined(chunks, "reasoning") == (message["reasoning"] or "")
    calls = [call for c in choices for call in c["delta"]["tool_calls"] or []]
    assert [(c["id"], c["function"]) for c in calls] == [(c["id"], c["function"]) for c in message["tool_calls"] or []]
    assert [c["index"] for c in calls] == list(range(len(calls)))
    ids = [i for c in choices for i in c.get("token_ids") or []]
    assert ids == whole["choices"][0]["token_ids"]
    logprobs = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert logprobs == whole["choices"][0]["logprobs"]["content"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any(chunk.get("prompt_token_ids") for chunk in chunks[1:])
    assert choices[0]["delta"]["role"] == "assistant"
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


async def test_characters_split_over_tokens_never_show_up_broken(client: openai.AsyncOpenAI) -> None:
    chunks = await streamed(client, "bytes", extra_body=IDS)
    deltas = [c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]]
    assert "".join(deltas) == TEXT
    assert not any("�" in delta for delta in deltas)
    assert len([i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids") or []]) > len(TEXT)


async def test_tool_calls_and_thoughts_are_parsed(client: openai.AsyncOpenAI) -> None:
    called = (await chat(client, "call", tools=[BASH]))["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    assert called["message"]["content"] == "I look.\n"
    functions = [call["function"] for call in called["message"]["tool_calls"]]
    assert functions == [
        {"name": "bash", "arguments": '{"command": "echo hé"}'},
        {"name": "bash", "arguments": '{"command": "ls"}'},
    ]
    assert len({call["id"] for call in called["message"]["tool_calls"]}) == 2
    thought = (await chat(client, "think"))["choices"][0]["message"]
    assert (thought["reasoning"], thought["content"]) == ("\nhm, 日\n", "\n\nyes")


async def test_equal_calls_in_one_reply_have_ids_of_their_own(client: openai.AsyncOpenAI) -> None:
    calls = (await chat(client, "twice", tools=[BASH]))["choices"][0]["message"]["tool_calls"]
    assert calls[0]["function"] == calls[1]["function"]
    assert calls[0]["id"] != calls[1]["id"]


async def test_hidden_reasoning_keeps_its_ids(client: openai.AsyncOpenAI) -> None:
    shown = await chat(client, "think", extra_body=IDS)
    hidden = await chat(client, "think", extra_body={**IDS, "include_reasoning": False})
    assert hidden["choices"][0]["message"]["reasoning"] is None
    assert hidden["choices"][0]["token_ids"] == shown["choices"][0]["token_ids"]


async def test_with_tool_choice_none_a_call_stays_text(client: openai.AsyncOpenAI) -> None:
    choice = (await chat(client, "call", tools=[BASH], tool_choice="none"))["choices"][0]
    assert "<tool_call>" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


async def test_the_sdks_own_stream_accumulator_agrees(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="m", messages=says("call"), tools=[BASH]) as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert [call.function.arguments for call in message.tool_calls or []] == [
        '{"command": "echo hé"}',
        '{"command": "ls"}',
    ]


async def test_several_choices_stream_side_by_side(client: openai.AsyncOpenAI) -> None:
    whole = await chat(client, n=3)
    assert [c["message"]["content"] for c in whole["choices"]] == [TEXT] * 3
    chunks = await streamed(client, n=3, stream_options={"include_usage": True}, extra_body=IDS)
    assert [bool(chunk.get("prompt_token_ids")) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert [joined(chunks, "content", index) for index in range(3)] == [TEXT] * 3
    assert chunks[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_cuts_the_text_and_keeps_the_ids(client: openai.AsyncOpenAI, include: bool) -> None:
    extra = {**IDS, "include_stop_str_in_output": include}
    choice = (await chat(client, stop=["nowhere", "本, do"], extra_body=extra))["choices"][0]
    assert choice["message"]["content"] == ("Hello wörld 日本, do" if include else "Hello wörld 日")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "本, do")
    sampled = TinyTokenizer().decode(choice["token_ids"])
    assert sampled.startswith("Hello wörld 日本, do")
    assert len(sampled) < len(TEXT)
    chunks = await streamed(client, stop=["nowhere", "本, do"], extra_body=extra)
    assert joined(chunks, "content") == choice["message"]["content"]


async def test_a_named_stop_id_ends_the_reply_and_is_its_reason(client: openai.AsyncOpenAI) -> None:
    tokenizer = TinyTokenizer()
    comma = tokenizer.encode(",")[0]
    choice = (await chat(client, extra_body={**IDS, "stop_token_ids": [comma]}))["choices"][0]
    assert choice["token_ids"][-1] == choice["stop_reason"] == comma
    assert choice["message"]["content"] == "Hello wörld 日本"


async def test_max_tokens_ends_the_reply_for_length(client: openai.AsyncOpenAI) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        choice = (await chat(client, extra_body={**IDS, field: 2}))["choices"][0]
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_exact_prompt_ids_replace_the_rendering_and_are_echoed(url: str, stream: bool) -> None:
    exact = [5, 4, 3, 2, 1]
    body = {"messages": says("hi"), "kv_transfer_params": {"prompt_token_ids": exact}, **IDS}
    if not stream:
        _, reply = await post(f"{url}/v1/chat/completions", body)
        assert reply["prompt_token_ids"] == exact
        assert reply["usage"]["prompt_tokens"] == 5
        return
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as sdk:
        chunks = await streamed(sdk, extra_body={k: v for k, v in body.items() if k != "messages"})
    assert chunks[0]["prompt_token_ids"] == exact


async def test_completions_take_text_or_ids(client: openai.AsyncOpenAI) -> None:
    ids = TinyTokenizer().encode("once")
    for prompt in ("once", ids):
        reply = await client.completions.create(model="m", prompt=prompt, logprobs=1, n=2, extra_body=IDS)
        assert [choice.index for choice in reply.choices] == [0, 1]
        for choice in reply.model_dump()["choices"]:
            assert choice["text"] == TEXT
            assert choice["prompt_token_ids"] == ids
            assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 2 * len(choice["token_ids"])


async def test_completions_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="m", prompt="once", stream=True, stop="done", logprobs=0, extra_body=IDS
    )
    choices = [chunk.model_dump()["choices"][0] async for chunk in stream]
    assert "".join(choice["text"] for choice in choices) == "Hello wörld 日本, "
    assert choices[0]["prompt_token_ids"] == TinyTokenizer().encode("once")
    assert choices[-1]["stop_reason"] == "done"
    assert all(len(c["token_ids"]) == len(c["logprobs"]["tokens"]) for c in choices)


async def test_tokenize_render_and_detokenize_agree_with_the_prompt(url: str) -> None:
    asked = {"messages": says("hi"), "tools": [BASH]}
    _, reply = await post(f"{url}/v1/chat/completions", {**asked, **IDS})
    _, tokenized = await post(f"{url}/tokenize", asked)
    _, rendered = await post(f"{url}/v1/chat/completions/render", asked)
    assert tokenized["tokens"] == rendered["token_ids"] == reply["prompt_token_ids"]
    assert (tokenized["count"], tokenized["max_model_len"]) == (len(tokenized["tokens"]), 2000)
    _, text = await post(f"{url}/detokenize", {"tokens": tokenized["tokens"]})
    assert "<|im_start|>user\nhi<|im_end|>" in text["prompt"]
    _, encoded = await post(f"{url}/tokenize", {"prompt": "hi there"})
    assert encoded["tokens"] == TinyTokenizer().encode("hi there")


async def test_models_health_and_version_answer(client: openai.AsyncOpenAI, url: str) -> None:
    (model,) = (await client.models.list()).data
    assert (model.id, model.model_dump()["max_model_len"], model.owned_by) == ("m", 2000, "gangline")
    assert (await client.models.retrieve("m")).id == "m"
    async with aiohttp.ClientSession(url) as session:
        for path in ("/health", "/version"):
            assert await status_of(session, "GET", path) == 200


async def test_errors_have_openais_shape(client: openai.AsyncOpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="other", messages=says("hi"))
    assert "`other`" in unknown.value.message
    with pytest.raises(openai.BadRequestError) as overflow:
        await chat(client, max_tokens=5000)
    assert overflow.value.code == "context_length_exceeded"
    assert "maximum context length is 2000 tokens" in overflow.value.message
    for body, param in ((b"{nonsense", None), (b'{"messages": [], "n": "two"}', "n")):
        status, answer = await post(f"{url}/v1/chat/completions", body)
        assert status == 400
        assert answer["error"].keys() == {"message", "type", "param", "code"}
        assert answer["error"]["param"] == param
    status, answer = await post(f"{url}/v1/nothing", {})
    assert (status, answer["error"]["code"]) == (404, 404)


async def test_the_same_request_gets_the_same_reply(client: openai.AsyncOpenAI) -> None:
    replies = [await chat(client, "call", tools=[BASH], logprobs=True, extra_body=IDS) for _ in range(2)]
    assert replies[0]["choices"] == replies[1]["choices"]


async def test_a_port_in_use_is_said_clearly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sampler = ScriptedSampler(Script(), TinyTokenizer())
        with pytest.raises(PortUnavailable, match=f"127.0.0.1:{port}: it is in use"):
            await run_app(sampler, host="127.0.0.1", port=port)


async def test_qwen3_history_renders_back_to_the_very_ids_that_were_sampled() -> None:
    """The wire and the scripted format together: what a client echoes is what the template writes."""
    tokenizer = open_tokenizer(qwen3_folder())
    async with (
        scripted_server(SCRIPT, tokenizer) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as sdk,
    ):
        first = await chat(sdk, "call", tools=[BASH], extra_body=IDS)
        message = first["choices"][0]["message"]
        message["content"] = message["content"].rstrip("\n")  # the template writes this newline itself
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
        _, second = await post(f"{url}/tokenize", {"messages": [*says("call"), message, result], "tools": [BASH]})
    sampled = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["tokens"][: len(sampled)] == sampled


async def test_smollm2_replies_are_written_and_parsed_too() -> None:
    async with (
        scripted_server(SCRIPT, smollm2_name()) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as sdk,
    ):
        choice = (await chat(sdk, "bytes", logprobs=True, extra_body=IDS))["choices"][0]
        called = (await chat(sdk, "call", tools=[BASH]))["choices"][0]
    assert choice["message"]["content"] == TEXT
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == len(TEXT.encode()) + 1
    assert called["finish_reason"] == "tool_calls"


async def test_the_route_of_ids_gives_ids_logprobs_and_versions(url: str) -> None:
    prompt = TinyTokenizer().encode("hi")
    body = {"token_ids": prompt, "sampling_params": {"logprobs": 1, "n": 2}, "return_token_ids": True}
    status, reply = await post(f"{url}/inference/v1/generate", body)
    assert status == 200
    assert reply["prompt_token_ids"] == prompt
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    for choice in reply["choices"]:
        ids = choice["token_ids"]
        assert TinyTokenizer().decode(ids) == f"{TEXT}<|im_end|>"
        assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == ids
        assert all(entry["logprob"] < 0 and len(entry["top_logprobs"]) == 1 for entry in choice["logprobs"]["content"])
        assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": len(ids)}]
        assert choice["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 2 * len(ids)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"token_ids": [1]}, 400, "sampling_params"),
        ({"token_ids": [], "sampling_params": {}}, 400, "prompt"),
        ({"token_ids": [-1], "sampling_params": {}}, 400, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"top_p": 2}}, 400, "top_p"),
        ({"token_ids": [1], "sampling_params": {}, "model": "other"}, 404, "model"),
        ({"token_ids": [1] * 3000, "sampling_params": {}}, 400, "input_tokens"),
    ],
)
async def test_the_route_of_ids_names_what_is_wrong(url: str, body: dict[str, Any], status: int, param: str) -> None:
    found, reply = await post(f"{url}/inference/v1/generate", body)
    assert (found, reply["error"]["param"]) == (status, param)


async def test_tools_with_odd_parameters_are_no_failure(url: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": 5}}]
    status, _ = await post(f"{url}/v1/chat/completions", {"messages": says("hi"), "tools": tools})
    assert status == 200
