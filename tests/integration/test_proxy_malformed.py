"""Ten thousand malformed bodies a dialect, through the proxy: each is a 4xx in the provider's shape, none is a turn."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest

from gangline.domain.errors import InvalidRequest
from gangline.settings import plugins
from gangline.wire.dialects.contract import Dialect, RawRequest
from support.engines.held import HeldEngine
from support.node.proxy import proxied_engine

NUM_BODIES = 10_000
NUM_AT_ONCE = 16

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}

CHAT = {
    "model": "m",
    "max_tokens": 8,
    "temperature": 0.5,
    "stop": ["END"],
    "tools": [{"type": "function", "function": {"name": "bash", "description": "runs", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "bash"}},
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ],
}
RESPONSES = {
    "model": "m",
    "instructions": "s",
    "max_output_tokens": 8,
    "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA}],
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "function_call", "call_id": "1", "name": "bash", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "done"},
    ],
}
ANTHROPIC = {
    "model": "m",
    "max_tokens": 8,
    "system": [{"type": "text", "text": "s"}],
    "tools": [{"name": "bash", "input_schema": SCHEMA}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "bash", "input": {"command": "ls"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "done"}]},
    ],
}
GOOGLE = {
    "systemInstruction": {"parts": [{"text": "s"}]},
    "contents": [
        {"role": "user", "parts": [{"text": "u"}]},
        {"role": "model", "parts": [{"functionCall": {"id": "1", "name": "bash", "args": {"command": "ls"}}}]},
        {"role": "user", "parts": [{"functionResponse": {"id": "1", "name": "bash", "response": {"output": "done"}}}]},
    ],
    "tools": [{"functionDeclarations": [{"name": "bash", "parametersJsonSchema": SCHEMA}]}],
    "generationConfig": {"temperature": 0.5, "maxOutputTokens": 8, "stopSequences": ["END"]},
}


def error_of_openai(body: dict[str, Any]) -> bool:
    return {"message", "type", "param", "code"} <= body["error"].keys()


def error_of_anthropic(body: dict[str, Any]) -> bool:
    return body["type"] == "error" and {"type", "message"} <= body["error"].keys()


def error_of_google(body: dict[str, Any]) -> bool:
    return {"code", "message", "status"} <= body["error"].keys()


Shape = Callable[[dict[str, Any]], bool]
CASES: dict[str, tuple[str, dict[str, Any], Shape]] = {
    "openai_chat": ("/v1/chat/completions", CHAT, error_of_openai),
    "openai_responses": ("/v1/responses", RESPONSES, error_of_openai),
    "anthropic": ("/v1/messages", ANTHROPIC, error_of_anthropic),
    "google": ("/v1beta/models/m:generateContent", GOOGLE, error_of_google),
}
PARAMS = {"model": "m", "method": "generateContent"}
"""What the path of a Google call says; the others have none."""

JUNK: list[Any] = [None, True, -1, 0.5, 1e308, 2**70, "", "x", "\u0000", [], [1], [[]], {}, {"type": "x"}, {"text": 1}]


def mutated(value: Any, chance: random.Random) -> Any:
    """`value` with one place, at any depth, removed or replaced by junk."""
    if isinstance(value, dict | list) and value and chance.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, copy = chance.choice(keys), value.copy()
        if chance.random() < 0.15:
            del copy[key]
        else:
            copy[key] = mutated(value[key], chance)
        return copy
    return chance.choice(JUNK)


def malformed(dialect: Dialect, valid: dict[str, Any]) -> Iterator[bytes]:
    """Bodies that the dialect refuses: values changed at random, one in eight cut off in the middle."""
    chance = random.Random(20261121)
    while True:
        body = json.dumps(mutated(mutated(valid, chance), chance)).encode()
        if chance.random() < 0.125:
            body = body[: chance.randrange(len(body))]
        try:
            dialect.parse_call(RawRequest(body=body, params=PARAMS))
        except InvalidRequest:
            yield body


@pytest.mark.parametrize("name", CASES)
async def test_ten_thousand_malformed_bodies_are_each_refused_in_shape_and_none_is_a_turn(name: str) -> None:
    path, valid, has_shape = CASES[name]
    dialect: Dialect = plugins.load("dialect", name)()
    dialect.parse_call(RawRequest(body=json.dumps(valid).encode(), params=PARAMS))  # it is valid before it is broken
    bodies = malformed(dialect, valid)
    async with proxied_engine(HeldEngine()) as running, aiohttp.ClientSession() as http:
        key = running.session.key
        headers = {"authorization": f"Bearer {key}", "x-api-key": key, "x-goog-api-key": key}

        async def send(num: int) -> None:
            for _ in range(num):
                body = next(bodies)
                async with http.post(f"{running.url}/s/s1{path}", data=body, headers=headers) as answer:
                    told = await answer.json()
                    assert 400 <= answer.status < 500, (body, told)
                    assert has_shape(told), (body, told)

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_AT_ONCE):
                group.create_task(send(NUM_BODIES // NUM_AT_ONCE))
        assert running.session.num_calls == 0
        assert running.journal.completions == []
