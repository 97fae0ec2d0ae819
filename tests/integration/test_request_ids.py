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
            assert said._request_id is not None
            assert said._request_id.startswith("req")
        async with anthropic.AsyncAnthropic(base_url=root, api_key="no", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
            assert isinstance(refused.value.body, dict)
            assert refused.value.request_id == refused.value.body["request_id"]
        async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="no", max_retries=0) as other:
            with pytest.raises(openai.AuthenticationError) as wrong:
                await other.models.list(extra_headers={"X-Request-Id": "mine"})
            assert wrong.value.request_id not in (None, "mine", refused.value.request_id)
    for number in (said._request_id, refused.value.request_id, wrong.value.request_id):
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
