"""A session's model under the paths that clients make of other base URLs, and vLLM's `/tokenize` within a session."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from support.node.proxy import Proxied, proxied

SAID = [{"role": "user", "content": "How are you?"}]
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}
SCRIPT = {"default": {"text": "fine"}}

BODIES: dict[str, dict[str, Any]] = {
    "openai_chat": {"model": "m", "messages": SAID},
    "anthropic": {"model": "m", "max_tokens": 9, "messages": SAID},
    "openai_responses": {"model": "m", "input": "How are you?"},
    "google": {"contents": [{"role": "user", "parts": [{"text": "How are you?"}]}]},
}
PATHS = {
    "/chat/completions": "openai_chat",
    "/openai/chat/completions": "openai_chat",
    "/openai/v1/chat/completions": "openai_chat",
    "/api/v1/chat/completions": "openai_chat",
    "/api/openai/v1/chat/completions": "openai_chat",
    "/v1/v1/chat/completions": "openai_chat",
    "/v1beta/openai/chat/completions": "openai_chat",
    "/messages": "anthropic",
    "/v1/v1/messages?beta=true": "anthropic",
    "/anthropic/v1/messages": "anthropic",
    "/responses": "openai_responses",
    "/openai/v1/responses": "openai_responses",
    "/models/m:generateContent": "google",
    "/gemini/v1beta/models/openai/m:generateContent": "google",
}


async def _ask(running: Proxied, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {running.session.key}", "x-api-key": running.session.key}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.request(method, running.url + path, json=body) as response,
    ):
        return response.status, await response.json()


@pytest.mark.parametrize("path", PATHS)
async def test_an_alias_is_answered_below_a_session_and_by_the_key_alone(path: str) -> None:
    dialect = PATHS[path]
    async with proxied(SCRIPT) as running:
        for base in ("/s/s1", "/sessions/s1", ""):
            status, answer = await _ask(running, "POST", base + path, BODIES[dialect])
            assert status == 200, answer
        assert [one.dialect for one in running.journal.completions] == [dialect] * 3


@pytest.mark.parametrize("path", ["/models", "/openai/v1/models", "/v1/v1/models", "/api/v1/models"])
async def test_the_list_of_models_has_the_same_aliases(path: str) -> None:
    async with proxied(SCRIPT) as running:
        status, answer = await _ask(running, "GET", f"/s/s1{path}")
        assert (status, answer["data"][0]["id"]) == (200, "scripted")


@pytest.mark.parametrize("path", ["/v1/completions", "/completions", "/openai/v1/completions"])
async def test_a_completion_of_bare_text_is_told_what_to_use(path: str) -> None:
    async with proxied(SCRIPT) as running:
        for base in ("/s/s1", ""):
            status, answer = await _ask(running, "POST", base + path, {"model": "m", "prompt": "Once"})
            assert status == 404
            assert f"{base}{path} is not served here. Use /v1/chat/completions" in answer["error"]["message"]
        assert running.session.num_calls == 0


@pytest.mark.parametrize("path", ["/v1/tokenize", "/tokenize", "/openai/v1/tokenize"])
@pytest.mark.parametrize("tools", [[], [TOOL]])
async def test_tokenize_tells_the_prompt_of_the_call_and_samples_nothing(path: str, tools: list[Any]) -> None:
    body = {"model": "m", "messages": SAID, "tools": tools}
    async with proxied(SCRIPT) as running:
        status, told = await _ask(running, "POST", f"/s/s1{path}", body | {"add_generation_prompt": True})
        assert status == 200, told
        assert running.session.num_calls == 0
        await _ask(running, "POST", "/s/s1/v1/chat/completions", body)
        (completion,) = running.journal.completions
        prompt = running.session.tree.prompt_ids(completion).tolist()
        assert told["tokens"] == prompt
        assert told["count"] == len(prompt)
        assert told["max_model_len"] > told["count"]
        assert set(told) == {"count", "max_model_len", "tokens", "token_strs"}  # vLLM's


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "Once"}, "prompt"),
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": SAID, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": SAID, "return_token_strs": True}, "return_token_strs"),
        ([], None),
    ],
)
async def test_tokenize_refuses_what_it_would_answer_wrongly(body: Any, param: str | None) -> None:
    async with proxied(SCRIPT) as running:
        status, told = await _ask(running, "POST", "/s/s1/v1/tokenize", body)
        assert (status, told["error"]["param"]) == (400, param)


async def test_tokenize_wants_the_sessions_key() -> None:
    async with (
        proxied(SCRIPT) as running,
        aiohttp.ClientSession() as client,
        client.post(f"{running.url}/s/s1/tokenize", json={"messages": SAID}) as response,
    ):
        assert response.status == 401
