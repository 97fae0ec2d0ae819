"""A trainer that knows ProRL Agent's paper (listing 3, 3.3.2 to 3.3.4) and nothing of Gangline."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gangline.domain.conversation import Message, Text
from gangline.domain.placement import Offer
from gangline.domain.session import Heartbeat, Lease, StageTiming
from gangline.domain.tokens import logprobs, token_ids
from gangline.domain.trajectory import Trace, Trajectory, TurnSpan
from gangline.interop.prorl import routes
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.server import ServerClient
from support.node.node import TOKEN, RunningNode, running_node
from support.service.papers import listing
from support.service.running import FakeNode

AGENT = {"harness": "shell", "settings": {"command": "true"}}
INSTANCE = {"instance_id": "mypy-16203", "trajectory_id": "t0", "agent": AGENT, "instruction": "do it"}
SAMPLING = {"model": "served", "api_key": "sk-very-secret", "temperature": 0.6, "max_tokens": 256, "max_iterations": 5}


class Trainer:
    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.http = http

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body) as reply:
            return reply.status, await reply.json(content_type=None)

    async def status(self) -> Any:
        async with self.http.get(f"{self.url}/status") as reply:
            return await reply.json(content_type=None)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ServerClient]:
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        yield client


@pytest.fixture
async def trainer(client: ServerClient) -> AsyncIterator[Trainer]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        yield Trainer(client.url, http)


def two_turns(lease: Lease) -> Trajectory:
    said = [Message(role, (Text(text),)) for role, text in (("assistant", "a"), ("tool", "t"), ("assistant", "b"))]
    trace = Trace(
        trace_id=f"{lease.session_id}.0",
        session_id=lease.session_id,
        prompt_ids=token_ids([1, 2]),
        response_ids=token_ids([3, 4, 5, 6]),
        loss_mask=token_ids([1, 0, 1, 1]).astype("int8"),
        response_logprobs=logprobs([-0.5, 0.0, -0.25, -0.125]),
        response_versions=token_ids([0, -1, 0, 0]),
        spans=(TurnSpan("c1", 0, 1), TurnSpan("c2", 2, 4)),
        prompt_messages=(Message("user", (Text("do it"),)),),
        response_messages=tuple(said),
        finish_reason="stop",
        certificates=(),
    )
    return Trajectory(
        session_id=lease.session_id, task_id=lease.task_id, builder="b", traces=(trace,), num_completions=2
    )


async def test_a_job_is_answered_when_it_ends_with_ids_in_its_messages(trainer: Trainer, client: ServerClient):
    job = {"instance": INSTANCE, "sampling_params": SAMPLING, "job_id": "j1"}
    waiting = asyncio.create_task(trainer.post("/process", job))
    node = FakeNode(client)
    (lease,) = await node.lease(wait_s=10)
    assert lease.task["capture"]["sampling"]["temperature"]["override"] == 0.6
    assert lease.task["agent"]["model_name"] == "served"
    assert lease.task["agent"]["max_turns"] == 5
    assert "sk-very-secret" not in json.dumps(lease.task)
    assert (await trainer.status())["pending_jobs"] == 1
    await node.finish([lease], trajectory=two_turns(lease), reward=1.0, timings=(StageTiming("run", 10.0, 12.5),))
    status, answer = await waiting
    assert (status, answer["job_id"], answer["resolved"], answer["critical_error"]) == (200, "j1", True, None)
    assert (answer["instance_id"], answer["trajectory_id"]) == ("mypy-16203", "t0")
    assert {name: answer["timing"][name] for name in ("init", "run", "eval")} == {"init": 0.0, "run": 2.5, "eval": 0.0}
    assert answer["ignored_sampling_params"] == ["api_key"]
    first, last = [message for message in answer["messages"] if message["role"] == "assistant"]
    assert (first["input_ids"], first["output_ids"], first["logprobs"]) == ([1, 2], [3], [-0.5])
    assert (last["input_ids"], last["output_ids"], last["logprobs"]) == ([1, 2, 3, 4], [5, 6], [-0.25, -0.125])
    assert await trainer.post("/process", job) == (200, answer)


@pytest.mark.parametrize(
    ("reward", "resolved"), [(None, False), (0.0, False), (0.5, False), (0.999, False), (1.0, True)]
)
async def test_only_a_full_reward_is_resolved(
    trainer: Trainer, client: ServerClient, reward: float | None, resolved: bool
):
    waiting = asyncio.create_task(trainer.post("/process", {"instance": INSTANCE, "job_id": "part"}))
    node = FakeNode(client)
    leases = await node.lease(wait_s=10)
    await node.finish(leases, reward=reward)
    status, answer = await waiting
    assert (status, answer["resolved"], answer["reward"]) == (200, resolved, reward)


def printed_requests(values: dict[str, str]) -> list[tuple[str, str, Any]]:
    """Listing 3: method, path and body of each line. The braces around bodies were lost, and are put back."""
    text = listing("000-listing-3.txt")
    for placeholder, value in values.items():
        assert placeholder in text
        text = text.replace(placeholder, value)
    found = re.findall(r"(POST|GET) (/\w+) ?([^#|]*)", text)
    return [(method, path, json.loads(f"{{{body}}}") if body.strip() else None) for method, path, body in found]


async def test_every_line_of_the_management_api_is_answered(trainer: Trainer, client: ServerClient, tmp_path: Path):
    """In the order in which they are printed; the job is cancelled while it runs, as the paper does."""
    script = {"default": {"text": "hello"}}
    async with (
        scripted_server(script) as first,
        scripted_server(script) as second,
        running_node(tmp_path / "node", first) as node,
    ):
        await client.heartbeat(Heartbeat(node_id="n1", url=node.url, sessions={}, capacity=1))
        values = {
            "http :// host:port": second,
            '"instance": ...': f'"instance": {json.dumps(INSTANCE)}',
            '"sampling_params": ...': f'"sampling_params": {json.dumps(SAMPLING)}',
            '"job_id": "..."': '"job_id": "the-job"',
        }
        asked: list[str] = []
        jobs: list[asyncio.Task[Any]] = []
        for method, path, body in printed_requests(values):
            asked.append(path)
            if path == "/process":
                jobs.append(asyncio.create_task(trainer.post(path, body | {"job_id": "the-job"})))
                assert len(await FakeNode(client).lease(wait_s=10)) == 1
            elif method == "GET":
                assert (await trainer.status())["status"] == "stopped"
            else:
                assert (await trainer.post(path, body))[0] == 200, path
            if path == "/add_llm_server":
                assert await engines_of(node) == [first, second]
            if path == "/clear_llm_server":
                assert await engines_of(node) == []
        assert [(await job)[1]["critical_error"] for job in jobs] == ["cancelled"]
        assert asked == [*("/add_llm_server", "/clear_llm_server", "/process", "/cancel", "/start", "/stop", "/status")]


async def test_a_cancelled_job_answers_who_waits_for_it(trainer: Trainer, client: ServerClient):
    waiting = asyncio.create_task(trainer.post("/process", {"instance": INSTANCE, "job_id": "j2"}))
    await FakeNode(client).lease(wait_s=10)
    assert (await trainer.post("/cancel", {"job_id": "j2"}))[0] == 200
    status, answer = await waiting
    assert (status, answer["outcome"], answer["critical_error"], answer["filter"]) == (
        200, "cancelled", "cancelled", True,
    )  # fmt: skip
    assert (await trainer.post("/cancel", {"job_id": "never"}))[0] == 404


async def test_stop_cancels_jobs_alone_and_start_takes_them_again(trainer: Trainer, client: ServerClient):
    await client.submit({"task_id": "other", "instruction": "x", "agent": AGENT})
    waiting = asyncio.create_task(trainer.post("/process", {"instance": INSTANCE, "job_id": "j3"}))
    assert len(await FakeNode(client).lease(max_sessions=1, wait_s=10)) == 1
    while (await trainer.status())["pending_jobs"] == 0:
        await asyncio.sleep(0)
    status, stopped = await trainer.post("/stop")
    assert (status, stopped["cancelled_jobs"]) == (200, 1)
    assert (await waiting)[1]["outcome"] == "cancelled"
    assert (await trainer.status())["status"] == "stopped"
    refused, problem = await trainer.post("/process", {"instance": INSTANCE})
    assert (refused, problem["retryable"]) == (503, True)
    assert (await client.task("other")).status == "running"
    await trainer.post("/start")
    again = asyncio.create_task(trainer.post("/process", {"instance": INSTANCE, "job_id": "j4"}))
    node = FakeNode(client)
    await node.finish(await node.lease(wait_s=10))
    assert (await again)[1]["success"]


async def test_a_server_that_was_stopped_stays_so_when_it_starts_again(tmp_path: Path):
    for word in ("running", "stopped", "stopped"):
        async with (
            serving(data_dir=tmp_path, control_token=TOKEN) as running,
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
        ):
            trainer = Trainer(running.url, http)
            assert (await trainer.status())["status"] == word
            if word == "stopped":
                assert (await trainer.post("/process", {"instance": INSTANCE}))[0] == 503
            await trainer.post("/stop")


@pytest.mark.parametrize("job_id", [None, "j5"])
async def test_a_job_that_no_node_can_run_is_answered(
    trainer: Trainer, client: ServerClient, monkeypatch: pytest.MonkeyPatch, job_id: str | None
):
    monkeypatch.setattr(routes, "_PLACING_S", 0.2)
    offer = Offer(runtimes=("sandbox",), missing={"docker": "docker is not installed"})
    heartbeat = Heartbeat(node_id="n1", url="http://node.test", sessions={}, capacity=8, offer=offer)
    await client.heartbeat(heartbeat)
    runtime = {"runtime": {"backend": "docker", "image": "one:1"}}
    status, problem = await trainer.post("/process", {"instance": INSTANCE | runtime, "job_id": job_id})
    assert (status, "node n1 lacks runtime `docker`" in problem["detail"]) == (503, True), problem
    (task,) = (await client.tasks()).tasks
    assert task.status == ("cancelled" if job_id is None else "queued")


async def test_status_tells_queue_depths_by_stage(trainer: Trainer, client: ServerClient):
    waiting = [asyncio.create_task(trainer.post("/process", {"instance": INSTANCE, "job_id": f"q{n}"})) for n in "12"]
    node = FakeNode(client)
    leases = await node.lease(max_sessions=1, wait_s=10)
    await node.beat(leases, stage="postrun")
    while (await trainer.status())["queues"]["queued"] == 0:
        await asyncio.sleep(0)
    assert (await trainer.status())["queues"] == {"queued": 1, "init": 0, "ready": 0, "run": 0, "eval": 1}
    await trainer.post("/stop")
    await asyncio.gather(*waiting)


async def test_a_data_source_names_the_operators_template(trainer: Trainer, client: ServerClient, tmp_path: Path):
    folder = tmp_path / "server" / "handlers"
    folder.mkdir()
    template = {
        "instruction": "Fix {instance_id}: ${HOME} {extra}",
        "agent": {"harness": "shell", "settings": {"command": "solve {instance_id}"}},
    }
    (folder / "swebench.json").write_text(json.dumps(template))
    instance = {"data_source": "swebench", "instance_id": "mypy-1", "extra": {"a": 1}}
    waiting = asyncio.create_task(trainer.post("/process", {"instance": instance}))
    node = FakeNode(client)
    (lease,) = await node.lease(wait_s=10)
    assert lease.task["instruction"] == 'Fix mypy-1: ${HOME} {"a":1}'
    assert lease.task["agent"]["settings"] == {"command": "solve mypy-1"}
    await node.finish([lease])
    assert (await waiting)[1]["instance_id"] == "mypy-1"
    status, problem = await trainer.post("/process", {"instance": {"data_source": "other"}})
    assert (status, "Known: code, math, stem, swe, swebench" in problem["detail"]) == (400, True)


@pytest.mark.parametrize("source", ["../../secrets", "/etc/passwd", "a/b", "..", ".hidden", "x" * 200])
async def test_a_data_source_never_leaves_its_folder(trainer: Trainer, tmp_path: Path, source: str):
    (tmp_path / "secrets.json").write_text('{"instruction": "leak", "agent": {"harness": "shell"}}')
    status, problem = await trainer.post("/process", {"instance": {"data_source": source}})
    assert (status, problem["code"]) == (400, "invalid_request")


async def engines_of(node: RunningNode) -> list[str]:
    return [view.url for view in await node.client.backends()]


async def until_engines(node: RunningNode, wanted: list[str]) -> None:
    async with asyncio.timeout(30):
        while await engines_of(node) != wanted:
            await asyncio.sleep(0.05)


async def test_engines_are_added_on_and_cleared_from_the_nodes_that_are_up(
    trainer: Trainer, client: ServerClient, tmp_path: Path
):
    script = {"default": {"text": "hello"}}
    async with (
        scripted_server(script) as first,
        scripted_server(script) as second,
        running_node(tmp_path / "node", first) as node,
    ):
        await client.heartbeat(Heartbeat(node_id="n1", url=node.url, sessions={}, capacity=1))
        status, added = await trainer.post("/add_llm_server", {"address": f"{second}/v1"})
        assert (status, added["nodes"]) == (200, ["n1"])
        assert await engines_of(node) == [first, second]
        assert (await trainer.post("/clear_llm_server"))[0] == 200
        assert await engines_of(node) == []
        refused, problem = await trainer.post("/add_llm_server", {"address": "http://127.0.0.1:9/v1"})
        assert (refused, problem["code"]) == (503, "engine_unavailable")


async def test_engines_reach_nodes_that_join_later_through_restarts_of_the_server(tmp_path: Path):
    """A trainer adds engines when they are up, whoever else is; a node joins when it is up."""
    script = {"default": {"text": "hello"}}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        scripted_server(script) as own,
        scripted_server(script) as added,
        aiohttp.ClientSession(headers=headers) as http,
        running_node(tmp_path / "node", own) as node,
    ):
        here = Heartbeat(node_id="n1", url=node.url, sessions={}, capacity=1)
        async with serving(data_dir=tmp_path / "server", control_token=TOKEN) as server:
            answer = await Trainer(server.url, http).post("/add_llm_server", {"address": f"{added}/v1"})
            assert (answer[0], answer[1]["nodes"]) == (200, [])
        async with (
            serving(data_dir=tmp_path / "server", control_token=TOKEN) as server,
            ServerClient(server.url, TOKEN) as client,
        ):
            await client.heartbeat(here)
            await until_engines(node, [own, added])
            # What an operator takes away from one node stays away from it, until it is added again.
            await node.client.remove_backend((await node.client.backends())[1].backend_id)
            await client.heartbeat(msgspec.structs.replace(here, node_id="n2"))
            await until_engines(node, [own, added])
            trainer = Trainer(server.url, http)
            assert sorted((await trainer.post("/clear_llm_server"))[1]["nodes"]) == ["n1", "n2"]
            assert await engines_of(node) == []
            await client.heartbeat(msgspec.structs.replace(here, node_id="n3"))
            assert sorted((await trainer.post("/add_llm_server", {"address": own}))[1]["nodes"]) == ["n1", "n2", "n3"]
            assert await engines_of(node) == [own]


async def test_a_node_that_was_away_when_engines_were_cleared_loses_them_when_it_is_back(
    trainer: Trainer, client: ServerClient, tmp_path: Path
):
    """Their weights are old: a session there would be trained on as if they were not."""
    script = {"default": {"text": "hello"}}
    async with scripted_server(script) as old, running_node(tmp_path / "node", old) as node:
        away = Heartbeat(node_id="n1", url="http://127.0.0.1:9", sessions={}, capacity=1)
        await client.heartbeat(away)
        assert (await trainer.post("/clear_llm_server"))[0] == 503
        assert await engines_of(node) == [old]
        await client.heartbeat(msgspec.structs.replace(away, url=node.url))
        await until_engines(node, [])
