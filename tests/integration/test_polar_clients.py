"""Clients of Polar's published source: each sends what that source sends, and reads answers as its models do.

Source: github.com/NVIDIA-NeMo/ProRL-Agent-Server. Each test names the file, and the commit at which it was read.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from aiohttp import web

from gangline.domain.errors import Failure, InvalidRequest
from gangline.domain.session import Lease, StageTiming
from gangline.domain.task import TaskRequest
from gangline.domain.tokens import logprobs, token_ids
from gangline.domain.trajectory import Trace, Trajectory
from gangline.interop.polar.records import polar_result
from gangline.interop.polar.sessions import needs_of_ours, session_for_gateway
from gangline.interop.polar.tasks import protected_by_default, task_from_polar
from gangline.server.run import serving
from gangline.wire.client.server import ServerClient
from gangline.wire.http.listening import listening
from support.service.running import FakeNode
from support.service.running import result as session_end

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


def lease_of(task: TaskRequest, sample_index: int = 0) -> Lease:
    return Lease(
        session_id=f"s-{sample_index}",
        task_id=task.task_id or "t",
        sample_index=sample_index,
        attempt=1,
        fence=1,
        expires_at=0.0,
        lease_s=60.0,
        task=task.model_dump(mode="json"),
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


async def finished(client: ServerClient, **changes: Any) -> None:
    node = FakeNode(client)
    for lease in await node.lease():
        timings = (StageTiming("ready", 1.0, 2.0), StageTiming("run", 10.0, 12.5))
        trajectory = trajectory_of(lease.session_id, lease.task_id)
        await node.finish([lease], trajectory=trajectory, timings=timings, **changes)


async def test_the_bridge_of_slime_reads_a_poll_as_its_models_do(http: httpx.AsyncClient, client: ServerClient):
    """`slime_bridge/rollout.py` `_get_task_status_with_retry`, 01bc72d: no query, and log-probs are numbers."""
    submitted = await http.post("/rollout/task/submit", json=TASK)
    assert (submitted.status_code, submitted.json()["task_id"]) == (200, TASK["task_id"])
    await finished(client)
    task = (await http.get(f"/rollout/task/{TASK['task_id']}")).json()
    check_task_status(task)
    assert task["results"][0]["trajectory"]["traces"][0]["response_logprobs"] == [-0.25, -0.5, 0.0]


@asynccontextmanager
async def listener() -> AsyncGenerator[tuple[str, asyncio.Queue[Any]]]:
    """The bridge's: its URL, and the callbacks that came."""
    told: asyncio.Queue[Any] = asyncio.Queue()

    async def take(call: web.Request) -> web.Response:
        await told.put(await call.json())
        return web.json_response({"ok": True})

    app = web.Application()
    app.router.add_post("/callback/task_result", take)
    async with listening(app, shutdown_s=1.0, host="127.0.0.1", port=0) as (host, port, *_):
        yield f"http://{host}:{port}/callback/task_result", told


async def test_the_listener_of_the_bridge_reads_a_callback_as_its_models_do(
    http: httpx.AsyncClient, client: ServerClient
):
    """`slime_bridge/rollout.py` `_start_callback_listener`, 01bc72d: it answers 200 to all, and drops what it cannot
    read."""
    async with listener() as (callback_url, told):
        task = TASK | {"callback_url": callback_url}
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


def trained_tokens(result: dict[str, Any]) -> int:
    """How many tokens of a session's result the bridge trains on: `slime_bridge/adapter.py` `_sample_status`,
    `_is_trainable_agent_timeout` and `_build_sample`, 063c948."""
    trajectory = result["trajectory"]
    about = trajectory["metadata"]
    ended = about.get("agent_result", {})
    own_budget = (ended.get("status"), ended.get("timeout_source"), ended.get("timeout_stage"))
    num = 0
    for trace in trajectory["traces"]:
        told = trace["metadata"].get("training_filter", {})
        timed_out = (result["status"], trajectory["status"]) == ("TIMEOUT", "TIMEOUT")
        is_marked = told.get("reason") == "agent_timeout" and told.get("trainable") is True and not told.get("masked")
        verified = about.get("evaluation", {}).get("verifier_timeout") is not True
        own = timed_out and own_budget == ("timeout", "agent", "exec") and is_marked and verified
        if own or (result["status"] == "COMPLETED" and not result["error"]):
            num += sum(trace["loss_mask"])
    return num


