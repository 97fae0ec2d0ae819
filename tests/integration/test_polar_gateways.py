"""A gateway of Polar's published source: it checks what is sent to it as that source does.

Source: github.com/NVIDIA-NeMo/ProRL-Agent-Server, `src/polar/gateway/server.py`, `node.py` and `session.py` at 01bc72d,
`src/polar/rollout/models.py` and `src/polar/runtime/models.py` at 063c948.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from aiohttp import web

from gangline.domain.conversation import ToolCall, ToolResult
from gangline.server.run import serving
from gangline.wire.client.server import ServerClient
from gangline.wire.http.listening import listening

TOKEN = "control-secret"
HEADERS = {"X-Polar-Control-Token": TOKEN}
TASK: dict[str, Any] = {
    "task_id": "polar-slime-0-0",
    "instruction": "do it",
    "num_samples": 1,
    "timeout_seconds": 900.0,
    "dispatch_priority": 7,
    "runtime": {"backend": "docker", "image": "one:1", "network": "host", "memory_mb": 512, "cpus": 3},
    "agent": {"harness": "codex", "model_name": "served"},
    "builder": {"strategy": "prefix_merging"},
    "evaluator": {"strategy": "session_completed"},
    "metadata": {"group_id": 4, "agent_timeout": 300, "eval_sampling_seed_base": 11},
}
TOOL = {"type": "function", "function": {"name": "ls", "description": "list", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
]


def result_of(session: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`SessionResult`, as it is dumped."""
    trace: dict[str, Any] = {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4],
        "loss_mask": [1, 0],
        "prompt_messages": [{"role": "user", "content": [{"type": "text", "text": "do it"}]}],
        "response_messages": MESSAGES,
        "tools": [TOOL],
        "finish_reason": "tool_calls",
        "response_logprobs": [-0.5, 0.0],
        "reward": 0.75,
        "metadata": {},
    }
    about: dict[str, Any] = {"builder": "prefix_merging"}
    trajectory: dict[str, Any] = {"status": "COMPLETED", "metadata": about, "traces": [trace], "error": None}
    return {
        "session_id": session["session_id"],
        "task_id": session["task_id"],
        "status": "COMPLETED",
        "trajectory": trajectory,
        "timing": {"init_ms": 1.0},
        "node_id": "slurm-rank-0",
        "error": None,
        "metadata": session["metadata"],
        **changes,
    }


def readable(session: dict[str, Any]) -> bool:
    """Whether `SessionDispatchRequest` accepts it."""
    runtime = session["runtime"]
    numbers = [runtime.get(name) for name in ("cpus", "memory_mb", "storage_mb")]
    return (
        all(isinstance(session.get(name), str) for name in ("session_id", "task_id", "instruction"))
        and session.get("remaining_timeout_seconds", 0) > 0
        and 0 <= session["dispatch_priority"] <= 100
        and isinstance(session["agent"], dict)
        and isinstance(runtime["image"], str)
        and runtime["backend"] in ("docker", "apptainer")
        and all(step["type"] in ("upload_file", "upload_dir", "exec") for step in runtime.get("prepare", []))
        and all(number is None or isinstance(number, int) for number in numbers)
    )


