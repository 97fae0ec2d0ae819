"""Every answer carries an id of ours, as the SDKs read it, and the log lines of the call carry it too."""

from __future__ import annotations

import logging
from pathlib import Path

import aiohttp
import anthropic
import openai
import pytest

from fixtures_node import running_node
from gangline.server.run import serving
from gangline.telemetry.logs import LineFormatter
from gangline.testing.scripted_engine import scripted_server


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


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/tasks/none", None, 404, "not_found"),
        ("GET", "/nothing", None, 404, "not_found"),
        ("PUT", "/v1/status", None, 405, "caller_error"),
        ("POST", "/v1/tasks", b"{}", 400, "invalid_request"),
        ("POST", "/v1/tasks", b"[", 400, "invalid_request"),
    ],
)
async def test_a_refused_request_is_found_in_the_servers_log_by_its_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, path: str, body: bytes | None, status: int, code: str
):
    caplog.handler.setFormatter(LineFormatter())
    caplog.set_level(logging.INFO, "gangline")
    headers = {"Authorization": "Bearer x", "Content-Type": "application/json", "X-Request-Id": "mine"}
    async with (
        serving(data_dir=tmp_path, control_token="x") as running,
        aiohttp.ClientSession(headers=headers) as http,
        http.request(method, running.url + path, data=body) as answer,
    ):
        number = answer.headers["x-request-id"]
    (line,) = [line for line in caplog.text.splitlines() if "request.refused" in line]
    assert line.endswith(f"request.refused method={method} path={path} status={status} code={code} request={number}")


async def test_a_refused_request_is_found_in_the_nodes_log_by_its_id(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.handler.setFormatter(LineFormatter())
    caplog.set_level(logging.INFO, "gangline")
    async with (
        scripted_server({"default": {"text": "x"}}) as engine,
        running_node(tmp_path, engine) as node,
        aiohttp.ClientSession() as http,
        http.get(f"{node.url}/v1/status", headers={"Authorization": "Bearer no"}) as answer,
    ):
        number = answer.headers["x-request-id"]
    wanted = f"control.refused method=GET path=/v1/status status=401 code=unauthorized request={number}"
    assert wanted in caplog.text


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
