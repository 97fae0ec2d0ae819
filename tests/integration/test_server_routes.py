"""The rollout server over loopback: submit, lease, report, wait, cancel, and what it answers to mistakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gangline.domain.errors import (
    Conflict,
    InvalidRequest,
    LeaseLost,
    LimitExceeded,
    NotFound,
    PortUnavailable,
    ServerUnavailable,
    Unauthorized,
    UnknownPlugin,
)
from gangline.domain.lifecycle import STAGES, Stage
from gangline.domain.tokens import decode_msgpack
from gangline.server.run import serve, serving
from gangline.wire.client.server import ServerClient
from support.service.running import NODE_URL, FakeNode, any_plugin, beat, engine_down, request, result

TOKEN = "control-secret"


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ServerClient]:
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin, retry_base_s=0.0) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        yield client


@pytest.fixture
def node(client: ServerClient) -> FakeNode:
    return FakeNode(client)


async def raw(client: ServerClient, method: str, path: str, token: str | None = TOKEN, **call: Any) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    async with aiohttp.ClientSession(headers=headers) as http, http.request(method, client.url + path, **call) as reply:
        assert reply.status < 400 or reply.content_type == "application/problem+json"
        return reply.status, json.loads(await reply.read())


async def test_a_task_goes_from_submit_to_results(client: ServerClient, node: FakeNode):
    submitted = await client.submit(request(num_samples=3))
    assert (submitted.task_id, submitted.created) == ("t", True)
    assert submitted.session_ids == ("t.0", "t.1", "t.2")
    leases = await node.lease()
    assert [lease.sample_index for lease in leases] == [0, 1, 2]
    assert leases[0].task["instruction"] == "do it"
    await node.beat(leases, stage="postrun")
    assert (await client.status()).stages == {"postrun": 3}
    for lease, reward in zip(leases, (0.0, 0.5, 1.0), strict=True):
        receipt = await client.post_result(result(lease, reward=reward, artifacts={"log": b"\x00\xff"}))
        assert (receipt.accepted, receipt.state) == (True, "ended")
    task = await client.wait("t", timeout_s=10)
    assert (task.status, task.rewards, task.outcomes) == ("ended", (0.0, 0.5, 1.0), {"completed": 3})
    results = await client.result("t")
    assert [found.reward for found in results] == [0.0, 0.5, 1.0]
    assert results[0].artifacts == {"log": b"\x00\xff"}
    assert (await client.session_result("t.1")).reward == 0.5
    status, body = await raw(client, "GET", "/v1/tasks/t/result")
    assert (status, body["rewards"], len(body["results"])) == (200, [0.0, 0.5, 1.0], 3)


async def test_the_same_task_twice_is_one_task_and_another_of_its_name_is_a_conflict(client: ServerClient):
    first = await client.submit(request())
    again = await client.submit(request())
    assert (again.session_ids, again.created) == (first.session_ids, False)
    with pytest.raises(Conflict, match="'t' is taken"):
        await client.submit(request(instruction="something else"))
    assert (await client.status()).sessions == {"queued": 2}


async def test_the_server_names_a_task_that_has_no_name(client: ServerClient):
    submitted = await client.submit(request(None))
    assert submitted.task_id.startswith("task-")
    assert (await client.task(submitted.task_id)).request["task_id"] == submitted.task_id


async def test_a_batch_is_accepted_whole_or_not_at_all(client: ServerClient):
    with pytest.raises(Conflict):
        await client.submit_many([request("a"), request("b"), request("a", instruction="other")])
    assert (await client.tasks()).tasks == ()
    assert [found.task_id for found in await client.submit_many([request("a"), request("b")])] == ["a", "b"]


async def test_tasks_are_listed_in_pages_newest_first(client: ServerClient):
    await client.submit_many([request(f"t{index}") for index in range(5)])
    await client.cancel("t3")
    first = await client.tasks(limit=2)
    assert [task.task_id for task in first.tasks] == ["t4", "t3"]
    rest = await client.tasks(limit=5, before=first.next)
    assert ([task.task_id for task in rest.tasks], rest.next) == (["t2", "t1", "t0"], None)
    assert [task.task_id for task in (await client.tasks(status="cancelled")).tasks] == ["t3"]


@pytest.mark.parametrize(
    ("accept", "told"),
    [
        (None, "application/json"),
        ("*/*", "application/json"),
        ("application/json", "application/json"),
        ("application/msgpack", "application/msgpack"),
        ("application/json;q=0.5, application/msgpack", "application/msgpack"),
        ("application/msgpack;q=0.5, application/json", "application/json"),
        ("application/msgpack;q=0", "application/json"),
    ],
)
async def test_results_come_in_the_form_that_was_asked_for(
    client: ServerClient, node: FakeNode, accept: str | None, told: str
):
    await client.submit(request(num_samples=1))
    await node.finish(await node.lease(), reward=0.25)
    headers = {"Authorization": f"Bearer {TOKEN}"} | ({} if accept is None else {"Accept": accept})
    async with aiohttp.ClientSession(headers=headers) as http:
        for path in ("/v1/tasks/t/result", "/v1/sessions/t.0/result"):
            async with http.get(client.url + path) as answer:
                assert (answer.status, answer.content_type) == (200, told)
                data = await answer.read()
        decoded = msgspec.json.decode(data) if told == "application/json" else decode_msgpack(data, dict)
        assert decoded["reward"] == 0.25


async def test_a_long_poll_for_work_is_answered_when_a_task_comes(client: ServerClient, node: FakeNode):
    waiting = asyncio.create_task(node.lease(wait_s=60))
    while not (await client.status()).nodes:
        await asyncio.sleep(0)
    await client.submit(request())
    assert len(await asyncio.wait_for(waiting, 30)) == 2
    assert await node.lease(wait_s=0.01) == []


async def test_a_long_poll_for_a_task_is_answered_when_its_last_session_ends(client: ServerClient, node: FakeNode):
    await client.submit(request())
    assert not (await client.task("t", wait_s=0.01)).ended
    waiting = asyncio.create_task(client.task("t", wait_s=60))
    first, last = await node.lease()
    await node.finish([first])
    assert not waiting.done()
    await node.finish([last])
    assert (await asyncio.wait_for(waiting, 30)).ended


async def test_a_node_that_leaves_while_it_waits_is_given_nothing(client: ServerClient, node: FakeNode):
    waiting = asyncio.create_task(node.lease(wait_s=60))
    while not (await client.status()).nodes:
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await client.submit(request())
    other = FakeNode(client, "n2")
    leases = await other.lease(wait_s=30)
    assert {(lease.session_id, lease.attempt) for lease in leases} == {("t.0", 1), ("t.1", 1)}


async def test_the_results_of_a_running_task_are_a_conflict_unless_partial_ones_do(
    client: ServerClient, node: FakeNode
):
    await client.submit(request())
    first, _second = await node.lease()
    await node.finish([first])
    with pytest.raises(Conflict, match="1 of 2 sessions are open; wait with GET"):
        await client.result("t")
    assert [found.session_id for found in await client.result("t", partial=True)] == ["t.0"]
    with pytest.raises(Conflict, match="it is leased"):
        await client.session_result("t.1")


async def test_a_report_counts_once_however_often_it_is_sent(client: ServerClient, node: FakeNode):
    await client.submit(request(num_samples=1))
    (lease,) = await node.lease()
    receipts = [await client.post_result(result(lease)) for _ in range(3)]
    assert {(receipt.accepted, receipt.state) for receipt in receipts} == {(True, "ended")}
    assert (await client.task("t")).num_open == 0


async def test_a_report_with_an_old_fence_is_refused(client: ServerClient, node: FakeNode):
    await client.submit(request(num_samples=1))
    (old,) = await node.lease()
    await client.release("n1", session_id="t.0", fence=old.fence)
    (new,) = await FakeNode(client, "n2").lease()
    assert (new.attempt, new.fence) == (1, 2)
    with pytest.raises(LeaseLost, match="leased with fence 2"):
        await client.post_result(result(old, reward=0.0))
    await client.post_result(result(new, "n2", reward=1.0))
    assert (await client.session_result("t.0")).node_id == "n2"


async def test_a_broken_engine_sends_a_session_round_until_its_attempts_are_spent(client: ServerClient, node: FakeNode):
    await client.submit(request(num_samples=1, max_attempts=2))
    (first,) = await node.lease()
    assert (await client.post_result(result(first, **engine_down()))).state == "queued"
    (second,) = await node.lease()
    assert (second.attempt, second.fence) == (2, 2)
    assert (await client.post_result(result(second, **engine_down()))).state == "ended"
    task = await client.task("t")
    assert (task.outcomes, task.rewards) == ({"infra_error": 1}, (None,))
    assert (await client.session_result("t.0", attempt=1)).attempt == 1
    found = await client.session_result("t.0")
    assert found.attempt == 2
    assert found.failure is not None
    assert found.failure.code == "engine_unavailable"


async def test_a_cancelled_task_frees_its_node_and_its_waiters(client: ServerClient, node: FakeNode):
    await client.submit(request(num_samples=3))
    held = await node.lease(max_sessions=2)
    waiting = asyncio.create_task(client.task("t", wait_s=60))
    cancelled = await client.cancel("t")
    assert (cancelled.status, cancelled.outcomes) == ("cancelled", {"cancelled": 3})
    assert (await asyncio.wait_for(waiting, 30)).status == "cancelled"
    assert (await node.beat(held)).lost == ("t.0", "t.1")
    with pytest.raises(LeaseLost):
        await node.finish(held)
    assert await node.lease() == []
    assert [found.outcome for found in await client.result("t")] == ["cancelled"] * 3
    assert (await client.cancel("t")).ended_at == cancelled.ended_at


@pytest.mark.parametrize("stage", [None, *STAGES])
async def test_a_session_is_cancelled_at_whatever_stage_it_is(
    client: ServerClient, node: FakeNode, stage: Stage | None
):
    await client.submit(request(num_samples=3))
    gone, *going_on = await node.lease()
    if stage is not None:
        await node.beat([gone, *going_on], stage=stage)
    cancelled = await client.cancel_session(gone.session_id)
    assert (cancelled.state, cancelled.outcome, cancelled.stage) == ("ended", "cancelled", None)
    assert (await node.beat([gone, *going_on], stage=stage or "init")).lost == (gone.session_id,)
    with pytest.raises(LeaseLost, match="it is ended"):
        await node.finish([gone])
    await node.finish(going_on)
    task = await client.task("t")
    assert (task.status, task.outcomes, task.rewards) == ("ended", {"cancelled": 1, "completed": 2}, (None, 1.0, 1.0))


@pytest.mark.parametrize("stage", [None, *STAGES])
async def test_a_group_is_cancelled_at_whatever_stages_its_sessions_are(
    client: ServerClient, node: FakeNode, stage: Stage | None
):
    """One has ended, one is at the stage, one rests after a fault, one is queued."""
    await client.submit(request(num_samples=4, callback_url="http://127.0.0.1:9/"))
    first, second, third = await node.lease(max_sessions=3)
    await node.finish([first])
    await node.finish([second], **engine_down())
    if stage is not None:
        await node.beat([third], stage=stage)
    cancelled = await client.cancel("t")
    assert (cancelled.status, cancelled.outcomes) == ("cancelled", {"completed": 1, "cancelled": 3})
    assert (await node.beat([third], stage=stage or "init")).lost == (third.session_id,)
    status = await client.status()
    assert (status.sessions, status.stages, status.num_waiting) == ({"ended": 4}, {}, 0)
    assert (status.callbacks, await node.lease()) == ({"pending": 1}, [])


async def test_one_session_can_be_cancelled_and_the_others_go_on(client: ServerClient, node: FakeNode):
    await client.submit(request())
    assert (await client.cancel_session("t.0")).outcome == "cancelled"
    (lease,) = await node.lease()
    await node.finish([lease])
    task = await client.task("t")
    assert (task.status, task.rewards) == ("ended", (None, 1.0))


async def test_a_node_whose_result_is_here_already_is_not_told_to_drop_the_session(
    client: ServerClient, node: FakeNode
):
    await client.submit(request(num_samples=1))
    leases = await node.lease()
    await node.finish(leases)
    reply = await node.beat(leases)
    assert (reply.renewed, reply.lost) == ((), ())


async def test_status_tells_of_nodes_and_queues(client: ServerClient, node: FakeNode):
    await client.submit(request(num_samples=3))
    leases = await node.lease(max_sessions=1)
    assert (await client.status()).stages == {"leased": 1}
    await client.heartbeat(beat(leases, stage="run"))
    status = await client.status()
    assert (status.sessions, status.stages, status.tasks) == ({"queued": 2, "leased": 1}, {"run": 1}, {"running": 1})
    (seen,) = status.nodes
    assert (seen.node_id, seen.url, seen.capacity, seen.num_sessions) == ("n1", NODE_URL, 8, 1)
    assert status.oldest_queued_s is not None
    assert status.stage_ages_s.keys() == status.stages.keys()


@pytest.mark.parametrize("path", ["/v1/tasks", "/v1/status", "/v1/events", "/openapi.json", "/v1/tasks/t/result"])
@pytest.mark.parametrize("token", [None, "wrong", TOKEN + "x"])
async def test_nothing_but_health_answers_without_the_control_token(client: ServerClient, path: str, token: str | None):
    status, problem = await raw(client, "GET", path, token)
    assert (status, problem["code"]) == (401, "unauthorized")
    assert (await raw(client, "GET", "/health", token))[0] == 200
    async with ServerClient(client.url, token) as stranger:
        with pytest.raises(Unauthorized):
            await stranger.status()


async def test_mistakes_are_named(client: ServerClient, node: FakeNode):
    with pytest.raises(InvalidRequest, match=r"agent\.harnes"):
        await client.submit({"instruction": "x", "agent": {"harnes": "shell"}})
    with pytest.raises(InvalidRequest, match="num_samples"):
        await client.submit({"instruction": "x", "agent": {"harness": "shell"}, "num_samples": 0})
    with pytest.raises(InvalidRequest, match="at most 123 characters"):
        await client.submit(request("x" * 124))
    with pytest.raises(NotFound, match="'nope'"):
        await client.task("nope")
    with pytest.raises(NotFound):
        await client.session("nope.0")
    with pytest.raises(InvalidRequest, match="max_sessions"):
        await node.lease(max_sessions=0)
    with pytest.raises(InvalidRequest, match="node_id"):
        await client.heartbeat(beat([], "-x"))


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/tasks", b"{", 400, "invalid_request"),
        ("POST", "/v1/nodes/n1/lease", b"{}", 400, "invalid_request"),
        ("POST", "/v1/nodes/n1/heartbeat", b"[]", 400, "invalid_request"),
        pytest.param("POST", "/v1/nodes/n1/heartbeat", b'{"a":' * 50_000, 400, "invalid_request", id="nested"),
        ("POST", "/v1/sessions/t.0/result", b"\xc1", 400, "invalid_request"),
        ("GET", "/v1/tasks/t?wait_s=soon", None, 400, "invalid_request"),
        ("GET", "/v1/tasks/t?wait_s=nan", None, 400, "invalid_request"),
        ("GET", "/v1/tasks?status=lost", None, 400, "invalid_request"),
        ("GET", "/v1/events?after=-1", None, 400, "invalid_request"),
        ("GET", "/v1/tasks/..%2f..%2fetc", None, 400, "invalid_request"),
        ("GET", "/v1/nothing", None, 404, "not_found"),
        ("PUT", "/v1/tasks", None, 405, "method_not_allowed"),
    ],
)
async def test_every_mistake_is_answered_as_a_problem(
    client: ServerClient, method: str, path: str, body: bytes | None, status: int, code: str
):
    found, problem = await raw(client, method, path, data=body)
    assert (found, problem["status"], problem["code"]) == (status, status, code)
    assert problem["detail"]


async def test_an_unknown_plugin_is_refused_and_the_nearest_one_named(tmp_path: Path):
    async with serving(data_dir=tmp_path, control_token=None) as running, ServerClient(running.url) as client:
        with pytest.raises(UnknownPlugin, match=r"unknown runtime 'sandbx'\. Did you mean 'sandbox'"):
            await client.submit(request(runtime={"backend": "sandbx"}))
        assert (await client.tasks()).tasks == ()


async def test_a_body_over_the_limit_is_refused(client: ServerClient):
    with pytest.raises(LimitExceeded):
        await client.submit(request(instruction="x" * (65 * 1024**2)))


async def test_without_a_control_token_only_loopback_is_listened_on(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="GANGLINE_TOKEN"):
        await serve(data_dir=tmp_path, control_token=None, host="0.0.0.0")


async def test_a_port_in_use_is_an_error_that_names_it(tmp_path: Path):
    async with serving(data_dir=tmp_path / "a", control_token=None) as running:
        port = int(running.url.rsplit(":", 1)[1])
        with pytest.raises(PortUnavailable, match=f"127.0.0.1:{port}: it is in use"):
            await serve(data_dir=tmp_path / "b", control_token=None, port=port)


async def test_two_servers_cannot_share_a_data_folder(tmp_path: Path):
    async with serving(data_dir=tmp_path, control_token=None):
        with pytest.raises(Conflict, match="another server is using"):
            await serve(data_dir=tmp_path, control_token=None)
    async with serving(data_dir=tmp_path, control_token=None):
        pass


async def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path):
    async with serving(data_dir=tmp_path, control_token=None) as running:
        url = running.url
    async with ServerClient(url) as client:
        with pytest.raises(ServerUnavailable, match="gangline up"):
            await client.status()


async def test_the_description_has_every_route_and_resolves(client: ServerClient):
    _, described = await raw(client, "GET", "/openapi.json")
    text = json.dumps(described)
    schemas = described["components"]["schemas"]
    references = {piece.split('"')[0] for piece in text.split("#/components/schemas/")[1:]}
    assert references <= set(schemas)
    assert {"TaskRequest", "SessionResult", "Lease", "Problem"} <= set(schemas)
    names = [operation["operationId"] for path in described["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names) >= 17
    assert set(described["paths"]["/v1/tasks"]) == {"get", "post"}
    assert (
        "application/msgpack"
        in described["paths"]["/v1/sessions/{session_id}/result"]["post"]["requestBody"]["content"]
    )