class Gateway:
    """Holds sessions in memory, under ids that are used once."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.sessions: dict[str, dict[str, Any]] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.created: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.token = TOKEN
        self.num_asked = 0

    async def create(self, call: web.Request) -> web.Response:
        self.num_asked += 1
        session = await call.json()
        if call.headers.get("X-Polar-Control-Token") != self.token:
            return web.json_response({"error": {"code": "invalid_control_plane_credential"}}, status=401)
        if not readable(session):
            return web.Response(text="Internal Server Error", status=500)
        if session["session_id"] in self.sessions:
            return web.json_response({"detail": "already exists; rollout session IDs are single-use"}, status=409)
        self.sessions[session["session_id"]] = session
        await self.created.put(session)
        accepted = {"session_id": session["session_id"], "task_id": session["task_id"], "status": "REGISTERED"}
        return web.json_response(accepted | {"node_id": "slurm-rank-0"})

    async def look(self, call: web.Request) -> web.Response:
        session_id = call.match_info["session"]
        if session_id not in self.sessions:
            return web.json_response({"detail": "Session not found"}, status=404)
        result = self.results.get(session_id)
        about = {"session_id": session_id, "task_id": self.sessions[session_id]["task_id"], "completion_count": 0}
        status = "RUNNING" if result is None else result["status"]
        times = {"created_at": "2026-08-21T00:00:00Z"}
        return web.json_response(about | times | {"status": status, "result": result})

    async def delete(self, call: web.Request) -> web.Response:
        session_id = call.match_info["session"]
        if self.sessions.pop(session_id, None) is None:
            return web.json_response({"detail": "Session not found"}, status=404)
        return web.json_response({"session_id": session_id, "deleted": True, "messages_deleted": 0})

    @asynccontextmanager
    async def registered(self) -> AsyncGenerator[None]:
        app = web.Application()
        app.router.add_post("/sessions", self.create)
        app.router.add_get("/sessions/{session}", self.look)
        app.router.add_delete("/sessions/{session}", self.delete)
        async with listening(app, shutdown_s=1.0, host="127.0.0.1", port=0) as (host, port, *_):
            me = {
                "node_id": "slurm-rank-0",
                "gateway_url": f"http://{host}:{port}",
                "max_init_workers": 4,
                "max_run_workers": 2,
                "max_postrun_workers": 4,
                "heartbeat_interval_seconds": 30,
            }
            assert (await self.http.post("/nodes/register", json=me)).status_code == 200
            yield

    async def next(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.created.get(), 30)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ServerClient]:
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, lease_s=3.0, retry_base_s=0.01) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        yield client


@pytest.fixture
async def http(client: ServerClient) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=client.url, headers=HEADERS, timeout=30) as http:
        yield http


async def test_a_session_is_sent_in_words_that_the_gateway_reads(http: httpx.AsyncClient, client: ServerClient):
    gateway = Gateway(http)
    async with gateway.registered():
        assert (await http.post("/rollout/task/submit", json=TASK)).status_code == 200
        session = await gateway.next()
        assert session["remaining_timeout_seconds"] == 900  # of the whole session; `agent_timeout` is RUN's
        assert session["runtime"] | TASK["runtime"] == session["runtime"]
        assert session["dispatch_priority"] == 7
        assert session["metadata"] == TASK["metadata"] | {"eval_sampling_seed": 11}
        assert session["agent"] == TASK["agent"] | {"settings": {"sampling_seed": 11}}
        answer = await http.post(session["callback_url"], json=result_of(session))
        assert (answer.status_code, answer.json()) == (200, {"status": "accepted"})
        task = await client.wait(TASK["task_id"], timeout_s=30)
    assert (task.outcomes, task.rewards) == ({"completed": 1}, (0.75,))


async def test_messages_and_tools_of_a_gateway_are_kept_whole(http: httpx.AsyncClient, client: ServerClient):
    """`Trace`, `src/polar/trajectory/models.py`, 467f2ab: messages and tools are those of OpenAI's chat API."""
    gateway = Gateway(http)
    async with gateway.registered():
        await http.post("/rollout/task/submit", json=TASK)
        session = await gateway.next()
        await http.post(session["callback_url"], json=result_of(session))
        await client.wait(TASK["task_id"], timeout_s=30)
    (result,) = await client.result(TASK["task_id"])
    assert result.trajectory is not None
    (kept,) = result.trajectory.traces
    assert [part for message in kept.response_messages for part in message.parts if isinstance(part, ToolCall)] == [
        ToolCall("c1", "ls", "{}")
    ]
    assert isinstance(kept.response_messages[1].parts[0], ToolResult)
    (told,) = (await http.get(f"/rollout/task/{TASK['task_id']}")).json()["results"]
    (trace,) = told["trajectory"]["traces"]
    assert trace["prompt_messages"] == [{"role": "user", "content": "do it"}]
    assert [message.get("tool_calls") for message in trace["response_messages"]] == [[CALL], None]
    assert trace["tools"] == [TOOL]


async def test_messages_of_an_unknown_form_are_kept_as_text(http: httpx.AsyncClient, client: ServerClient):
    gateway = Gateway(http)
    async with gateway.registered():
        await http.post("/rollout/task/submit", json=TASK)
        session = await gateway.next()
        result = result_of(session)
        result["trajectory"]["traces"][0] |= {
            "prompt_messages": [{"role": "critic", "content": {"a": 1}}],
            "tools": [{}],
        }
        assert (await http.post(session["callback_url"], json=result)).status_code == 200
    (told,) = (await http.get(f"/rollout/task/{TASK['task_id']}")).json()["results"]
    (trace,) = told["trajectory"]["traces"]
    assert trace["prompt_messages"] == [{"role": "user", "content": '{"a":1}'}]
    assert trace["tools"] is None