SPOILED = Failure(boundary="harness", code="grading_spoiled", message="its tests are gone", retryable=False)
ENDS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "its own budget": ({"agent_timeout": 60}, {}, 2),
    "its own budget, with a reward": ({"agent_timeout": 60.0}, {"reward": 1.0}, 2),
    "a part of a second": ({"agent_timeout": 0.1}, {}, 2),
    "the session's budget": ({}, {}, 0),
    "the session's, which is the shorter one": ({"agent_timeout": 901}, {}, 0),
    "its grading failed": ({"agent_timeout": 60}, {"failure": SPOILED}, 0),
    "a machine's fault": ({"agent_timeout": 60}, {"outcome": "infra_error"}, 0),
    "its own failure": ({"agent_timeout": 60}, {"outcome": "agent_error"}, 0),
    "too much memory": ({"agent_timeout": 60}, {"outcome": "memory_limit"}, 0),
    "a cancelled session": ({"agent_timeout": 60}, {"outcome": "cancelled"}, 0),
    "in time": ({"agent_timeout": 60}, {"outcome": "completed", "reward": 1.0}, 2),
}


def told_of(metadata: dict[str, Any], trajectory: Trajectory, **changes: Any) -> dict[str, Any]:
    task = task_from_polar(TASK | {"metadata": metadata})
    ended = session_end(lease_of(task), trajectory=trajectory, **changes)
    return polar_result(ended, task.model_dump(mode="json"), "floats")


@pytest.mark.parametrize("end", ENDS)
def test_of_agents_that_did_not_end_the_bridge_trains_on_those_that_spent_their_own_budget(end: str):
    metadata, changes, trained = ENDS[end]
    changes = {"outcome": "agent_timeout", "reward": None, **changes}
    assert trained_tokens(told_of(metadata, trajectory_of("s-0", "t"), **changes)) == trained


def test_a_timeout_whose_task_is_not_known_any_more_is_not_the_agents():
    ended = session_end(lease_of(task_from_polar(TASK)), trajectory=trajectory_of("s-0", "t"), outcome="agent_timeout")
    assert trained_tokens(polar_result(ended, {}, "floats")) == 0


def test_a_masked_row_of_an_agent_that_spent_its_own_budget_is_named_as_such():
    """`gateway/node.py` `_has_aligned_policy_data`, 063c948."""
    (good,) = trajectory_of("s-0", "t").traces
    bad = msgspec.structs.replace(good, loss_mask=good.loss_mask * 0, untrainable="a log-prob is not finite")
    both = msgspec.structs.replace(trajectory_of("s-0", "t"), traces=(good, bad))
    told = told_of({"agent_timeout": 60}, both, outcome="agent_timeout", reward=None)
    assert [trace["metadata"]["training_filter"] for trace in told["trajectory"]["traces"]] == [
        {"masked": False, "trainable": True, "reason": "agent_timeout"},
        {"masked": True, "trainable": False, "reason": "agent_timeout_unaligned"},
    ]
    assert trained_tokens(told) == 2


async def test_an_agent_that_spent_its_own_budget_is_told_apart(http: httpx.AsyncClient, client: ServerClient):
    """Its rows are trained on, with reward 0; those of a session that ran out of time are not."""
    await http.post("/rollout/task/submit", json=TASK | {"task_id": "own", "metadata": {"agent_timeout": 60}})
    await http.post("/rollout/task/submit", json=TASK | {"task_id": "whole"})
    await finished(client, outcome="agent_timeout", reward=None)
    trained: dict[str, list[int]] = {}
    for task_id in ("own", "whole"):
        results = (await http.get(f"/rollout/task/{task_id}")).json()["results"]
        trained[task_id] = [trained_tokens(result) for result in results]
    assert trained == {"own": [2, 2], "whole": [0, 0]}


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


