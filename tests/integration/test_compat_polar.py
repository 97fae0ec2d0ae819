"""A trainer and a gateway that know Polar's paper (A.3 to A.5) and nothing of Gangline."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gangline.domain.task import AgentSpec, RuntimeSpec, TaskRequest
from gangline.domain.tokens import logprobs, token_ids
from gangline.domain.trajectory import Trace, Trajectory
from gangline.grading.swe_bench import SweBenchConfig
from gangline.interop.polar.sessions import needs_of_ours
from gangline.interop.polar.tasks import task_from_polar
from gangline.server.run import serving
from gangline.settings import plugins
from gangline.wire.client.server import ServerClient
from gangline.wire.http.listening import listening
from support.service.papers import filled, listing
from support.service.running import FakeNode

TOKEN = "control-secret"

INSTANCE: dict[str, Any] = {
    "instance_id": "getmoto__moto-4950",
    "repo": "getmoto/moto",
    "version": "3.1",
    "base_commit": "0123456789012345678901234567890123456789",
    "problem_statement": "`describe` leaves out tags",
    "test_patch": "--- a/tests/test_tags.py\n+++ b/tests/test_tags.py\n",
    "FAIL_TO_PASS": ["tests/test_tags.py::test_tags"],
    "PASS_TO_PASS": '["tests/test_tags.py::test_others"]',
}
"""A row with SWE-Gym's fields; datasets keep lists as lists, or as JSON in a string."""
VALUES = {
    "{rollout_id}": "0",
    "{group_index}": "0",
    "{sample.metadata.runtime_image}": "swegym/instance:1",
    "{served_model_name}": "served",
    '"{sample.metadata.instance}"': json.dumps(INSTANCE),
    "{trainer_host}:{callback_port}": "127.0.0.1:9",
    "{rollout_group_id}": "0",
    "{policy_version}": "3",
    "{rollout_step}": "7",
}
PAYLOAD: dict[str, Any] = filled("001-a3-task.json", VALUES)
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
        serving(data_dir=tmp_path, control_token=TOKEN, callback_base_s=0.02) as running,
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
        response_texts=("The", " patch", None),
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
        "total_sessions": 8,
        "completed_sessions": 0,
        "results": [],
        "result_paths": [],
        "metadata": PAYLOAD["metadata"],
    }
    traced = trajectory_of(leases[0].session_id, leases[0].task_id)
    await node.finish(leases[:1], trajectory=traced, reward=1.0)
    _, partial = await trainer.get(path)
    assert (partial["status"], partial["completed_sessions"]) == ("running", 1)
    await node.finish(leases[1:], outcome="agent_timeout", reward=None)
    _, final = await trainer.get(f"{path}?logprobs=objects")
    assert (final["status"], final["completed_sessions"]) == ("completed", 8)
    assert [result["status"] for result in final["results"]] == ["COMPLETED", *["TIMEOUT"] * 7]
    trace = final["results"][0]["trajectory"]["traces"][0]
    assert set(trace) == TRACE_FIELDS
    assert (trace["response_ids"], trace["loss_mask"], trace["reward"]) == ([785, 10042, 151645], [1, 1, 0], 1.0)
    assert trace["response_logprobs"][1] == {"token": " patch", "token_id": 10042, "logprob": -0.5}
    about = trace["metadata"]
    assert (about["session_id"], about["builder"], about["harness"]) == (
        leases[0].session_id,
        "prefix_merging",
        "codex",
    )
    _, numbers = await trainer.get(path)
    assert numbers["results"][0]["trajectory"]["traces"][0]["response_logprobs"] == [-0.25, -0.5, 0.0]


