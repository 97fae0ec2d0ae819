"""A trainer and a gateway that know Polar's paper (A.3 to A.5) and nothing of Gangline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gangline.client import ServerClient
from gangline.domain.tokens import logprobs, token_ids
from gangline.domain.trajectory import Trace, Trajectory
from gangline.server.run import serving
from service import FakeNode, any_plugin

TOKEN = "control-secret"

# A.3, with its placeholders filled in.
PAYLOAD: dict[str, Any] = {
    "task_id": "polar-swegym-0-0",
    "instruction": "Fix the issue in /polar/session/workspace.",
    "num_samples": 2,
    "timeout_seconds": 1200,
    "runtime": {
        "backend": "docker",
        "image": "swegym/instance:1",
        "network": "host",
        "workdir": "/polar/session/workspace",
        "prepare": [{"type": "exec", "command": "prepare repository, harness, and dependencies"}],
    },
    "agent": {"harness": "codex", "model_name": "served"},
    "builder": {"strategy": "prefix_merging"},
    "evaluator": {
        "strategy": "swebench_harness",
        "refresh_runtime": True,
        "config": {"repo_dir": "/testbed", "patch_command": "git diff", "instance": {"id": 1}},
    },
    "callback_url": "http://127.0.0.1:9/callback/task_result",
    "metadata": {"group_id": "0", "policy_version": "3", "rollout_step": "7"},
}
TRACE_FIELDS = {
    "prompt_ids", "response_ids", "loss_mask", "response_logprobs", "prompt_messages", "response_messages", "tools",
    "finish_reason", "reward", "metadata",
}  # fmt: skip


class Trainer:
    """Speaks JSON over HTTP, as A.5 says."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.http = http

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body) as reply:
            return reply.status, await reply.json(content_type=None)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as reply:
            return reply.status, await reply.json(content_type=None)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ServerClient]:
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        yield client


@pytest.fixture
async def trainer(client: ServerClient) -> AsyncIterator[Trainer]:
    async with aiohttp.ClientSession(headers={"X-Polar-Control-Token": TOKEN}) as http:
        yield Trainer(client.url, http)


