"""Find over HTTP: words, phrases and filters over all ended sessions, and an index that follows what ends and goes."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.errors import Failure
from gangline.server.run import database_path, serving
from gangline.store.sql.tasks import TaskStore
from gangline.wire.client.server import ServerClient
from support.page.sessions import working_session
from support.service.running import FakeNode, any_plugin, request

TOKEN = "control-token"


@pytest.fixture
async def control(tmp_path: Path) -> AsyncIterator[ServerClient]:
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        yield client


async def add(control: ServerClient, task_id: str, reward: float) -> None:
    await control.submit(request(task_id, num_samples=1))
    (lease,) = await FakeNode(control).lease()
    result = working_session(lease.session_id, reward=reward)
    await control.post_result(msgspec.structs.replace(result, node_id="n1", fence=lease.fence))


async def ask(control: ServerClient, **params: str) -> dict[str, Any]:
    return json.loads(await control.request("GET", "/v1/find", params=params))


async def found(control: ServerClient, num_indexed: int, **params: str) -> list[str]:
    """Ids that are found once so many sessions are in the index."""
    async with asyncio.timeout(30):
        while True:
            answer = await ask(control, **params)
            if (answer["num_indexed"], answer["num_waiting"]) == (num_indexed, 0):
                return [session["session_id"] for session in answer["sessions"]]
            await asyncio.sleep(0.05)


async def test_a_tenant_learns_nothing_of_how_much_others_have_run(control: ServerClient) -> None:
    for number in range(3):
        await add(control, f"ended-{number}", 0.0)
    token = (await control.create_token(role="read", tenant="other")).token
    async with ServerClient(control.url, token) as other:
        assert (await ask(other))["num_waiting"] <= 1
        assert await found(other, 0) == []


async def test_sessions_are_found_by_words_and_by_how_they_ended(control: ServerClient, tmp_path: Path) -> None:
    await add(control, "wrong", 0.0)
    await add(control, "right", 1.0)
    await control.submit(request("broken", num_samples=1))
    failure = Failure(boundary="harness", code="harness_error", message="no such file: agent.py", retryable=False)
    await FakeNode(control).finish(await FakeNode(control).lease(), outcome="agent_error", failure=failure, reward=None)
    assert set(await found(control, 3)) == {"wrong.0", "right.0", "broken.0"}
    assert set(await found(control, 3, words="test_add_negative")) == {"wrong.0", "right.0"}
    assert await found(control, 3, words='"one test fails"') == ["wrong.0"]
    assert await found(control, 3, words="subtra*", max_reward="0.5") == ["wrong.0"]
    assert await found(control, 3, words="fails zebra") == []
    assert await found(control, 3, min_reward="1") == ["right.0"]
    assert await found(control, 3, rule="tool_error") == ["wrong.0"]
    assert await found(control, 3, cause="harness_error", words="agent.py") == ["broken.0"]
    assert await found(control, 3, outcome="agent_error", task_id="wrong") == []
    assert await found(control, 3, words='" * ( NEAR') == []
    known = {"outcome": ["agent_error", "completed"], "cause": ["harness_error"], "harness": ["shell"]}
    assert (await ask(control))["known"] == known
    assert len(await found(control, 3, harness="shell")) == 3
    assert await found(control, 3, harness="other") == []
    assert set(await found(control, 3, version="2")) == {"wrong.0", "right.0"}
    assert await found(control, 3, version="12") == []
    (session,) = (await ask(control, words="sign wrong"))["sessions"][:1]
    (hit,) = session["hits"]
    assert (hit["call"], hit["kind"]) == (1, "assistant")
    assert "\x02sign\x03 is \x02wrong\x03" in hit["snippet"]
    await add(control, "later", 0.0)
    assert "later.0" in await found(control, 4, words="fails")


async def test_the_index_forgets_what_is_gone_and_is_made_anew_when_it_is_broken(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data_dir": tmp_path, "control_token": TOKEN, "check_task": any_plugin}
    async with serving(**options) as running, ServerClient(running.url, TOKEN) as control:
        await add(control, "first", 0.0)
        await add(control, "second", 0.0)
        assert len(await found(control, 2, words="sign")) == 2
    with TaskStore(database_path(tmp_path)) as store:
        store.forget(["first"])
    async with serving(**options) as running, ServerClient(running.url, TOKEN) as control:
        assert await found(control, 1, words="sign") == ["second.0"]
    index = tmp_path / "server" / "find.db"
    with sqlite3.connect(index) as opened:
        opened.execute("PRAGMA user_version = 99")
    opened.close()
    async with serving(**options) as running, ServerClient(running.url, TOKEN) as control:
        assert await found(control, 1, words="sign") == ["second.0"]
    index.write_bytes(b"no database" * 1000)
    async with serving(**options) as running, ServerClient(running.url, TOKEN) as control:
        assert await found(control, 1, words="sign") == ["second.0"]