async def test_the_task_as_printed_is_checked_and_becomes_ours(trainer: Trainer, client: ServerClient):
    assert (await trainer.post("/rollout/task/submit", PAYLOAD))[0] == 200
    (lease, *_) = await FakeNode(client).lease()
    task = TaskRequest.model_validate(lease.task)
    plugins.check_task(task)  # what a node does with it, too
    config = SweBenchConfig.model_validate(task.evaluator.config)
    assert (task.evaluator.strategy, task.evaluator.refresh_runtime) == ("swe_bench", True)
    assert (config.repo_dir, config.patch_command) == (
        "/testbed",
        "cd /polar/session/workspace && git add -A && git diff --cached --binary",
    )
    assert config.fail_to_pass == ("tests/test_tags.py::test_tags",)
    assert config.pass_to_pass == ("tests/test_tags.py::test_others",)
    assert config.test_command is not None
    assert config.test_command.endswith(" tests/test_tags.py")
    # One deadline for all: no stage of ours ends before it.
    assert (task.timeout_seconds, task.init_timeout_seconds) == (1200, 1200)
    assert [action.timeout_seconds for action in task.runtime.prepare if action.type == "exec"] == [1200]
    assert task.evaluation_timeout_seconds > config.timeout_seconds


UNGRADABLE: list[tuple[Any, str]] = [
    ({}, "instance: instance_id: Field required"),
    ("{not json", "neither an object nor JSON of one"),
    (INSTANCE | {"FAIL_TO_PASS": []}, "FAIL_TO_PASS"),
    (INSTANCE | {"repo": "django/django"}, "`test_cmd` and `log_parser`"),
]


@pytest.mark.parametrize(("instance", "told"), UNGRADABLE)
async def test_an_instance_that_cannot_be_graded_is_refused_and_named(trainer: Trainer, instance: Any, told: str):
    config = PAYLOAD["evaluator"]["config"] | {"instance": instance}
    task = PAYLOAD | {"evaluator": PAYLOAD["evaluator"] | {"config": config}}
    status, problem = await trainer.post("/rollout/task/submit", task)
    assert (status, told in problem["detail"]) == (400, True), problem["detail"]


async def test_an_instance_may_be_json_in_a_string(trainer: Trainer, client: ServerClient):
    """As a data set keeps it whose rows are flat."""
    config = PAYLOAD["evaluator"]["config"] | {"instance": json.dumps(INSTANCE)}
    task = PAYLOAD | {"evaluator": PAYLOAD["evaluator"] | {"config": config}}
    assert (await trainer.post("/rollout/task/submit", task))[0] == 200


async def test_mcp_servers_come_as_a_list(trainer: Trainer, client: ServerClient):
    servers = [
        {"name": "files", "transport": "stdio", "command": "mcp-files", "args": ["--root", "."], "env": {"A": "1"}},
        {"name": "web", "transport": "streamable-http", "url": "http://127.0.0.1:9/mcp", "headers": {"a": "b"}},
    ]
    agent = PAYLOAD["agent"] | {"mcp_servers": servers}
    assert (await trainer.post("/rollout/task/submit", PAYLOAD | {"agent": agent}))[0] == 200
    (lease, *_) = await FakeNode(client).lease()
    task = TaskRequest.model_validate(lease.task)
    assert {name: (server.command, server.url, server.headers) for name, server in task.agent.mcp_servers.items()} == {
        "files": (("mcp-files", "--root", "."), None, {}),
        "web": ((), "http://127.0.0.1:9/mcp", {"a": "b"}),
    }
    for wrong, told in (
        ([*servers, servers[0]], "same name"),
        ([{"name": "x", "transport": "sse", "url": "http://127.0.0.1:9"}], "transport must be stdio or http"),
        ([{"command": "x"}], "agent.mcp_servers.0: must be an object with a `name`"),
        ([servers[0] | {"headers": {"a": "b"}}], "headers are of a url"),
    ):
        refused = PAYLOAD | {"task_id": None, "agent": agent | {"mcp_servers": wrong}}
        status, problem = await trainer.post("/rollout/task/submit", refused)
        assert (status, told in problem["detail"]) == (400, True), problem["detail"]