async def test_polls_without_the_header_are_admit_ready_by_the_address(client: ServerClient):
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
        assert (await bridge.get(f"{url}/v1/tasks/{TASK['task_id']}")).status_code == 401  # no route of their clients
        page = {"Origin": "http://elsewhere.test"}  # a browser keeps passwords, and sends them from any page
        assert (await bridge.get(f"{url}/rollout/task/{TASK['task_id']}", headers=page)).status_code == 403
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


async def test_what_the_bridge_adds_to_a_task_is_understood(http: httpx.AsyncClient, client: ServerClient):
    """`slime_bridge/rollout.py` `_apply_eval_runtime_overrides`, 01bc72d, and `config.py` `render_task_payload`,
    01bc72d: a task of an evaluation has all of these."""
    added = {"early_stop_min_usable_sessions": 2, "dispatch_priority": 100}
    metadata = TASK["metadata"] | {"eval_sampling_seed_base": 11, "agent_timeout": 300.0}
    assert (await http.post("/rollout/task/submit", json=TASK | added | {"metadata": metadata})).status_code == 200
    (lease, *_) = await FakeNode(client).lease()
    task = TaskRequest.model_validate(lease.task)
    assert (task.priority, task.capture.seed, task.enough_sessions) == (100, 11, 2)
    assert (task.timeout_seconds, task.init_timeout_seconds) == (300, 900)
    for change, name in (
        ({"early_stop_min_usable_sessions": 3}, "early_stop_min_usable_sessions"),
        ({"dispatch_priority": 5000}, "priority"),
        ({"metadata": {"agent_timeout": 0}}, "metadata.agent_timeout"),
        ({"metadata": {"eval_sampling_seed_base": -1}}, "metadata.eval_sampling_seed_base"),
    ):
        refused = await http.post("/rollout/task/submit", json=TASK | {"task_id": "no"} | change)
        assert (refused.status_code, name in refused.json()["detail"]) == (400, True), refused.text


async def test_a_group_with_enough_usable_sessions_ends_early(http: httpx.AsyncClient, client: ServerClient):
    """`rollout/pipeline.py` `run_batch` and `_early_stop_result`, 01bc72d."""
    await http.post("/rollout/task/submit", json=TASK | {"num_samples": 4, "early_stop_min_usable_sessions": 2})
    node = FakeNode(client)
    leases = await node.lease(max_sessions=3)
    for lease in leases[:2]:
        assert (await http.get(f"/rollout/task/{TASK['task_id']}")).json()["status"] == "running"
        await node.finish([lease], trajectory=trajectory_of(lease.session_id, lease.task_id))
    task = (await http.get(f"/rollout/task/{TASK['task_id']}")).json()
    check_task_status(task)
    assert [task["status"], *(one["status"] for one in task["results"])] == [
        *("completed", "COMPLETED", "COMPLETED", "ERROR", "ERROR"),
    ]
    assert len(task["results"]) == 4, "the bridge counts the completed ones among all of the group"
    assert "early_stop_cancelled" not in task["results"][0]["metadata"]
    told = {
        "early_stop_cancelled": True,
        "fully_masked": True,
        "early_stop_reason": "minimum_usable_sessions_reached",
        "early_stop_min_usable_sessions": 2,
        "early_stop_usable_sessions": 2,
    }
    for stopped in task["results"][2:]:
        for metadata in (stopped["metadata"], stopped["trajectory"]["metadata"]):
            assert metadata | told == metadata
        assert (stopped["trajectory"]["traces"], "enough" in stopped["error"]) == ([], True)
    assert (await node.beat(leases[2:])).lost == (leases[2].session_id,)


