"""A session is seen while it runs: its recorded calls and tokens come from its node, and are those of its result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from gangline.domain.errors import Conflict, ServerUnavailable
from gangline.server.routes import events
from gangline.server.run import serving
from gangline.server.web.columns import COLUMNS, decode_columns
from gangline.wire.client.server import ServerClient
from support.page.running import SteppedSession, stepped_session
from support.service.running import FakeNode, any_plugin, request

TOKEN = "control-token"


@pytest.fixture
async def control(tmp_path: Path) -> AsyncIterator[ServerClient]:
    async with (
        serving(data_dir=tmp_path / "server", control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        yield client


async def outline_of(session: SteppedSession) -> dict[str, Any]:
    return json.loads(await session.client.request("GET", f"/v1/sessions/{session.session_id}/outline"))


async def outline_with(session: SteppedSession, num_calls: int) -> dict[str, Any]:
    """The outline once it has so many calls."""
    async with asyncio.timeout(30):
        while True:
            try:
                outline = await outline_of(session)
            except Conflict:  # no node has it yet
                outline = {"calls": []}
            if len(outline["calls"]) >= num_calls:
                return outline
            await asyncio.sleep(0.05)


async def told_calls(stream: aiohttp.StreamReader) -> int:
    """Number of calls of the next `session.calls`."""
    async with asyncio.timeout(30):
        while await stream.readline() != b"event: session.calls\n":
            pass
        return json.loads((await stream.readline()).removeprefix(b"data: "))["num_calls"]


async def test_calls_and_tokens_are_there_as_soon_as_they_are_recorded(
    control: ServerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New calls do not wait for the next reading of stored events."""
    monkeypatch.setattr(events, "_REST_S", 600.0)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        stepped_session(control, TOKEN, tmp_path / "agent", "live") as session,
        aiohttp.ClientSession(control.url, headers=headers) as http,
        http.get("/v1/events", params={"calls": "1"}) as stream,
    ):
        outline = await outline_with(session, 1)
        assert (outline["outcome"], outline["reward"], outline["node_id"]) == (None, None, "node-live")
        assert outline["calls"][0]["masked"] is None
        assert await told_calls(stream.content) == 1
        session.step()
        assert await told_calls(stream.content) == 2
        path = f"/v1/sessions/{session.session_id}"
        params = {"first": "0", "limit": "2"}
        columns = decode_columns(await control.request("GET", f"{path}/tokens", params=params, accept=COLUMNS))
        contents = json.loads(await control.request("GET", f"{path}/calls", params=params))
        session.step()
        result = await session.result()
        calls = result.completions[:2]
        ids = np.concatenate([part for call in calls for part in (call.prompt_suffix_ids, call.sampled_ids)])
        np.testing.assert_array_equal(columns["ids"], ids)
        assert columns["mask"].sum() == sum(len(call.sampled_ids) for call in calls)
        assert [content["response"]["parts"][0]["text"] for content in contents] == ["I wait 0.\n", "I wait 1.\n"]
        ended = await outline_of(session)
        assert (ended["outcome"], len(ended["calls"])) == ("completed", 3)


async def test_a_session_whose_node_is_gone_says_so(control: ServerClient) -> None:
    await control.submit(request("gone", num_samples=1))
    with pytest.raises(Conflict, match="has not ended: it is queued"):
        await control.request("GET", "/v1/sessions/gone.0/outline")
    await FakeNode(control).lease()  # its address leads nowhere
    with pytest.raises(ServerUnavailable, match="node n1 does not answer"):
        await control.request("GET", "/v1/sessions/gone.0/outline")