@pytest.mark.parametrize("query", ["", "?logprobs=objects", "?run=7&logprobs=objects", "?logprobs=any"])
async def test_the_callback_says_what_the_poll_says(trainer: Trainer, client: ServerClient, query: str):
    told: asyncio.Queue[Any] = asyncio.Queue()

    async def take(call: web.Request) -> web.Response:
        await told.put(await call.json())
        return web.Response()

    app = web.Application()
    app.router.add_post("/callback/task_result", take)
    async with listening(app, shutdown_s=1.0, host="127.0.0.1", port=0) as (host, port, *_):
        url = PAYLOAD["callback_url"].replace("127.0.0.1:9", f"{host}:{port}") + query
        await trainer.post("/rollout/task/submit", PAYLOAD | {"callback_url": url, "num_samples": 2})
        node = FakeNode(client)
        first, second = await node.lease()
        await node.finish([first], trajectory=trajectory_of(first.session_id, first.task_id), reward=1.0)
        await node.finish([second], outcome="agent_timeout", reward=None)
        body = await asyncio.wait_for(told.get(), 30)
    form = "objects" if query.endswith("objects") else "floats"
    path = f"/rollout/task/polar-swegym-0-0?logprobs={form}"
    assert body == (await trainer.get(path))[1]
    async with trainer.http.delete(trainer.url + path) as reply:
        assert body == await reply.json()
    values = body["results"][0]["trajectory"]["traces"][0]["response_logprobs"]
    assert isinstance(values[0], dict) is (form == "objects")
    assert (body["status"], body["metadata"], len(body["results"])) == ("completed", PAYLOAD["metadata"], 2)
    assert body["results"][0]["trajectory"]["traces"][0]["reward"] == 1.0


async def test_traces_have_the_printed_fields(trainer: Trainer, client: ServerClient):
    """A.4; the page break in it keeps it from being JSON, so its field names are read off the text."""
    text = listing("001-a4-trace.txt")
    printed = set(re.findall(r'^  "(\w+)":', text, re.MULTILINE))
    about = set(re.findall(r'^    "(\w+)":', text, re.MULTILINE))
    await trainer.post("/rollout/task/submit", PAYLOAD | {"num_samples": 1})
    node = FakeNode(client)
    (lease,) = await node.lease()
    await node.finish([lease], trajectory=trajectory_of(lease.session_id, lease.task_id))
    _, task = await trainer.get("/rollout/task/polar-swegym-0-0?logprobs=objects")
    (trace,) = task["results"][0]["trajectory"]["traces"]
    assert set(trace) == printed == TRACE_FIELDS
    assert about <= set(trace["metadata"])
    entries = [json.loads(entry) for entry in re.findall(r"^    (\{\n(?:      .+\n)+    \})", text, re.MULTILINE)]
    assert [list(entry) for entry in entries] == [["token", "token_id", "logprob"]] * 2 + [["token_id", "logprob"]]
    assert [(entry.get("token"), entry["token_id"]) for entry in entries] == [
        (entry.get("token"), entry["token_id"]) for entry in trace["response_logprobs"]
    ]
    assert [list(entry) for entry in trace["response_logprobs"]] == [list(entry) for entry in entries]


async def test_every_printed_route_is_served(client: ServerClient):
    printed = re.findall(r"(GET|POST) `(\S+?)`", listing("001-a5-routes.txt"))
    assert len(printed) == 6
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{client.url}/openapi.json") as reply:
        paths = (await reply.json())["paths"]
    assert [(method, path) for method, path in printed if method.lower() not in paths.get(path, {})] == []


async def test_status_tells_tasks_nodes_and_pending_sessions(trainer: Trainer, client: ServerClient):
    await trainer.post("/rollout/task/submit", PAYLOAD)
    await FakeNode(client).lease(max_sessions=1)
    _, status = await trainer.get("/rollout/status")
    assert status["tasks"] == {"polar-swegym-0-0": "running"}
    assert (status["pending_sessions"], status["running_sessions"]) == (7, 1)
    assert [node["node_id"] for node in status["nodes"]["nodes"]] == ["n1"]


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


class Gateway:
    """A gateway node as the paper has it: it registers, beats, is given sessions, and calls back."""

    def __init__(self) -> None:
        self.created: asyncio.Queue[Any] = asyncio.Queue()
        self.deleted: asyncio.Queue[str] = asyncio.Queue()
        self.answer = 201

    async def create(self, call: web.Request) -> web.Response:
        assert call.headers["Authorization"] == f"Bearer {TOKEN}"
        await self.created.put(await call.json())
        return web.json_response({"detail": "no such harness"} if self.answer >= 400 else {}, status=self.answer)

    async def delete(self, call: web.Request) -> web.Response:
        await self.deleted.put(call.match_info["session"])
        return web.Response()

    @asynccontextmanager
    async def registered(self, trainer: Trainer) -> AsyncGenerator[str]:
        app = web.Application()
        app.router.add_post("/sessions", self.create)
        app.router.add_delete("/sessions/{session}", self.delete)
        async with listening(app, shutdown_s=1.0, host="127.0.0.1", port=0) as (host, port, *_):
            url = f"http://{host}:{port}"
            status, joined = await trainer.post("/nodes/register", REGISTRATION | {"gateway_url": url})
            assert (status, joined["gateway_url"], joined["healthy"]) == (200, url, True)
            yield url

    async def next(self) -> Any:
        return await asyncio.wait_for(self.created.get(), 30)