async def test_the_sampling_of_an_evaluation_holds_for_each_harness(http: httpx.AsyncClient, client: ServerClient):
    """`slime_bridge/rollout.py` `_EVAL_STANDARD_MODEL_KWARGS` and `_EVAL_SGLANG_EXTRA_BODY`, 01bc72d."""
    further = {"top_k": -1, "skip_special_tokens": False, "no_stop_trim": True}
    kwargs = {"temperature": 0.0, "top_p": 0.95, "max_tokens": 8192, "extra_body": further}
    agent = TASK["agent"] | {"settings": {"model_kwargs": kwargs}}
    assert (await http.post("/rollout/task/submit", json=TASK | {"agent": agent})).status_code == 200
    (lease, *_) = await FakeNode(client).lease()
    task = TaskRequest.model_validate(lease.task)
    assert task.agent.settings == {}
    assert task.capture.sampling is not None
    rules = task.capture.sampling.model_dump(exclude_none=True)
    assert rules == {name: {"override": kwargs[name]} for name in ("temperature", "top_p", "max_tokens")}
    assert needs_of_ours(task) == ("capture.sampling",)  # most of its harnesses would not heed them
    for wrong in ({"stop": ["END"]}, {"extra_body": {"min_tokens": 5}}):
        asked = TASK | {"agent": agent | {"settings": {"model_kwargs": wrong}}}
        refused = await http.post("/rollout/task/submit", json=asked)
        assert (refused.status_code, "agent.settings.model_kwargs." in refused.json()["detail"]) == (400, True)
    unchanged = task_from_polar(TASK | {"agent": agent | {"settings": {"model_kwargs": {}}}})
    assert (unchanged.agent.settings, unchanged.capture.sampling) == ({}, None)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("stop", ["END"], "the agent's program"),
        ("stop", "END", "the agent's program"),
        ("stop_token_ids", [151645], "generation_config.json"),
        ("min_tokens", 5, "leave it out"),
        ("repetition_penalty", 1.1, "leave it out"),
        ("n", 2, "leave it out"),
        *(("stop", neutral, None) for neutral in ([], "", None)),
        *(("stop_token_ids", neutral, None) for neutral in ([], None)),
        ("min_tokens", 0, None),
        ("repetition_penalty", 1.0, None),
        ("n", 1, None),
        ("drop_params", True, None),
    ],
)
def test_a_parameter_that_a_task_cannot_set_is_refused_with_what_to_do_unless_it_changes_nothing(
    name: str, value: Any, told: str | None, inside: bool
):
    kwargs = {"extra_body": {name: value}} if inside else {name: value}
    asked = TASK | {"agent": TASK["agent"] | {"settings": {"model_kwargs": kwargs}}}
    if told is None:
        assert task_from_polar(asked).capture.sampling is None
        return
    with pytest.raises(InvalidRequest, match=rf"agent\.settings\.model_kwargs\.{name}: .*{told}"):
        task_from_polar(asked)


def test_what_is_left_out_is_what_it_is_there():
    """`TaskRequest`, `RuntimeSpec` and `PrepareAction` of `rollout/models.py` and `runtime/models.py`, 063c948: their
    defaults, and fields whose value says nothing."""
    task = task_from_polar({"task_id": "t", "instruction": "x", "agent": {"harness": "pi"}})
    assert (task.timeout_seconds, task.builder.strategy, task.num_samples) == (600, "per_request", 1)
    runtime: dict[str, Any] = {
        "image": "one:1",
        "prepare": [{"type": "exec", "command": "make", "source": None, "max_attempts": 1, "env": {}}],
        "eval_prepare": [{"type": "exec", "command": "make tests"}],
        "direct_exec_init_command": None,
        "storage_mb": 3,
        "gpus": 0,
        "allow_internet": True,
        "internet_volumes": [],
        "import_path": None,
        "kwargs": {},
    }
    agent = {"harness": "pi", "import_path": None}
    on_gpus = task_from_polar({"instruction": "x", "agent": agent, "runtime": runtime | {"gpus": 2}})
    assert on_gpus.runtime.gpus == 2
    task = task_from_polar({"task_id": "t", "instruction": "x", "agent": agent, "runtime": runtime})
    assert (task.runtime.backend, task.runtime.network) == ("docker", "full")
    assert task.runtime.limits.disk_bytes == 3 * 1024**2
    assert [(step.type, step.timeout_seconds) for step in task.runtime.prepare if step.type == "exec"] == [
        ("exec", 600)
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kwargs": {"volumes": ["/opt/node:/opt/node"]}}, "runtime.kwargs.volumes.0"),
    ({"internet_volumes": ["/run/proxy.sock"]}, "runtime.internet_volumes"),
    ({"direct_exec_init_command": "serve &"}, "runtime.direct_exec_init_command"),
    ({"prepare": [{"type": "upload_file", "source": "a", "target": "/b"}]}, "runtime.prepare.0"),
    ({"prepare": [{"type": "upload_dir", "source": "/a"}]}, "runtime.prepare.0"),
    ({"prepare": [{"type": "exec", "command": "make", "max_attempts": 11}]}, "max_attempts"),
]