NOT_COMPLETED: list[tuple[str, dict[str, Any], float | None]] = [
    ("ERROR", {"masked": True, "reason": "session_error"}, None),
    ("TIMEOUT", {"masked": True, "reason": "session_timeout"}, None),
    ("TIMEOUT", {"masked": False, "trainable": True, "reason": "agent_timeout"}, 0.0),
]


@pytest.mark.parametrize(("status", "kept_out", "reward"), NOT_COMPLETED)
async def test_a_reward_of_0_that_stands_for_none_is_none(
    http: httpx.AsyncClient, client: ServerClient, status: str, kept_out: dict[str, Any], reward: float | None
):
    """`_mask_noncompleted_trajectory`, `node.py`: each session that did not complete has 0, faults of machines too."""
    gateway = Gateway(http)
    async with gateway.registered():
        await http.post("/rollout/task/submit", json=TASK | {"max_attempts": 1})
        session = await gateway.next()
        result = result_of(session, status=status, error="why")
        result["trajectory"]["status"] = status
        filtered = {"reward": 0.0, "metadata": {"training_filter": kept_out | {"detail": "why"}}}
        result["trajectory"]["traces"][0] |= filtered
        assert (await http.post(session["callback_url"], json=result)).status_code == 200
        task = await client.wait(TASK["task_id"], timeout_s=30)
    assert task.rewards == (reward,)
    (told,) = (await http.get(f"/rollout/task/{TASK['task_id']}")).json()["results"]
    assert [trace["reward"] for trace in told["trajectory"]["traces"]] == [reward]


FILTERS: list[dict[str, Any] | None] = [
    {"masked": True, "trainable": False, "reason": "agent_timeout_unaligned"},
    {"masked": True, "reason": "session_timeout"},
    {"masked": False, "trainable": True, "reason": "agent_timeout"},
    None,
]


@pytest.mark.parametrize("told", FILTERS)
async def test_whose_budget_ended_a_session_is_what_its_gateway_says(
    http: httpx.AsyncClient, client: ServerClient, told: dict[str, Any] | None
):
    """One that says nothing may have spent the time itself: its rows are not marked as the agent's."""
    gateway = Gateway(http)
    async with gateway.registered():
        await http.post("/rollout/task/submit", json=TASK | {"metadata": {"agent_timeout": 60}})
        session = await gateway.next()
        result = result_of(session, status="TIMEOUT", error="why")
        result["trajectory"]["status"] = "TIMEOUT"
        if told is not None:
            result["trajectory"]["traces"][0]["metadata"] = {"training_filter": told}
        assert (await http.post(session["callback_url"], json=result)).status_code == 200
        await client.wait(TASK["task_id"], timeout_s=30)
    (again,) = (await http.get(f"/rollout/task/{TASK['task_id']}")).json()["results"]
    kept = again["trajectory"]["traces"][0]["metadata"]["training_filter"]
    assert kept == (told or {"masked": True, "trainable": False, "reason": "session_timeout"})


async def test_a_result_whose_callback_did_not_arrive_is_collected(http: httpx.AsyncClient, client: ServerClient):
    """A gateway gives up after three attempts within a second, and keeps the result."""
    gateway = Gateway(http)
    async with gateway.registered():
        await http.post("/rollout/task/submit", json=TASK)
        session = await gateway.next()
        gateway.results[session["session_id"]] = result_of(session)
        task = await client.wait(TASK["task_id"], timeout_s=30)
    assert (task.outcomes, task.rewards) == ({"completed": 1}, (0.75,))


@pytest.mark.parametrize("held_out", [False, True])
async def test_a_result_of_a_held_out_task_is_marked(http: httpx.AsyncClient, client: ServerClient, held_out: bool):
    """A gateway knows nothing of the mark."""
    task: dict[str, Any] = {
        "task_id": "t1",
        "instruction": "do it",
        "runtime": {"backend": "docker", "image": "one:1", "network": "full"},
        "agent": {"harness": "codex", "model_name": "served"},
        "held_out": held_out,
    }
    gateway = Gateway(http)
    async with gateway.registered():
        await client.submit(task)
        session = await gateway.next()
        gateway.results[session["session_id"]] = result_of(session)
        await client.wait("t1", timeout_s=30)
    assert [one.held_out for one in await client.result("t1")] == [held_out]