async def test_a_gateway_that_registers_is_given_work_and_calls_back(trainer: Trainer, client: ServerClient):
    assert (await trainer.post("/nodes/gateway-1/heartbeat", {"metrics": {}}))[0] == 404
    gateway = Gateway()
    async with gateway.registered(trainer):
        await trainer.post("/rollout/task/submit", PAYLOAD)
        given = [await gateway.next() for _ in range(2)]
        # What a session has (3.1), in the words in which the task was submitted.
        first = given[0]
        same = ("task_id", "instruction", "timeout_seconds", "agent", "builder", "evaluator", "metadata")
        assert {name: first[name] for name in same} == {name: PAYLOAD[name] for name in same}
        assert first["runtime"]["network"] == "host"
        assert first["runtime"]["image"] == PAYLOAD["runtime"]["image"]
        assert len({one["session_id"] for one in given}) == 2
        _, seen = await trainer.post("/nodes/gateway-1/heartbeat", {"metrics": {"run_inflight": 2}})
        assert (len(seen["renewed"]), seen["metrics"]["run_inflight"]) == (2, 2)
        assert gateway.created.empty()  # two run workers, and no more
        path = first["callback_url"].removeprefix(trainer.url)
        result = {
            "session_id": first["session_id"],
            "task_id": first["task_id"],
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
        assert (await trainer.post(path, result | {"node_id": "another"}))[0] == 409
        assert await trainer.post(path, result) == (200, {"status": "accepted"})
        assert await trainer.post(path, result) == (200, {"status": "accepted"})
        third = await gateway.next()  # its place is free
        assert third["session_id"] not in {one["session_id"] for one in given}
        assert await asyncio.wait_for(gateway.deleted.get(), 30) == first["session_id"]
    _, task = await trainer.get("/rollout/task/polar-swegym-0-0")
    (trace,) = task["results"][0]["trajectory"]["traces"]
    assert (trace["response_ids"], trace["reward"]) == ([2, 3], 0.75)
    assert trace["prompt_messages"] == [{"role": "user", "content": "hi"}]


ONLY_OURS: list[tuple[dict[str, Any], str]] = [
    ({"capture": {"seed": 7}}, "capture.seed"),
    ({"agent": PAYLOAD["agent"] | {"max_turns": 3}}, "agent.max_turns"),
    ({"agent": {"harness": "terminus"}}, "agent.harness"),
    ({"agent": {"harness": "shell", "settings": {"command": "work {instruction}"}}}, "agent.settings"),
    ({"agent": PAYLOAD["agent"] | {"skills": {"s": {"SKILL.md": "x"}}}}, "agent.skills.s"),
    (
        {"agent": PAYLOAD["agent"] | {"mcp_servers": {"a": {"command": ["x"], "env": {"B": "1"}}}}},
        "agent.mcp_servers.a.env.B",
    ),
    ({"runtime": PAYLOAD["runtime"] | {"backend": "sandbox", "image": None}}, "runtime.backend"),
    ({"runtime": PAYLOAD["runtime"] | {"limits": {"disk_bytes": 5}}}, "runtime.limits.disk_bytes"),
    ({"runtime": PAYLOAD["runtime"] | {"network": "none"}}, "runtime.network"),
    ({"runtime": PAYLOAD["runtime"] | {"allow_internet": False}}, "runtime.network"),
    ({"runtime": PAYLOAD["runtime"] | {"limits": {"cpus": 1.5}}}, "runtime.limits.cpus"),
    ({"runtime": PAYLOAD["runtime"] | {"prepare": [{"type": "write", "path": "a", "content": ""}]}}, "runtime.prepare"),
    ({"builder": {"strategy": "tree"}}, "builder.strategy"),
    ({"builder": {"strategy": "per_request", "config": {"roles": ["main"]}}}, "builder.roles"),
    ({"evaluator": {"strategy": "session_completed", "config": {"otherwise": -1.0}}}, "evaluator.config.otherwise"),
    ({"evaluator": PAYLOAD["evaluator"] | {"on_failure": 0.0}}, "evaluator.on_failure"),
]


@pytest.mark.parametrize(("change", "field"), ONLY_OURS, ids=[field for _, field in ONLY_OURS])
def test_what_the_paper_has_no_words_for_needs_a_node_of_ours(change: dict[str, Any], field: str):
    assert needs_of_ours(task_from_polar(PAYLOAD | change)) == (field,)


def test_what_the_paper_has_words_for_needs_none():
    limits = {"memory_mb": 2, "cpus": 3, "storage_mb": 9, "env": {"A": "1"}}
    runtime = PAYLOAD["runtime"] | limits | {"backend": "apptainer"}
    servers = [{"name": "files", "command": "mcp-files", "args": ["--root", "."]}]
    agent = PAYLOAD["agent"] | {"mcp_servers": servers}
    builder = {"strategy": "per_request", "config": {}}
    for task in (PAYLOAD, PAYLOAD | {"runtime": runtime, "agent": agent, "builder": builder, "evaluator": None}):
        assert needs_of_ours(task_from_polar(task)) == ()
    runtime = RuntimeSpec(backend="docker", network="full")
    assert needs_of_ours(TaskRequest(instruction="x", runtime=runtime, agent=AgentSpec(harness="pi"))) == ()


async def test_a_gateway_is_not_given_what_only_nodes_of_ours_run_and_the_task_says_so(
    trainer: Trainer, client: ServerClient
):
    gateway = Gateway()
    async with gateway.registered(trainer):
        seeded = PAYLOAD | {"task_id": "ours", "num_samples": 1, "capture": {"seed": 7}, "priority": 5}
        assert (await trainer.post("/rollout/task/submit", seeded))[0] == 200
        async with asyncio.timeout(30):
            async for event in client.events(after=0, task_id="ours"):
                if event.kind == "task.passed_over":
                    break
        assert event.data == {"needs": "capture.seed"}
        await trainer.post("/rollout/task/submit", PAYLOAD | {"num_samples": 1})
        assert (await gateway.next())["task_id"] == "polar-swegym-0-0"  # it was behind the other one
        (lease,) = await FakeNode(client).lease()
        assert (lease.task_id, lease.attempt) == ("ours", 1)
        assert gateway.created.empty()


async def test_a_session_that_a_gateway_refuses_fails_with_its_reason(trainer: Trainer, client: ServerClient):
    gateway = Gateway()
    gateway.answer = 422
    async with gateway.registered(trainer):
        await trainer.post("/rollout/task/submit", PAYLOAD | {"num_samples": 1, "max_attempts": 1})
        task = await client.wait("polar-swegym-0-0", timeout_s=30)
    (session,) = task.sessions
    assert (session.outcome, session.failure and session.failure.code) == ("infra_error", "polar_refused")
    assert session.failure is not None
    assert "no such harness" in session.failure.message


async def test_a_gateway_that_does_not_answer_holds_no_session(trainer: Trainer, client: ServerClient):
    await trainer.post("/nodes/register", REGISTRATION | {"gateway_url": "http://127.0.0.1:9"})
    await trainer.post("/rollout/task/submit", PAYLOAD | {"num_samples": 1})
    async for event in client.events(after=0, task_id="polar-swegym-0-0"):
        if event.kind == "session.released":
            break
    (lease,) = await FakeNode(client).lease()
    assert lease.attempt == 1  # no attempt was spent


async def test_a_session_that_was_cancelled_is_deleted_on_its_gateway(trainer: Trainer, client: ServerClient):
    gateway = Gateway()
    async with gateway.registered(trainer):
        await trainer.post("/rollout/task/submit", PAYLOAD | {"num_samples": 1})
        given = await gateway.next()
        await client.cancel(given["task_id"])
        assert await asyncio.wait_for(gateway.deleted.get(), 30) == given["session_id"]


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