@pytest.mark.parametrize(("change", "name"), REFUSED, ids=[name for _, name in REFUSED])
async def test_what_cannot_be_carried_out_is_refused_by_name(
    http: httpx.AsyncClient, change: dict[str, Any], name: str
):
    """`RuntimeSpec`, `runtime/models.py`, 063c948."""
    evaluator = {"strategy": "session_completed", "refresh_runtime": True}
    task = TASK | {"runtime": TASK["runtime"] | change, "evaluator": evaluator}
    refused = await http.post("/rollout/task/submit", json=task)
    assert (refused.status_code, name in refused.json()["detail"]) == (400, True), refused.text


def test_a_step_of_preparation_keeps_its_folder_its_environment_and_its_attempts(tmp_path: Path):
    """`PrepareAction`, `runtime/models.py`, 063c948, as `gateway/node.py` `_run_runtime_prepare` runs it, 01bc72d."""
    (tmp_path / "a b").mkdir()
    flaky = 'echo "$WORD" >> tries && test "$(wc -l < tries)" -eq 3'
    step = {"type": "exec", "command": flaky, "cwd": str(tmp_path / "a b"), "env": {"WORD": "it's"}, "max_attempts": 3}
    runtime = {"image": "one:1", "prepare": [step, step | {"max_attempts": 1}]}
    task = task_from_polar({"instruction": "x", "agent": {"harness": "pi"}, "runtime": runtime})
    commands = [step.command for step in task.runtime.prepare if step.type == "exec"]
    codes = [subprocess.run(["sh", "-c", command], check=False).returncode for command in commands]
    assert codes == [0, 1]
    assert (tmp_path / "a b" / "tries").read_text().splitlines() == ["it's"] * 4
    nowhere = runtime | {"prepare": [{"type": "exec", "command": "true", "cwd": str(tmp_path / "no")}]}
    task = task_from_polar({"instruction": "x", "agent": {"harness": "pi"}, "runtime": nowhere})
    (command,) = [step.command for step in task.runtime.prepare if step.type == "exec"]
    assert subprocess.run(["sh", "-c", command], check=False, stderr=subprocess.DEVNULL).returncode != 0


def test_the_settings_of_the_harness_of_swe_bench_become_those_of_ours():
    """`SwebenchHarnessEvaluator`, and `examples/swegym_slime_grpo/polar_config.yaml`, 4534750."""
    config = {
        "instance": json.dumps({"instance_id": "a__b-1"}),
        "patch_command": "git diff",
        "test_timeout": 600.0,
        "apply_timeout": 60.0,
        "exclude_patterns": [".claude/**", "**/.claude/**"],
    }
    evaluator = {"strategy": "swebench_harness", "refresh_runtime": True, "env": {}, "config": config}
    task = task_from_polar(TASK | {"evaluator": evaluator})
    read = task.evaluator.config
    assert (read["repo_dir"], read["timeout_seconds"]) == ("/testbed", 600)
    assert (read["instance"], read["patch_command"]) == ({"instance_id": "a__b-1"}, "git diff")
    assert read["protected"] == [*protected_by_default(), ".claude/**", "**/.claude/**"]
    assert task.evaluation_timeout_seconds > 600
    given = session_for_gateway(lease_of(task), "http://server/callbacks/session_result")["evaluator"]
    assert given == {
        "strategy": "swebench_harness",
        "refresh_runtime": True,
        "config": {name: value for name, value in config.items() if name != "apply_timeout"}
        | {"instance": {"instance_id": "a__b-1"}, "repo_dir": "/testbed"},
    }