async def test_a_result_that_cannot_be_read_fails_the_session(http: httpx.AsyncClient, client: ServerClient):
    gateway = Gateway(http)
    async with gateway.registered():
        await http.post("/rollout/task/submit", json=TASK | {"max_attempts": 1})
        session = await gateway.next()
        result = result_of(session)
        result["trajectory"]["traces"][0]["loss_mask"] = [1]
        assert (await http.post(session["callback_url"], json=result)).status_code == 400
        gateway.results[session["session_id"]] = result
        task = await client.wait(TASK["task_id"], timeout_s=30)
    assert [one.failure and one.failure.code for one in task.sessions] == ["polar_unreadable"]


async def test_sessions_of_a_restarted_gateway_are_tried_again(http: httpx.AsyncClient, client: ServerClient):
    """It knows none of its sessions any more, and continues with its heartbeats."""
    gateway = Gateway(http)
    async with gateway.registered():
        await http.post("/rollout/task/submit", json=TASK)
        first = await gateway.next()
        gateway.sessions.clear()
        again = await gateway.next()
        assert again["session_id"] == first["session_id"]
        (session,) = (await client.task(TASK["task_id"])).sessions
        assert (session.attempt, session.failure and session.failure.code) == (2, "polar_lost")


async def test_an_id_that_is_still_in_use_spends_no_attempt(
    http: httpx.AsyncClient, client: ServerClient, monkeypatch: pytest.MonkeyPatch
):
    """Ids are used once: an earlier attempt, which another server's life left behind, is deleted first."""
    monkeypatch.setattr("gangline.interop.polar.dispatch._REST_S", 0.1)
    gateway = Gateway(http)
    gateway.sessions[f"{TASK['task_id']}.0"] = {"task_id": TASK["task_id"]}
    async with gateway.registered():
        await http.post("/rollout/task/submit", json=TASK)
        session = await gateway.next()
        assert session["session_id"] == f"{TASK['task_id']}.0"
        (seen,) = (await client.task(TASK["task_id"])).sessions
    assert seen.attempt == 1


async def test_a_gateway_with_another_token_spends_no_attempt(http: httpx.AsyncClient, client: ServerClient):
    gateway = Gateway(http)
    gateway.token = "another"
    async with gateway.registered():
        await http.post("/rollout/task/submit", json=TASK)
        async for event in client.events(after=0, task_id=TASK["task_id"]):
            if event.kind == "session.released":
                break
        (session,) = (await client.task(TASK["task_id"])).sessions
    assert (session.attempt, session.state, gateway.num_asked) == (1, "queued", 1)


async def test_a_session_that_a_gateway_cannot_read_fails_with_its_answer(
    http: httpx.AsyncClient, client: ServerClient, monkeypatch: pytest.MonkeyPatch
):
    """The published gateway answers 500 to it: nobody would ever hear of a session that is given back each time."""
    monkeypatch.setattr("gangline.interop.polar.sessions._budget_s", Mock(return_value=0))
    gateway = Gateway(http)
    async with gateway.registered():
        await http.post("/rollout/task/submit", json=TASK | {"max_attempts": 1})
        task = await client.wait(TASK["task_id"], timeout_s=30)
    (session,) = task.sessions
    assert session.failure is not None
    assert (session.failure.code, "Internal Server Error" in session.failure.message) == ("polar_refused", True)


@pytest.mark.parametrize(
    ("missing", "why"),
    [("response_logprobs", "the gateway sent no log-probs"), ("loss_mask", "the gateway sent no loss mask")],
)
async def test_a_trace_that_lacks_what_training_needs_is_not_trained_on(
    http: httpx.AsyncClient, client: ServerClient, missing: str, why: str
):
    """Log-probs of 0 would say that each token was certain, and a mask of ones that the agent said all of it."""
    gateway = Gateway(http)
    async with gateway.registered():
        await http.post("/rollout/task/submit", json=TASK)
        session = await gateway.next()
        result = result_of(session)
        result["trajectory"]["traces"][0].pop(missing)
        assert (await http.post(session["callback_url"], json=result)).status_code == 200
        (kept,) = await client.result(session["task_id"], partial=True)
    assert kept.trajectory is not None
    (trace,) = kept.trajectory.traces
    assert (trace.untrainable, trace.loss_mask.tolist()) == (why, [0, 0])
