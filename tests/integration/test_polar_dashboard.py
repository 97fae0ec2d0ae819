"""Polar's dashboard, which reads a rollout server as it is published, in front of ours."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gangline.server.run import serving
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode, any_plugin, request

LINE = {
    *("task_id", "status", "harness", "model", "num_samples", "completed_sessions", "errored_sessions"),
    *("mean_reward", "created_at", "updated_at", "source"),
}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ServerClient]:
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
        ServerClient(running.url) as client,
    ):
        yield client


async def _get(client: ServerClient, path: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.get(client.url + path) as answer:
        return answer.status, await answer.json()


async def _ran(client: ServerClient, task_id: str, **changes: Any) -> None:
    node = FakeNode(client)
    await client.submit(request(task_id, num_samples=1))
    leases = await node.lease()
    await node.beat(leases)
    await node.finish(leases, **changes)


async def test_tasks_are_listed_those_that_changed_last_first(client: ServerClient) -> None:
    await _ran(client, "good", reward=1.0)
    await _ran(client, "late", outcome="agent_timeout", reward=0.0)
    await client.submit(request("open", num_samples=2))
    status, answer = await _get(client, "/tasks")
    assert status == 200
    lines = {line["task_id"]: line for line in answer["tasks"]}
    assert [*lines] == ["open", "late", "good"]
    assert all(set(line) == LINE for line in lines.values())
    counted = ("status", "num_samples", "completed_sessions", "errored_sessions", "mean_reward")
    assert [lines["good"][name] for name in counted] == ["completed", 1, 1, 0, 1.0]
    assert [lines["late"][name] for name in counted] == ["completed", 1, 1, 1, 0.0]
    assert [lines["open"][name] for name in counted] == ["running", 2, 0, 0, None]
    assert lines["good"]["harness"] == request("x").agent.harness


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("status=running", ["open"]),
        ("status=completed", ["late", "good"]),
        ("status=failed", []),
        ("limit=1", ["open"]),
        ("harness=none", []),
        ("since=1e11", []),
        ("limit=1&status=completed", ["late"]),
    ],
)
async def test_tasks_are_listed_by_polars_filters(client: ServerClient, query: str, names: list[str]) -> None:
    await _ran(client, "good")
    await _ran(client, "late", outcome="agent_timeout")
    await client.submit(request("open"))
    status, answer = await _get(client, f"/tasks?{query}")
    assert (status, [line["task_id"] for line in answer["tasks"]]) == (200, names)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "since=x"])
async def test_a_filter_that_is_none_is_refused(client: ServerClient, query: str) -> None:
    assert (await _get(client, f"/tasks?{query}"))[0] == 400


async def test_a_tasks_sessions_and_nodes_are_in_polars_words(client: ServerClient) -> None:
    node = FakeNode(client)
    await client.submit(request("t", num_samples=3))
    leases = await node.lease(max_sessions=2)
    await node.beat(leases[:1])
    await node.finish(leases[1:], reward=0.5)
    status, answer = await _get(client, "/tasks/t/sessions")
    assert (status, answer["task_id"]) == (200, "t")
    found = {one["session_id"]: (one["status"], one["node_id"], one["reward"]) for one in answer["sessions"]}
    assert found[leases[0].session_id] == ("RUNNING", "n1", None)
    assert found[leases[1].session_id] == ("COMPLETED", "n1", 0.5)
    assert sorted(state for state, _, _ in found.values()) == ["COMPLETED", "REGISTERED", "RUNNING"]
    assert (await _get(client, "/tasks/none/sessions"))[0] == 404
    _, nodes = await _get(client, "/nodes")
    assert [one["node_id"] for one in nodes] == ["n1"]
    assert (await _get(client, "/nodes/n1"))[1]["gateway_url"] == nodes[0]["gateway_url"]
    assert (await _get(client, "/nodes/n2"))[0] == 404


async def test_events_are_what_its_fan_out_reads(client: ServerClient) -> None:
    async with aiohttp.ClientSession() as http, http.get(f"{client.url}/events") as stream:
        assert stream.content_type == "text/event-stream"
        assert (await _next(stream))["type"] == "hello"
        await _ran(client, "t", reward=1.0)
        found = [await _next(stream) for _ in range(5)]
    assert all(set(event) == {"type", "ts", "data"} for event in found)
    assert [event["type"] for event in found] == [
        "task.created",
        "session.state_changed",
        "session.state_changed",
        "session.state_changed",
        "task.completed",
    ]
    assert [event["data"]["status"] for event in found] == [
        "running",
        "REGISTERED",
        "RUNNING",
        "COMPLETED",
        "completed",
    ]
    assert {event["data"]["task_id"] for event in found} == {"t"}


async def _next(stream: aiohttp.ClientResponse) -> dict[str, Any]:
    """As its `_parse_sse_lines`: the lines of one message, of which `data:` counts."""
    lines: list[str] = []
    while (line := (await stream.content.readline()).decode().rstrip("\n")) or not lines:
        lines += [line[5:].lstrip()] if line.startswith("data:") else []
    return json.loads("\n".join(lines))