async def test_a_trainer_that_starts_again_uses_its_ids_again(http: httpx.AsyncClient, client: ServerClient):
    """`slime_bridge/config.py` `task_id_template`, 01bc72d: ids count from 0 in each run of the trainer.
    `rollout/manager.py` `submit_task`, 063c948: only the id of a running task is taken."""
    path = f"/rollout/task/{TASK['task_id']}"
    async with listener() as (callback_url, told):
        for step, reward in enumerate((0.0, 0.5, 1.0)):
            again = {"callback_url": callback_url, "metadata": {"rollout_step": step}}
            submitted = await http.post("/rollout/task/submit", json=TASK | again)
            assert (submitted.status_code, submitted.json()["task_id"]) == (200, TASK["task_id"])
            assert (
                await http.post("/rollout/task/submit", json=TASK | again)
            ).status_code == 200  # the answer was lost
            other = TASK | again | {"instruction": "another"}
            assert (await http.post("/rollout/task/submit", json=other)).status_code == 409
            assert (await http.get(path)).json()["completed_sessions"] == 0
            await finished(client, reward=reward)
            body = await asyncio.wait_for(told.get(), 30)
            assert body == (await http.get(path)).json()
            assert (body["task_id"], body["metadata"]) == (TASK["task_id"], {"rollout_step": step})
            assert {result["task_id"] for result in body["results"]} == {TASK["task_id"]}
            assert {result["metadata"]["reward"] for result in body["results"]} == {reward}
    assert (await http.get("/rollout/status")).json()["tasks"] == {TASK["task_id"]: "completed"}
    assert (await http.delete(path)).json()["metadata"] == {"rollout_step": 2}


def test_the_agent_of_a_task_reaches_a_gateway_in_its_words():
    """`AgentSpec` and `MCPServerSpec` (`agent/models.py`), `ShellHarness`: `shell` runs `custom_shell` alone, and a
    server's transport is required."""
    shell = {"harness": "shell", "custom_shell": {"command": "make $GOAL", "cwd": "/work", "env": {"GOAL": "it"}}}
    task = task_from_polar(TASK | {"agent": shell})
    assert task.agent.settings == {"command": ["bash", "-lc", "cd /work || exit\nexport GOAL=it\nmake $GOAL"]}
    assert needs_of_ours(task) == ()
    given = session_for_gateway(lease_of(task), "http://server/callbacks/session_result")["agent"]
    assert given["custom_shell"] == {"command": "cd /work || exit\nexport GOAL=it\nmake $GOAL"}
    servers: list[dict[str, Any]] = [
        {"name": "files", "transport": "stdio", "command": "mcp-files", "args": ["--root", "."], "url": None},
        {"name": "web", "transport": "streamable-http", "command": None, "args": [], "url": "http://web/mcp"},
    ]
    task = task_from_polar(TASK | {"agent": TASK["agent"] | {"mcp_servers": servers}})
    assert needs_of_ours(task) == ()
    given = session_for_gateway(lease_of(task), "http://server/callbacks/session_result")["agent"]
    assert given["mcp_servers"] == [
        {"name": "files", "transport": "stdio", "command": "mcp-files", "args": ["--root", "."]},
        {"name": "web", "transport": "streamable-http", "url": "http://web/mcp"},
    ]


