"""One proxy, every installed dialect: who is answered by which, side routes, streams and their signs of life."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from typing import Any

import aiohttp
import pytest

from gangline.domain.conversation import ModelCall, message_text
from gangline.node.backends.gate import Gate
from gangline.settings import plugins
from support.engines.held import PROMPT, HeldEngine
from support.node.proxy import Proxied, proxied, proxied_engine

INSTALLED = plugins.names("dialect")
TEXT = "How are you?"

CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "openai_chat": (
        "/v1/chat/completions",
        "/v1/chat/completions",
        {"model": "scripted", "messages": [{"role": "user", "content": TEXT}]},
    ),
    "anthropic": (
        "/v1/messages?beta=true",
        "/v1/messages?beta=true",
        {"model": "scripted", "max_tokens": 50, "messages": [{"role": "user", "content": TEXT}]},
    ),
    "openai_responses": ("/v1/responses", "/v1/responses", {"model": "scripted", "input": TEXT}),
    "google": (
        "/v1beta/models/scripted:generateContent",
        "/v1beta/models/scripted:streamGenerateContent?alt=sse",
        {"contents": [{"role": "user", "parts": [{"text": TEXT}]}]},
    ),
}
SPEAKING = [name for name in CALLS if name in INSTALLED]


def _key(name: str, running: Proxied) -> dict[str, str]:
    key = running.session.key
    match name:
        case "anthropic":
            return {"x-api-key": key, "anthropic-version": "2023-06-01"}
        case "google":
            return {"x-goog-api-key": key}
        case _:
            return {"Authorization": f"Bearer {key}"}


async def _post(
    running: Proxied, name: str, *, stream: bool = False, base: str | None = None, body: Any = None, **headers: str
) -> tuple[int, str, bytes]:
    plain, streamed, fields = CALLS[name]
    base = f"{running.url}/s/s1" if base is None else base
    fields = fields if body is None else body
    fields = fields | {"stream": True} if stream and name != "google" else fields
    async with aiohttp.ClientSession() as client:
        url = base + (streamed if stream else plain)
        async with client.post(url, json=fields, headers=_key(name, running) | headers) as response:
            return response.status, response.content_type, await response.read()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", SPEAKING)
async def test_every_dialect_is_answered_on_both_paths_and_recorded_under_its_name(name: str, stream: bool) -> None:
    script = {"rules": [{"pattern": ".", "text": "fine thanks"}]}
    async with proxied(script) as running:
        for base in (None, running.url):
            status, kind, answer = await _post(running, name, stream=stream, base=base)
            assert status == 200, answer
            assert kind == ("text/event-stream" if stream else "application/json")
            assert stream or b"fine thanks" in answer
        assert {message_text(completion.response) for completion in running.journal.completions} == {"fine thanks"}
        dialect = plugins.load("dialect", name).name
        assert {completion.dialect for completion in running.journal.completions} == {dialect}
        assert len(running.journal.completions) == 2
        prompts = [running.session.tree.prompt_ids(completion).tolist() for completion in running.session.tree]
        assert prompts[0] == prompts[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", SPEAKING)
async def test_a_wrong_key_is_refused_in_every_shape(name: str, stream: bool) -> None:
    async with proxied({}) as running:
        running.proxy.remove("s1")
        status, kind, answer = await _post(running, name, stream=stream)
        assert (status in (400, 401), kind) == (True, "application/json")
        assert "error" in json.loads(answer)


@pytest.mark.parametrize("name", SPEAKING)
async def test_an_engine_that_is_down_is_an_error_of_the_provider(name: str) -> None:
    async with proxied_engine("http://127.0.0.1:9") as running:
        for stream in (False, True):
            status, kind, answer = await _post(running, name, stream=stream)
            assert status >= 500
            assert kind == "application/json"
            assert "127.0.0.1:9" in str(json.loads(answer)["error"])
        assert running.journal.completions == []


# -- streams ---------------------------------------------------------------------------------------------------------


def _signs_of_life(name: str) -> bytes:
    dialect = plugins.load("dialect", name)()
    call = ModelCall(dialect=name, model="scripted", messages=(), stream=True)
    return dialect.event_writer(call, reply_id="k", model="scripted", created_at=0).keep_alive()


@pytest.mark.parametrize("streams_ids", [True, False])
@pytest.mark.parametrize("name", SPEAKING)
async def test_a_stream_is_kept_alive_until_its_first_token_then_starts_with_the_real_prompt_length(
    name: str, streams_ids: bool
) -> None:
    engine = HeldEngine(streams_ids=streams_ids)
    async with proxied_engine(engine, keep_alive_s=0.02) as running, aiohttp.ClientSession() as client:
        _, path, fields = CALLS[name]
        fields = fields if name == "google" else fields | {"stream": True}
        async with client.post(f"{running.url}/s/s1{path}", json=fields, headers=_key(name, running)) as response:
            call = await engine.asked(1)
            assert response.status == 200
            if _signs_of_life(name):
                assert b"fine" not in await asyncio.wait_for(response.content.readany(), 10)
            call.finish("fine", " thanks")
            rest = await response.read()
            assert b"fine" in rest
        if name == "anthropic":
            assert f'"input_tokens":{len(PROMPT)}'.encode() in rest.replace(b" ", b"")
        assert [c.status for c in running.journal.completions] == ["complete"]


@pytest.mark.parametrize("name", SPEAKING)
async def test_a_stream_stays_alive_while_the_gate_holds_it(name: str) -> None:
    engine, gate = HeldEngine(), Gate()
    async with proxied_engine(engine, keep_alive_s=0.02, gate=gate) as running:
        await gate.pause("drain", 600)
        asked = asyncio.create_task(_post(running, name, stream=True))
        async with asyncio.timeout(10):
            while gate.state.num_waiting == 0:
                await asyncio.sleep(0.005)
        assert engine.calls == []
        gate.set_version(4)
        gate.resume()
        (await engine.asked(1)).finish("fine")
        status, _, answer = await asked
        assert (status, b"fine" in answer) == (200, True)
        (completion,) = running.journal.completions
        assert [(s.version, s.start, s.end) for s in completion.certificate.version_spans] == [(4, 0, 1)]
        assert running.session.meter.held_s > 0


@pytest.mark.parametrize("name", SPEAKING)
async def test_a_stream_that_broke_ends_with_an_error_event_and_leaves_no_record(name: str) -> None:
    engine = HeldEngine()
    async with proxied_engine(engine) as running:
        asked = asyncio.create_task(_post(running, name, stream=True))
        call = await engine.asked(1)
        call.say("fine", " thanks", " a", " lot")
        call.fail()
        status, _, answer = await asked
        assert status == 200
        assert b"reset" in answer
        assert running.journal.completions == []


@pytest.mark.parametrize("name", SPEAKING)
async def test_versions_change_inside_a_streamed_reply(name: str) -> None:
    engine, gate = HeldEngine(), Gate()
    gate.set_version(1)
    async with proxied_engine(engine, keep_alive_s=0.02, gate=gate) as running, aiohttp.ClientSession() as client:
        _, path, fields = CALLS[name]
        fields = fields if name == "google" else fields | {"stream": True}
        async with client.post(f"{running.url}/s/s1{path}", json=fields, headers=_key(name, running)) as response:
            call = await engine.asked(1)
            call.say("one")
            async with asyncio.timeout(10):
                while not next(iter(running.session.in_flight)).progress.shown:
                    await asyncio.sleep(0.005)
            await gate.pause("keep", 600)
            gate.set_version(2)
            gate.resume()
            call.finish("two", "three")
            await response.read()
        (completion,) = running.journal.completions
        assert [(s.version, s.start, s.end) for s in completion.certificate.version_spans] == [(1, 0, 1), (2, 1, 3)]


# -- side routes -----------------------------------------------------------------------------------------------------


COUNTS: dict[str, tuple[str, str]] = {
    "anthropic": ("/v1/messages/count_tokens", "input_tokens"),
    "google": ("/v1beta/models/scripted:countTokens", "totalTokens"),
}


@pytest.mark.parametrize("name", [name for name in COUNTS if name in INSTALLED])
async def test_counting_gives_the_prompts_length_and_samples_nothing(name: str) -> None:
    async with proxied({}) as running, aiohttp.ClientSession() as client:
        path, field = COUNTS[name]
        body = {field: value for field, value in CALLS[name][2].items() if field != "max_tokens"}
        async with client.post(f"{running.url}/s/s1{path}", json=body, headers=_key(name, running)) as response:
            counted = await response.json()
        assert running.journal.completions == []
        assert running.session.num_calls == 0
        await _post(running, name)
        (completion,) = running.journal.completions
        assert counted[field] == len(running.session.tree.prompt_ids(completion))


@pytest.mark.parametrize("name", SPEAKING)
async def test_the_shared_model_list_has_the_shape_of_who_asks(name: str) -> None:
    root = "/v1beta/models" if name == "google" else "/v1/models"
    async with proxied({}) as running, aiohttp.ClientSession() as client:
        async with client.get(f"{running.url}/s/s1{root}", headers=_key(name, running)) as response:
            answer = await response.json()
            assert response.status == 200
        assert "scripted" in json.dumps(answer)
        assert ("models" in answer) == (name == "google")
        assert ("first_id" in answer) == (name == "anthropic")


@pytest.mark.parametrize("name", SPEAKING)
async def test_an_unknown_path_is_404_in_the_shape_of_who_asks(name: str) -> None:
    async with proxied({}) as running, aiohttp.ClientSession() as client:
        async with client.post(f"{running.url}/s/s1/v1/unheard-of", json={}, headers=_key(name, running)) as response:
            answer = await response.json()
            assert response.status == 404
        assert "/v1/chat/completions" in str(answer["error"])
        assert (answer.get("type") == "error") == (name == "anthropic")
        assert ("status" in answer["error"]) == (name == "google")


async def test_remote_compaction_is_refused_in_openais_shape() -> None:
    async with proxied({}) as running, aiohttp.ClientSession() as client:
        url, body = f"{running.url}/s/s1/v1/responses/compact", {"model": "scripted", "input": "Hi."}
        async with client.post(url, json=body, headers=_key("openai_responses", running)) as response:
            answer = await response.json()
            assert response.status == 404
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert "/v1/responses/compact is not served here" in answer["error"]["message"]
        assert running.session.num_calls == 0


async def test_a_websocket_upgrade_is_refused_with_426() -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
    }
    async with proxied({}) as running, aiohttp.ClientSession() as client:
        headers = upgrade | _key("openai_responses", running)
        async with client.get(f"{running.url}/s/s1/v1/responses", headers=headers) as response:
            assert response.status == 426
            assert "WebSocket" in (await response.json())["error"]["message"]


@pytest.mark.skipif("openai_responses" not in INSTALLED, reason="the Responses dialect is not installed")
async def test_a_response_goes_on_from_an_earlier_one_of_the_session() -> None:
    async with proxied({}, tokenizer="tiny") as running:
        first = json.loads((await _post(running, "openai_responses"))[2])
        body = {"model": "scripted", "input": "And you?", "previous_response_id": first["id"]}
        assert (await _post(running, "openai_responses", body=body))[0] == 200
        one, two = running.session.tree
        assert two.parent_id == one.completion_id
        assert [message.role for message in running.session.tree.messages(two)] == ["user", "assistant", "user"]
        status, _, answer = await _post(
            running, "openai_responses", body=body | {"previous_response_id": "resp_0123456789abcdef"}
        )
        error = json.loads(answer)["error"]
        assert (status, error["param"], error["code"]) == (400, "previous_response_id", "previous_response_not_found")
        assert "'resp_0123456789abcdef'" in error["message"]


@pytest.mark.parametrize("name", SPEAKING)
async def test_a_field_that_nobody_knows_is_dropped_unless_it_names_a_reply_of_the_session(name: str) -> None:
    async with proxied({}, tokenizer="tiny") as running:
        harmless = CALLS[name][2] | {"next_years_field": {"after": "msg_0123456789abcdef"}}
        first = json.loads((await _post(running, name, body=harmless))[2])
        (record,) = running.journal.completions
        assert record.dropped == ("next_years_field",)
        names_it = CALLS[name][2] | {"next_years_field": {"after": first.get("id") or first["responseId"]}}
        status, _, answer = await _post(running, name, body=names_it)
        assert status == 400
        assert b"next_years_field" in answer
        assert len(running.journal.completions) == 1


# -- clients that do not behave ----------------------------------------------------------------------------------------


async def _raw(url: str, data: bytes) -> bytes:
    """Head and front of the answer."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with closing(writer):
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(10):
            return await reader.readuntil(b"\r\n\r\n") + await reader.read(1000)


async def test_a_stalled_upload_is_408_in_shape_and_no_turn() -> None:
    async with proxied({}, body_idle_s=0.05) as running:
        head = f"POST /s/s1/v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {running.session.key}\r\n"
        answer = await _raw(running.url, f'{head}Content-Length: 5000\r\n\r\n{{"model"'.encode())
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"stalled" in answer
        assert running.session.num_calls == 0


async def test_a_flood_of_headers_is_refused_and_the_next_client_is_served() -> None:
    async with proxied({}) as running:
        flood = "".join(f"X-H{number}: {'y' * 4000}\r\n" for number in range(200))
        try:
            answer = await _raw(running.url, f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{flood}\r\n".encode())
        except ConnectionResetError:
            answer = b"HTTP/1.1 400"  # refused while it still sent
        assert answer[9:12] in (b"400", b"401", b"431")
        assert (await _post(running, "openai_chat"))[0] == 200