def trajectory_of(session_id: str, task_id: str) -> Trajectory:
    trace = Trace(
        trace_id=f"{session_id}.0",
        session_id=session_id,
        prompt_ids=token_ids([151644, 872]),
        response_ids=token_ids([785, 10042, 151645]),
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


async def test_a_trainer_submits_polls_partial_results_and_ends_with_traces_as_printed(
    trainer: Trainer, client: ServerClient
):
    node = FakeNode(client)
    status, submitted = await trainer.post("/rollout/task/submit", PAYLOAD)
    assert (status, submitted["task_id"], submitted["status"]) == (200, "polar-swegym-0-0", "running")
    leases = await node.lease()
    assert leases[0].task["runtime"]["network"] == "full"
    assert leases[0].task["metadata"] == PAYLOAD["metadata"]
    path = "/rollout/task/polar-swegym-0-0"
    assert (await trainer.get(path))[1] | {"results": []} == {
        "task_id": "polar-swegym-0-0",
        "status": "running",
        "total_sessions": 2,
        "completed_sessions": 0,
        "results": [],
        "result_paths": [],
    }
    traced = trajectory_of(leases[0].session_id, leases[0].task_id)
    await node.finish(leases[:1], trajectory=traced, reward=1.0)
    _, partial = await trainer.get(path)
    assert (partial["status"], partial["completed_sessions"]) == ("running", 1)
    await node.finish(leases[1:], outcome="agent_timeout", reward=None)
    _, final = await trainer.get(path)
    assert (final["status"], final["completed_sessions"]) == ("completed", 2)
    assert [result["status"] for result in final["results"]] == ["COMPLETED", "TIMEOUT"]
    trace = final["results"][0]["trajectory"]["traces"][0]
    assert set(trace) == TRACE_FIELDS
    assert (trace["response_ids"], trace["loss_mask"], trace["reward"]) == ([785, 10042, 151645], [1, 1, 0], 1.0)
    assert trace["response_logprobs"][1] == {"token_id": 10042, "logprob": -0.5}
    about = trace["metadata"]
    assert (about["session_id"], about["builder"], about["harness"]) == (
        leases[0].session_id,
        "prefix_merging",
        "codex",
    )
    _, numbers = await trainer.get(f"{path}?logprobs=floats")
    assert numbers["results"][0]["trajectory"]["traces"][0]["response_logprobs"] == [-0.25, -0.5, 0.0]


async def test_status_tells_tasks_nodes_and_pending_sessions(trainer: Trainer, client: ServerClient):
    await trainer.post("/rollout/task/submit", PAYLOAD)
    await FakeNode(client).lease(max_sessions=1)
    _, status = await trainer.get("/rollout/status")
    assert status["tasks"] == {"polar-swegym-0-0": "running"}
    assert (status["pending_sessions"], status["running_sessions"], list(status["nodes"])) == (1, 1, ["n1"])


async def test_a_field_that_has_no_meaning_here_is_refused_by_name(trainer: Trainer):
    status, problem = await trainer.post("/rollout/task/submit", PAYLOAD | {"sidecar": 1})
    assert status == 400
    assert "sidecar" in problem["detail"]
    assert (await trainer.get("/rollout/task/none"))[0] == 404


async def test_a_builder_with_config_and_limits_in_its_words_becomes_ours(trainer: Trainer, client: ServerClient):
    runtime = PAYLOAD["runtime"] | {"memory_mb": 2, "cpus": 3, "allow_internet": False}
    builder = {"strategy": "prefix_merging", "config": {"roles": ["main"]}}
    await trainer.post("/rollout/task/submit", PAYLOAD | {"runtime": runtime, "builder": builder, "evaluator": None})
    (lease, *_) = await FakeNode(client).lease()
    assert lease.task["runtime"]["limits"]["memory_bytes"] == 2 * 1024**2
    assert (lease.task["runtime"]["limits"]["cpus"], lease.task["runtime"]["network"]) == (3, "proxy")
    assert lease.task["builder"] == {"strategy": "prefix_merging", "roles": ["main"]}


REGISTRATION = {
    "node_id": "gateway-1",
    "gateway_url": "http://10.0.0.7:8100",
    "max_init_workers": 4,
    "max_run_workers": 2,
    "max_postrun_workers": 4,
    "heartbeat_interval_seconds": 30,
}


async def test_a_gateway_joins_beats_with_its_metrics_and_reports_a_session(trainer: Trainer, client: ServerClient):
    assert (await trainer.post("/nodes/gateway-1/heartbeat", {"metrics": {}}))[0] == 404
    status, joined = await trainer.post("/nodes/register", REGISTRATION)
    assert (status, joined["gateway_url"], joined["healthy"]) == (200, "http://10.0.0.7:8100", True)
    await trainer.post("/rollout/task/submit", PAYLOAD | {"num_samples": 1})
    (lease,) = await FakeNode(client, "gateway-1").lease()
    beat = {"metrics": {"run_inflight": 1}, "sessions": {lease.session_id: [lease.fence, "run"]}}
    _, seen = await trainer.post("/nodes/gateway-1/heartbeat", beat)
    assert (seen["renewed"], seen["metrics"]["run_inflight"]) == ([lease.session_id], 1)
    assert (await client.status()).nodes[0].capacity == 2
    result = {
        "session_id": lease.session_id,
        "task_id": lease.task_id,
        "node_id": "gateway-1",
        "status": "COMPLETED",
        "trajectory": {
            "status": "COMPLETED",
            "traces": [
                {
                    "prompt_ids": [1],
                    "response_ids": [2, 3],
                    "loss_mask": [1, 0],
                    "response_logprobs": [{"token": "x", "token_id": 2, "logprob": -0.5}, {"logprob": 0.0}],
                    "prompt_messages": [{"role": "user", "content": "hi"}],
                    "reward": 0.75,
                }
            ],
        },
    }
    wrong = await trainer.post("/callbacks/session_result", result | {"node_id": "another"})
    assert wrong[0] == 409
    assert await trainer.post("/callbacks/session_result", result) == (200, {"status": "accepted"})
    assert await trainer.post("/callbacks/session_result", result) == (200, {"status": "accepted"})
    _, task = await trainer.get("/rollout/task/polar-swegym-0-0")
    (trace,) = task["results"][0]["trajectory"]["traces"]
    assert (task["status"], trace["response_ids"], trace["reward"]) == ("completed", [2, 3], 0.75)
    assert trace["prompt_messages"] == [{"role": "user", "content": "hi"}]


async def test_a_gateway_that_says_error_is_not_scored(trainer: Trainer, client: ServerClient):
    await trainer.post("/rollout/task/submit", PAYLOAD | {"num_samples": 1})
    (lease,) = await FakeNode(client).lease()
    result = {"session_id": lease.session_id, "task_id": lease.task_id, "status": "ERROR", "error": "it broke"}
    assert (await trainer.post("/callbacks/session_result", result))[0] == 200
    task = await client.task(lease.task_id)
    assert (task.outcomes, task.rewards) == ({"infra_error": 1}, (None,))


async def test_none_of_it_opens_without_the_token(client: ServerClient):
    async with aiohttp.ClientSession() as http:
        stranger = Trainer(client.url, http)
        calls = [
            stranger.post("/rollout/task/submit", PAYLOAD),
            stranger.get("/rollout/status"),
            stranger.post("/nodes/register", REGISTRATION),
            stranger.post("/nodes/n1/heartbeat", {}),
            stranger.post("/callbacks/session_result", {}),
        ]
        assert [status for status, _ in await asyncio.gather(*calls)] == [401] * 5
