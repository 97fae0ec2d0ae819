"""Every answer carries an id of ours, as the SDKs read it, and the log lines of the call carry it too."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path

import aiohttp
import anthropic
import openai
import pytest
from google import genai
from google.genai import errors as genai_errors
from google.genai import types as genai_types

from gangline.machine.telemetry.logs import LineFormatter
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from support.node.node import TOKEN, RunningNode, running_node


async def test_sdks_read_the_id_of_replies_and_errors_and_the_log_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.handler.setFormatter(LineFormatter())
    caplog.set_level(logging.INFO, "gangline")
    async with scripted_server({"default": {"text": "x"}}) as engine, running_node(tmp_path, engine) as node:
        _, opened = await node.ask("POST", "/v1/sessions", {})
        root, key = f"{node.url}/s/{opened['session_id']}", opened["api_key"]
        async with anthropic.AsyncAnthropic(base_url=root, api_key=key, max_retries=0) as client:
            said = await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
            of_reply = said._request_id  # pyright: ignore[reportPrivateUsage]  # the SDK documents it under this name
            assert of_reply is not None
            assert of_reply.startswith("req")
        async with anthropic.AsyncAnthropic(base_url=root, api_key="no", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
            assert isinstance(refused.value.body, dict)
            assert refused.value.request_id == refused.value.body["request_id"]
        async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="no", max_retries=0) as other:
            with pytest.raises(openai.AuthenticationError) as wrong:
                await other.models.list(extra_headers={"X-Request-Id": "mine"})
            assert wrong.value.request_id not in (None, "mine", refused.value.request_id)
    for number in (of_reply, refused.value.request_id, wrong.value.request_id):
        assert f"request={number}" in caplog.text


@pytest.mark.parametrize("path", ["/health", "/v1/status", "/nothing", "/v1/tasks/none"])
async def test_every_answer_of_a_server_has_one(tmp_path: Path, path: str):
    async with (
        serving(data_dir=tmp_path, control_token="x") as running,
        aiohttp.ClientSession() as http,
        http.get(running.url + path) as first,
        http.get(running.url + path) as second,
    ):
        assert first.headers["x-request-id"] != second.headers["x-request-id"]


async def test_refused_calls_do_not_flood_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "gangline")
    async with (
        scripted_server({"default": {"text": "x"}}) as engine,
        running_node(tmp_path, engine) as node,
        aiohttp.ClientSession() as http,
    ):
        for _ in range(200):
            async with http.get(f"{node.url}/v1/models", headers={"Authorization": "Bearer no"}) as answer:
                assert answer.status == 401
    # Two minutes at most begin while the test runs.
    assert 0 < caplog.text.count("call.refused") <= 120


# -- requests that no handler sees -----------------------------------------------------------------------------------

LONG_HEADER = {"X-Long": "x" * 9000}


@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
async def test_sdks_are_refused_in_their_own_shape_for_a_head_that_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.handler.setFormatter(LineFormatter())
    caplog.set_level(logging.DEBUG, "gangline")  # at which no refusal is left out
    async with scripted_server({"default": {"text": "x"}}) as engine, running_node(tmp_path, engine) as node:
        _, opened = await node.ask("POST", "/v1/sessions", {})
        root, key = f"{node.url}/s/{opened['session_id']}", opened["api_key"]
        async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key=key, default_headers=LONG_HEADER) as client:
            with pytest.raises(openai.BadRequestError, match="more than 8190 bytes") as chat:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            assert isinstance(chat.value.body, dict)
            assert chat.value.code == "invalid_request"
        async with anthropic.AsyncAnthropic(base_url=root, api_key=key, default_headers=LONG_HEADER) as client:
            with pytest.raises(anthropic.BadRequestError, match="more than 8190 bytes") as messages:
                await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
            assert isinstance(messages.value.body, dict)
            assert messages.value.request_id == messages.value.body["request_id"] is not None
        options = genai_types.HttpOptions(base_url=root, headers=LONG_HEADER)
        with pytest.raises(genai_errors.ClientError, match="more than 8190 bytes") as google:
            await genai.Client(api_key=key, http_options=options).aio.models.generate_content(model="m", contents="hi")
        assert (google.value.code, google.value.status) == (400, "INVALID_ARGUMENT")
    for number in (chat.value.request_id, messages.value.request_id):
        assert re.search(rf"request\.refused method=POST path=\S+ status=400 code=invalid_request request={number}$",
                         caplog.text, re.MULTILINE)  # fmt: skip
    assert "x" * 100 not in caplog.text


CHUNKED = (
    b"Host: 127.0.0.1\r\nAuthorization: Bearer %b\r\n"
    b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
MALFORMED = {
    "no request line": [b"GARBAGE\r\n\r\n"],
    "TLS": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"],
    "a version": [b"GET %b HTTP/9.1\r\n\r\n"],
    "a length": [b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n"],
    "chunks": [b"POST %b HTTP/1.1\r\n" + CHUNKED + b"zz\r\n"],
    "chunks, later": [b"POST %b HTTP/1.1\r\n" + CHUNKED + b"1\r\n{\r\n", b"zz\r\n"],
    "an expectation": [b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 200-ok\r\nContent-Length: 2\r\n\r\n{}"],
}


@pytest.mark.parametrize("pieces", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("where", ["server", "node", "model call"])
async def test_what_is_malformed_is_refused_at_once_in_shape_and_logged_by_its_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str, pieces: list[bytes]
):
    caplog.handler.setFormatter(LineFormatter())
    caplog.set_level(logging.DEBUG, "gangline")  # at which no refusal is left out
    if where == "server":
        async with serving(data_dir=tmp_path, control_token=TOKEN) as running:
            status, headers, body = await _raw(running.url, _filled(pieces, "/v1/tasks", TOKEN))
    else:
        async with scripted_server({"default": {"text": "x"}}) as engine, running_node(tmp_path, engine) as node:
            path, key = await _messages_route(node) if where == "model call" else ("/v1/sessions", TOKEN)
            status, headers, body = await _raw(node.url, _filled(pieces, path, key))
    assert (status, headers["connection"] if status == 400 else "") == (400, "close")
    line = next(line for line in caplog.text.splitlines() if line.endswith(f"request={headers['x-request-id']}"))
    assert "refused" in line
    assert [record.message for record in caplog.records if record.exc_info] == []
    error = json.loads(body)
    if b"%b" not in pieces[0]:  # nobody knows the path: the shape is the usual one of a server, and of a node
        assert "detail" in error if where == "server" else error["error"]["code"] == "invalid_request"
    elif where == "model call":
        assert (error["type"], error["request_id"]) == ("error", headers["request-id"])
        assert error["error"]["type"] == "invalid_request_error"
    else:
        assert (error["status"], error["code"]) == (400, "invalid_request")


async def _messages_route(node: RunningNode) -> tuple[str, str]:
    _, opened = await node.ask("POST", "/v1/sessions", {})
    return f"/s/{opened['session_id']}/v1/messages", opened["api_key"]


def _filled(pieces: list[bytes], path: str, key: str) -> list[bytes]:
    values = [path.encode(), key.encode()]
    return [piece % tuple(values[: piece.count(b"%b")]) for piece in pieces]


async def _raw(url: str, pieces: list[bytes]) -> tuple[int, dict[str, str], bytes]:
    """Send the pieces, each in its own packet, and read until the other side closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.2)
        async with asyncio.timeout(10):
            answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), {"connection": "close"} | headers, body
