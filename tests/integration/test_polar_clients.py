"""Clients of Polar's published source: each sends what that source sends, and reads answers as its models do.

Source: github.com/NVIDIA-NeMo/ProRL-Agent-Server. Each test names the file, and the commit at which it was read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from gangline.client.server import ServerClient
from gangline.domain.session import StageTiming
from gangline.domain.tokens import logprobs, token_ids
from gangline.domain.trajectory import Trace, Trajectory
from gangline.http.listening import listening
from gangline.server.run import serving
from support.service.running import FakeNode

TOKEN = "control-secret"
HEADERS = {"X-Polar-Control-Token": TOKEN}
SESSION_STATUSES = {
    "REGISTERED", "INITIALIZING", "READY", "RUNNING", "POST_RUN", "BUILDING", "EVALUATING", "COMPLETED", "ERROR",
    "TIMEOUT",
}  # fmt: skip
TIMINGS = {"init_ms", "ready_queue_ms", "run_ms", "postrun_ms", "e2e_ms"}
"""Those of `SessionTiming` that are sent: the model forbids others."""
TASK: dict[str, Any] = {
    "task_id": "polar-slime-0-0",
    "instruction": "do it",
    "num_samples": 2,
    "timeout_seconds": 900.0,
    "runtime": {"backend": "apptainer", "image": "/images/one.sif", "network": "host", "workdir": "/work"},
    "agent": {"harness": "codex", "model_name": "served"},
    "builder": {"strategy": "prefix_merging"},
    "evaluator": {"strategy": "session_completed"},
    "metadata": {"group_id": 4, "policy_version": 3, "rollout_step": 7},
}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ServerClient]:
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, callback_base_s=0.02) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        yield client


@pytest.fixture
async def http(client: ServerClient) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=client.url, headers=HEADERS, timeout=30) as http:
        yield http


def trajectory_of(session_id: str, task_id: str) -> Trajectory:
    trace = Trace(
        trace_id=f"{session_id}.0",
        session_id=session_id,
        prompt_ids=token_ids([1, 2]),
        response_ids=token_ids([3, 4, 5]),
        loss_mask=token_ids([1, 1, 0]).astype("int8"),
        response_logprobs=logprobs([-0.25, -0.5, 0.0]),
        response_versions=token_ids([3, 3, -1]),
        spans=(),
        prompt_messages=(),
        response_messages=(),
        finish_reason="stop",
        certificates=(),
    )
    return Trajectory(
        session_id=session_id, task_id=task_id, builder="prefix_merging", traces=(trace,), num_completions=1
    )


def check_task_status(task: Any) -> None:
    """Refuse what `TaskStatus.model_validate` refuses: `rollout/models.py` and `trajectory/models.py`, 063c948."""
    assert all(isinstance(task[name], str) for name in ("task_id", "status"))
    assert all(isinstance(task[name], int) for name in ("total_sessions", "completed_sessions"))
    assert all(isinstance(path, str) for path in task["result_paths"])
    for result in task["results"]:
        assert result["status"] in SESSION_STATUSES
        assert set(result["timing"]) <= TIMINGS
        assert isinstance(result["metadata"], dict)
        trajectory = result["trajectory"]
        assert trajectory["status"] in {"COMPLETED", "TIMEOUT", "ERROR"}
        for trace in trajectory["traces"]:
            length = len(trace["response_ids"])
            assert len(trace["loss_mask"]) == length
            assert set(trace["loss_mask"]) <= {0, 1}
            assert len(trace["response_logprobs"]) == length
            assert all(isinstance(value, int | float) for value in trace["response_logprobs"])
            assert trace["reward"] is None or math.isfinite(trace["reward"])
            assert trace["tools"] is None or all(isinstance(tool, dict) for tool in trace["tools"])


async def finished(client: ServerClient, outcome: Any = "completed", reward: float | None = 1.0) -> None:
    node = FakeNode(client)
    for lease in await node.lease():
        timings = (StageTiming("ready", 1.0, 2.0), StageTiming("run", 10.0, 12.5))
        trajectory = trajectory_of(lease.session_id, lease.task_id)
        await node.finish([lease], trajectory=trajectory, outcome=outcome, reward=reward, timings=timings)


async def test_the_bridge_of_slime_reads_a_poll_as_its_models_do(http: httpx.AsyncClient, client: ServerClient):
    """`slime_bridge/rollout.py` `_get_task_status_with_retry`, 01bc72d: no query, and log-probs are numbers."""
    submitted = await http.post("/rollout/task/submit", json=TASK)
    assert (submitted.status_code, submitted.json()["task_id"]) == (200, TASK["task_id"])
    await finished(client)
    task = (await http.get(f"/rollout/task/{TASK['task_id']}")).json()
    check_task_status(task)
    assert task["results"][0]["trajectory"]["traces"][0]["response_logprobs"] == [-0.25, -0.5, 0.0]


async def test_the_listener_of_the_bridge_reads_a_callback_as_its_models_do(
    http: httpx.AsyncClient, client: ServerClient
):
    """`slime_bridge/rollout.py` `_start_callback_listener`, 01bc72d: it answers 200 to all, and drops what it cannot
    read."""
    told: asyncio.Queue[Any] = asyncio.Queue()

    async def take(call: web.Request) -> web.Response:
        await told.put(await call.json())
        return web.json_response({"ok": True})

    app = web.Application()
    app.router.add_post("/callback/task_result", take)
    async with listening(app, shutdown_s=1.0, host="127.0.0.1", port=0) as (host, port, *_):
        task = TASK | {"callback_url": f"http://{host}:{port}/callback/task_result"}
        assert (await http.post("/rollout/task/submit", json=task)).status_code == 200
        await finished(client)
        body = await asyncio.wait_for(told.get(), 30)
    check_task_status(body)
    assert (body["task_id"], body["status"], len(body["results"])) == (TASK["task_id"], "completed", 2)


async def test_a_result_carries_what_the_trainer_wrote_into_the_task(http: httpx.AsyncClient, client: ServerClient):
    """`slime_bridge/adapter.py` `_scheduler_metadata`, 063c948: it reads them in the result and in its trajectory."""
    await http.post("/rollout/task/submit", json=TASK)
    await finished(client)
    for result in (await http.get(f"/rollout/task/{TASK['task_id']}")).json()["results"]:
        trajectory = result["trajectory"]["metadata"]
        assert {name: result["metadata"][name] for name in TASK["metadata"]} == TASK["metadata"]
        assert {name: trajectory[name] for name in TASK["metadata"]} == TASK["metadata"]
        assert trajectory["task_metadata"] == TASK["metadata"]
        assert trajectory["evaluation"]["outcome_reward"] == 1.0


async def test_a_cancelled_worker_cancels_its_task(http: httpx.AsyncClient, client: ServerClient):
    """`slime_bridge/rollout.py` `_submit_with_callback`, 01bc72d."""
    await http.post("/rollout/task/submit", json=TASK)
    path = f"/rollout/task/{TASK['task_id']}"
    answer = await http.delete(path, params={"register_if_missing": "true"})
    check_task_status(answer.json())
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert (await client.task(TASK["task_id"])).ended
    assert (await http.delete(path)).json()["status"] == "cancelled"


async def test_a_task_that_was_cancelled_before_its_submit_arrived_is_refused(http: httpx.AsyncClient):
    """`rollout/manager.py` `cancel_task`, 063c948: else the late submit would run for nobody."""
    assert (await http.delete("/rollout/task/late")).status_code == 404
    answer = await http.delete("/rollout/task/late", params={"register_if_missing": "true"})
    check_task_status(answer.json())
    assert (answer.status_code, answer.json()["status"], answer.json()["total_sessions"]) == (200, "cancelled", 0)
    refused = await http.post("/rollout/task/submit", json=TASK | {"task_id": "late"})
    assert (refused.status_code, "cancelled before" in refused.json()["detail"]) == (409, True)
    assert (await http.get("/rollout/task/late")).status_code == 404


async def test_polls_without_the_header_are_let_in_by_the_address(client: ServerClient):
    """`slime_bridge/rollout.py`, 01bc72d: it sends the token with a submit alone, so the URL must have it. `cli.py`,
    01bc72d: `polar status` sends none at all."""
    host = client.url.removeprefix("http://")
    async with httpx.AsyncClient(timeout=30) as bridge:
        url = f"http://polar:{TOKEN}@{host}"
        assert (await bridge.post(f"{url}/rollout/task/submit", json=TASK, headers=HEADERS)).status_code == 200
        assert (await bridge.get(f"{url}/rollout/task/{TASK['task_id']}")).status_code == 200
        assert (await bridge.delete(f"{url}/rollout/task/{TASK['task_id']}")).status_code == 200
        wrong = f"http://polar:another@{host}"
        for base in (wrong, f"http://{host}"):
            assert (await bridge.get(f"{base}/rollout/task/{TASK['task_id']}")).status_code == 401
    async with httpx.AsyncClient(base_url=url, timeout=30) as cli:
        assert (await cli.get("/rollout/status")).status_code == 200


async def test_polar_status_shows_nodes_and_sessions(http: httpx.AsyncClient, client: ServerClient):
    """`cli.py` `_handle_status`, 01bc72d: `pipeline.pending_sessions` are all that have not ended, `nodes.nodes` a
    list."""
    gateway = {
        "node_id": "slurm-rank-0",
        "gateway_url": "http://127.0.0.1:9",
        "max_init_workers": 12,
        "max_run_workers": 96,
        "max_postrun_workers": 24,
        "heartbeat_interval_seconds": 30,
    }
    answers = [await http.post("/nodes/register", json=gateway)]
    beat = {"metrics": {"init_queue_depth": 0, "init_inflight": 1, "ready_depth": 2, "run_inflight": 3}}
    answers.append(await http.post("/nodes/slurm-rank-0/heartbeat", json=beat))
    await FakeNode(client).lease(max_sessions=1)
    status = (await http.get("/rollout/status")).json()
    nodes = {node["node_id"]: node for node in status["nodes"]["nodes"]}
    assert status["pipeline"] == {"pending_sessions": 0}
    for node in (*(answer.json() for answer in answers), nodes["slurm-rank-0"]):
        assert node | gateway == node
        assert (node["healthy"], node["draining"], node["dispatch_reservations"]) == (True, False, 0)
        assert datetime.fromisoformat(node["last_heartbeat"]).tzinfo is not None
        assert set(node["metrics"]).isdisjoint(gateway)
    assert nodes["slurm-rank-0"]["metrics"] | beat["metrics"] == nodes["slurm-rank-0"]["metrics"]
    assert set(nodes["n1"]) == set(nodes["slurm-rank-0"]) - {"renewed", "lost"}