def test_a_command_with_our_placeholders_is_what_was_written(tmp_path: Path):
    """`ShellHarness`, `agent/harnesses/shell.py`: the command is run as it is, and `{instruction}` is a text."""
    printed = "printf '%s|' {instruction} {model} $HOME \"$X\""
    shell = {"harness": "shell", "custom_shell": {"command": printed, "cwd": str(tmp_path), "env": {"X": "a b"}}}
    task = task_from_polar(TASK | {"agent": shell})
    command = task.agent.settings["command"]
    assert "{instruction}" not in str(command)
    done = subprocess.run(command, env={"HOME": "/h", **task.agent.env}, capture_output=True, text=True, check=True)
    assert done.stdout == "{instruction}|{model}|/h|a b|"


_SHELL = {"harness": "shell", "custom_shell": {"command": "echo {model}"}}
_MINI = {"harness": "mini_swe_agent", "settings": {"model_retry_attempts": 2}}
_CODEX = {"harness": "codex", "settings": {"reasoning_summary": "none"}}
_DEEP = "[" * 100_000
_VOLUMES = {"kwargs": {"volumes": ["/a:/b:ro"]}, "cpus": 1}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        *(({"agent": agent | {"env": env}}, "agent.env") for agent in (_SHELL, _MINI) for env in (["x"], "x", 1)),
        *(({"agent": _SHELL | {"settings": wrong}}, "agent.settings") for wrong in ([1], "x")),
        ({"agent": _CODEX | {"settings": _CODEX["settings"] | {"config": "x"}}}, "config"),
        *(({"runtime": TASK["runtime"] | _VOLUMES | {"mounts": wrong}}, "mounts") for wrong in ([1], "x")),
        ({"runtime": TASK["runtime"] | _VOLUMES | {"limits": [1]}}, "limits"),
        ({"early_stop_min_usable_sessions": 1, "num_samples": "x"}, "num_samples"),
        (
            {"evaluator": {"strategy": "test_on_output", "config": {"expected_output_json": _DEEP}}},
            "expected_output_json",
        ),
        ({"evaluator": {"strategy": "swebench_harness", "config": {"instance": _DEEP}}}, "nested too deeply"),
    ],
)
async def test_what_something_is_added_to_is_refused_where_it_is_no_object(
    http: httpx.AsyncClient, change: dict[str, Any], name: str
):
    refused = await http.post("/rollout/task/submit", json=TASK | change)
    assert (refused.status_code, name in refused.json()["detail"]) == (400, True), refused.text


def test_settings_of_published_templates_become_those_of_ours():
    """`MiniSweAgentHarness`, `agent/presets/mini_swe_agent.py`, c4c56e2, and skill2env's template."""
    settings = {"cost_limit": 0, "model_retry_attempts": 5, "step_limit": 40}
    task = task_from_polar(TASK | {"agent": {"harness": "mini_swe_agent", "settings": settings}})
    assert (task.agent.settings, task.agent.env) == (
        {"step_limit": 40},
        {"MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "5"},
    )
    codex = {"harness": "codex", "settings": {"reasoning_effort": "xhigh", "reasoning_summary": "none"}}
    task = task_from_polar(TASK | {"agent": codex})
    assert task.agent.settings == {"reasoning_effort": "xhigh", "config": {"model_reasoning_summary": "none"}}


NO_AGENTS: list[tuple[dict[str, Any], str]] = [
    ({"harness": "mini_swe_agent", "settings": {"cost_limit": 3}}, "agent.settings.cost_limit"),
    ({"harness": "mini_swe_agent", "settings": {"response_token_budget": 9}}, "agent.max_sampled_tokens"),
    ({"harness": "codex", "custom_shell": {"command": "true"}}, "agent.custom_shell"),
    ({"harness": "codex", "skills_path": "/skills"}, "agent.skills_path"),
    ({"import_path": "mine:Harness"}, "docs/guides/plugins.md"),
]


@pytest.mark.parametrize(("agent", "name"), NO_AGENTS)
async def test_an_agent_that_has_no_meaning_here_is_refused_by_name(
    http: httpx.AsyncClient, agent: dict[str, Any], name: str
):
    """`AgentSpec`, `agent/models.py`."""
    refused = await http.post("/rollout/task/submit", json=TASK | {"agent": agent})
    assert (refused.status_code, name in refused.json()["detail"]) == (400, True), refused.text
