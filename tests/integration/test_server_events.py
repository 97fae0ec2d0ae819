"""Server-sent events: in order, filtered, and resumed where a connection broke."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from gangline.domain.views import Event
from gangline.server.run import serving
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode, any_plugin, request


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ServerClient]:
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
        ServerClient(running.url) as client,
    ):
        yield client


async def run_task(client: ServerClient, task_id: str) -> None:
    await client.submit(request(task_id, num_samples=1))
    node = FakeNode(client)
    leases = await node.lease()
    await node.beat(leases)
    await node.finish(leases)


async def until_task_ends(stream: AsyncIterator[Event], num_tasks: int = 1) -> list[Event]:
    found: list[Event] = []
    async with asyncio.timeout(30):
        async for event in stream:
            found.append(event)
            num_tasks -= event.kind == "task.ended"
            if num_tasks == 0:
                break
    return found


async def test_events_tell_a_tasks_story_in_order(client: ServerClient):
    await run_task(client, "a")
    events = await until_task_ends(client.events(after=0))
    assert [event.kind for event in events] == [
        "task.submitted",
        "node.joined",
        "task.started",
        "session.leased",
        "session.stage",
        "session.ended",
        "task.ended",
    ]
    assert [event.seq for event in events] == list(range(1, 8))
    assert events[4].data == {"node": "n1", "stage": "run"}


async def test_events_of_one_task_leave_the_others_out(client: ServerClient):
    await run_task(client, "a")
    await run_task(client, "b")
    events = await until_task_ends(client.events(after=0, task_id="b"))
    assert {event.task_id for event in events} == {"b"}


async def test_a_live_stream_begins_now_and_can_resume_before_its_first_event(client: ServerClient):
    await run_task(client, "old")
    async with aiohttp.ClientSession() as http, http.get(f"{client.url}/v1/events") as stream:
        assert [await stream.content.readline() for _ in range(3)] == [b"retry: 1000\n", b"id: 7\n", b"\n"]
        await run_task(client, "new")
        assert await stream.content.readline() == b"id: 8\n"
        assert await stream.content.readline() == b"event: task.submitted\n"
        resumed = await until_task_ends(client.events(after=7))
        assert {event.task_id for event in resumed} == {"new"}


async def test_a_stream_resumes_after_the_server_came_back(tmp_path: Path):
    async with serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running:
        port = int(running.url.rsplit(":", 1)[1])
        async with ServerClient(running.url) as client:
            await run_task(client, "a")
    async with ServerClient(f"http://127.0.0.1:{port}") as client:
        stream = client.events(after=0, retry_s=0.01)
        async with serving(data_dir=tmp_path, control_token=None, port=port, check_task=any_plugin):
            first = [await anext(stream) for _ in range(3)]
        async with serving(data_dir=tmp_path, control_token=None, port=port, check_task=any_plugin):
            await run_task(client, "b")
            rest = await until_task_ends(stream, num_tasks=2)
    seqs = [event.seq for event in (*first, *rest)]
    assert seqs == list(range(1, len(seqs) + 1))
