"""Calls in tokens: exact prompt ids in, sampled ids and log-probs out, in the same record as the session's others."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gangline.domain.completion import CompletionTree
from gangline.domain.node_views import OpenedSession
from gangline.models.engines.replies import plain_ids
from gangline.rows.audit import audit
from gangline.serving.scripted.server import scripted_server
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.node.node import RunningNode, running_node

SCRIPT = {"default": {"text": "as you wish"}, "weight_version": 7}
PROMPT = TinyTokenizer().encode("once upon a time")


@pytest.fixture
async def node(tmp_path: Path) -> AsyncGenerator[RunningNode]:
    async with scripted_server(SCRIPT) as url, running_node(tmp_path, url) as running:
        yield running


async def generate(node: RunningNode, opened: OpenedSession, ids: list[int], **fields: Any) -> tuple[int, Any]:
    path = f"/s/{opened.session_id}/generate"
    return await node.ask("POST", path, {"prompt_ids": ids, **fields}, opened.api_key)


async def test_sampled_ids_and_logprobs_come_back_and_are_recorded(node: RunningNode) -> None:
    opened = await node.client.open_session()
    status, reply = await generate(node, opened, PROMPT)
    assert status == 200
    assert reply["prompt_ids"] == PROMPT
    assert reply["finish_reason"] == "stop"
    assert reply["version_spans"] == [{"version": 7, "start": 0, "end": len(reply["output_ids"])}]
    result = await node.client.finalize(opened.session_id, completions=True)
    (completion,) = result.completions
    assert completion.prompt_suffix_ids.tolist() == PROMPT
    assert completion.sampled_ids.tolist() == reply["output_ids"]
    assert completion.logprobs.tolist() == pytest.approx(reply["logprobs"])
    assert completion.certificate.prompt_source == "rendered"
    assert completion.trainable


async def test_a_prompt_that_goes_on_from_an_earlier_call_extends_its_trace(node: RunningNode) -> None:
    opened = await node.client.open_session()
    _, first = await generate(node, opened, PROMPT)
    so_far = PROMPT + first["output_ids"]
    _, second = await generate(node, opened, so_far + PROMPT)
    await generate(node, opened, so_far + PROMPT + second["output_ids"] + PROMPT)
    await generate(node, opened, PROMPT[1:])
    result = await node.client.finalize(opened.session_id, completions=True)
    assert [one.certificate.context for one in result.completions] == ["first", "exact", "exact", "first"]
    assert result.trajectory is not None
    assert [len(trace.spans) for trace in result.trajectory.traces] == [3, 1]
    assert audit(result.trajectory, result.completions).ok


async def chat(opened: OpenedSession) -> None:
    async with openai.AsyncOpenAI(base_url=opened.base_urls["openai"], api_key=opened.api_key, max_retries=0) as client:
        await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])


async def test_a_prompt_may_go_on_from_a_chat_call(node: RunningNode) -> None:
    first = await node.client.open_session()
    await chat(first)
    told = await node.client.finalize(first.session_id, completions=True)
    context = CompletionTree(told.completions).context_ids(told.completions[0]).tolist()
    opened = await node.client.open_session()
    await chat(opened)
    await generate(node, opened, context + PROMPT, sampling_params={"max_new_tokens": 1})
    result = await node.client.finalize(opened.session_id, completions=True)
    assert result.completions[1].certificate.context == "exact"
    assert result.completions[1].certificate.sampling.max_tokens == 1
    assert result.trajectory is not None
    assert [len(trace.spans) for trace in result.trajectory.traces] == [2]
    assert audit(result.trajectory, result.completions).ok


async def test_a_stream_of_tokens_adds_up_to_the_whole(node: RunningNode) -> None:
    opened = await node.client.open_session()
    headers = {"Authorization": f"Bearer {opened.api_key}", "Content-Type": "application/json"}
    url = f"{node.url}/s/{opened.session_id}/generate"
    async with node.http.post(url, json={"input_ids": PROMPT, "stream": True}, headers=headers) as response:
        text = await response.text()
    *events, end = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert end == "[DONE]"
    *pieces, whole = [json.loads(event) for event in events]
    assert len(pieces) > 1
    assert [token for piece in pieces for token in piece["output_ids"]] == whole["output_ids"]
    assert [value for piece in pieces for value in piece["logprobs"]] == pytest.approx(whole["logprobs"])
    result = await node.client.finalize(opened.session_id, completions=True)
    assert result.completions[0].sampled_ids.tolist() == whole["output_ids"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt_ids": []},
        {"prompt_ids": [-1]},
        {"prompt_ids": [2**31]},
        {"prompt_ids": [2**80]},
        {"prompt_ids": ["a"]},
        {"prompt_ids": [1.5]},
        {"prompt_ids": "1 2 3"},
        {"prompt_ids": [1], "sampling_params": {"temprature": 1}},
        {"prompt_ids": [1], "sampling_params": {"max_tokens": 0}},
    ],
)
async def test_a_wrong_body_is_refused_and_no_turn(node: RunningNode, body: dict[str, Any]) -> None:
    opened = await node.client.open_session()
    status, problem = await node.ask("POST", f"/s/{opened.session_id}/generate", body, opened.api_key)
    assert (status, problem["code"]) == (400, "invalid_request")
    assert (await node.client.session(opened.session_id)).num_calls == 0


async def test_a_prompt_beyond_the_context_is_told_so(node: RunningNode) -> None:
    opened = await node.client.open_session()
    status, problem = await generate(node, opened, PROMPT * 80_000)
    assert (status, problem["code"]) == (400, "context_length_exceeded")


async def test_turns_in_tokens_count_too(node: RunningNode) -> None:
    opened = await node.client.open_session(max_turns=1)
    assert (await generate(node, opened, PROMPT))[0] == 200
    status, problem = await generate(node, opened, PROMPT)
    assert (status, problem["code"]) == (403, "session_over")


async def test_an_engine_that_ignores_the_ids_is_refused(tmp_path: Path) -> None:
    script = {"default": {"text": "x", "faults": {"ignore_prompt_ids": True}}}
    async with scripted_server(script) as url, running_node(tmp_path, url) as node:
        opened = await node.client.open_session()
        status, problem = await generate(node, opened, PROMPT)
        assert (status, problem["code"]) == (502, "engine_incapable")
        result = await node.client.finalize(opened.session_id, completions=True)
        assert result.completions == ()


@pytest.mark.parametrize("separator", [",", ", "])
async def test_a_long_prompt_is_read_as_a_short_one_and_on_a_thread(
    node: RunningNode, separator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noted(text: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return plain_ids(text)

    monkeypatch.setattr("gangline.node.control.sessions.plain_ids", noted)
    opened = await node.client.open_session()
    ids = PROMPT * 2500
    text = separator.join(map(str, ids))
    body = f'{{"sampling_params":{{"max_tokens":2}},"input_ids":[{text}]}}'.encode()
    headers = {"Authorization": f"Bearer {opened.api_key}", "Content-Type": "application/json"}
    url = f"{node.url}/s/{opened.session_id}/generate"
    async with aiohttp.ClientSession() as http:
        async with http.post(url, data=body, headers=headers) as response:
            reply = await response.json()
            assert response.status == 200, reply
        assert reply["prompt_ids"] == ids
        assert threads
        assert threading.main_thread().name not in threads
        for wrong in (b"-1", b'"1"', b"1.5", b"[1]", b"9999999999"):
            async with http.post(url, data=body.replace(b"[", b"[" + wrong + b",", 1), headers=headers) as response:
                problem = await response.json()
                assert (response.status, problem["details"]["param"]) == (400, "prompt_ids"), problem
        async with http.post(url, data=body[:-1], headers=headers) as response:
            assert response.status == 400
