"""A connector between a Harbor that speaks as `harbor serve` does, a server and a node: calls, groups, rewards."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from gangline.domain.errors import Conflict, GanglineError, InvalidRequest, LeaseLost, NotFound, ServerUnavailable
from gangline.domain.session import Lease, SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.views import TaskView
from gangline.interop.harbor.part import GROUPS
from gangline.interop.harbor.relay.connection import RelayPlace
from gangline.interop.harbor.relay.connector import Connector, ConnectorSpec, ConnectorState, connector
from gangline.models.engine_server.app import serving as serving_app
from gangline.rows.audit import audit
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.server import ServerClient
from support.node.node import TOKEN, RunningNode, running_node
from support.service.harbor_relay import BrokenOff, FakeHarbor, Refused

KEY = "harbor-secret"
SCRIPT = {"rules": [{"turn": n, "text": f"answer {n}, at some length", "token_delay_s": 0.01} for n in range(4)]}
GIVE_UP_S = 60.0


class Place(NamedTuple):
    harbor: FakeHarbor
    url: str
    client: ServerClient
    node: RunningNode
    folder: Path


@pytest.fixture
async def place(tmp_path: Path) -> AsyncGenerator[Place]:
    harbor = FakeHarbor(KEY)
    async with (
        serving(data_dir=tmp_path / "server", control_token=TOKEN) as server,
        ServerClient(server.url, TOKEN) as client,
        scripted_server(SCRIPT) as engine,
        running_node(tmp_path / "node", engine, server_url=server.url) as node,
        serving_app(harbor.app()) as url,
    ):
        yield Place(harbor, url, client, node, tmp_path / "harbor")


def spec(place: Place, key: str = KEY, **fields: Any) -> ConnectorSpec:
    template = {"instruction": "", "agent": {"harness": "harbor"}, **fields}
    return ConnectorSpec(
        place=RelayPlace(place.url, "training-1"),
        key=key,
        folder=place.folder,
        template=TaskRequest.model_validate(template),
    )


@asynccontextmanager
async def running(place: Place, delivered: list[TaskView] | None = None, **fields: Any) -> AsyncGenerator[Connector]:
    """A connector that is connected."""
    is_connected = asyncio.Event()

    def changed(state: ConnectorState) -> None:
        if state.is_connected:
            is_connected.set()

    hear: Callable[[TaskView], None] = (lambda _task: None) if delivered is None else delivered.append
    async with connector(spec(place, **fields), place.client, changed, hear) as made:
        work = asyncio.create_task(made.run())
        await asyncio.wait({work, asyncio.create_task(is_connected.wait())}, return_when=asyncio.FIRST_COMPLETED)
        try:
            yield made
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work


async def asked(place: Place, rollout_id: str, messages: list[Any], **fields: Any) -> str:
    """A call of Anthropic's SDK, with its patience."""
    body = {"model": "claude", "max_tokens": 64, "messages": messages, **fields}
    for _ in range(100):
        try:
            answer = await place.harbor.relay.ask(rollout_id, "/v1/messages", json.dumps(body).encode())
        except (Refused, BrokenOff):
            await asyncio.sleep(0.05)
            continue
        if not fields.get("stream"):
            return json.loads(answer)["content"][0]["text"]
        events = [json.loads(line[6:]) for line in answer.decode().splitlines() if line.startswith("data: ")]
        assert events[-1]["type"] == "message_stop"
        return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    raise AssertionError("the agent got no answer")


async def talk(place: Place, rollout_id: str, num_turns: int = 2, **fields: Any) -> list[str]:
    messages: list[Any] = []
    for number in range(num_turns):
        messages.append({"role": "user", "content": f"turn {number}"})
        messages.append({"role": "assistant", "content": await asked(place, rollout_id, messages, **fields)})
    return [message["content"] for message in messages[1::2]]


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.02)


def said(result: SessionResult) -> list[str]:
    whole = [one for one in result.completions if one.status == "complete"]
    return ["".join(getattr(part, "text", "") for part in one.response.parts) for one in whole]


async def test_a_group_of_rollouts_becomes_a_task_with_tokens_and_harbors_rewards(place: Place) -> None:
    delivered: list[TaskView] = []
    for name in ("r1", "r2", "r3"):
        place.harbor.begin(name)
    async with running(place, delivered, metadata={"mine": 1}):
        heard = [await talk(place, "r1", stream=True), await talk(place, "r2")]
        place.harbor.begin("r1", state="finished", rewards={"reward": 0.25})
        place.harbor.begin("r3", state="finished", rewards={"reward": 0.0}, error_type="NonZeroAgentExitCodeError")
        place.harbor.begin("r2", state="finished", rewards={"reward": 1})
        await until(lambda: delivered)
        (task,) = delivered
        results = await place.client.result(task.task_id)
        with pytest.raises(Conflict, match="not forkable, because Harbor ran its agent"):
            await place.client.fork(results[0].session_id, 1)
        assert (await place.client.status()).unplaced == {}
    assert task.rewards == (0.25, 1.0, 0.0)
    assert [result.outcome for result in results] == ["completed", "completed", "agent_error"]
    assert [said(result) for result in results[:2]] == heard
    assert task.request["metadata"]["mine"] == 1
    assert task.request["metadata"]["harbor"]["task"]["name"] == "hello"
    for result in results[:2]:
        assert result.trajectory is not None
        assert audit(result.trajectory, result.completions).ok
        assert {trace.reward for trace in result.trajectory.traces} == {result.reward}
        assert {trace.session_id for trace in result.trajectory.traces} == {result.session_id}


async def test_a_lost_connection_doubles_no_call_and_the_agent_hears_the_same(place: Place) -> None:
    delivered: list[TaskView] = []
    place.harbor.begin("r1")
    async with running(place, delivered):
        agent = asyncio.create_task(talk(place, "r1", 3, stream=True))
        for _ in range(3):
            begun = place.harbor.relay.num_taken
            await until(lambda begun=begun: place.harbor.relay.num_taken > begun + 3 or agent.done())
            await place.harbor.drop()
            await until(lambda: place.harbor.is_connected)
        heard = await agent
        place.harbor.begin("r1", state="finished", rewards={"reward": 1.0})
        await until(lambda: delivered)
        (result,) = await place.client.result(delivered[0].task_id)
    assert said(result) == heard
    assert [one.status for one in result.completions] == ["complete"] * 3


async def test_a_rollout_that_cannot_be_ended_or_read_holds_up_no_other_group(place: Place) -> None:
    delivered: list[TaskView] = []
    other = {"task": {"name": "other", "digest": "sha256:" + "b" * 64, "source": None}}
    for name, fields in (("bad", {}), ("unread", {}), ("good", other)):
        place.harbor.begin(name, **fields)
    async with running(place, delivered):
        for name in ("bad", "good"):
            await talk(place, name, 1)
        kept = place.folder / "bad.json"
        kept.unlink()
        (kept / "in the way").mkdir(parents=True)
        place.harbor.unreadable = {"unread"}
        for name in ("bad", "unread", "good"):
            place.harbor.begin(name, state="finished", rewards={"reward": 1.0})
        await until(lambda: delivered)
        assert [task.request["instruction"] for task in delivered] == ["Harbor's task other"]
        (kept / "in the way").rmdir()
        kept.rmdir()
        place.harbor.unreadable = set()
        await until(lambda: len(delivered) == 2)
    assert [task.rewards for task in delivered] == [(1.0,), (1.0, None)], "unread made no call"


async def test_another_folders_connector_leaves_running_sessions_alone(place: Place) -> None:
    place.harbor.begin("r1")
    question = {"role": "user", "content": "one"}
    async with running(place):
        first = await asked(place, "r1", [question])
    elsewhere = place._replace(folder=place.folder.with_name("other"))
    body = json.dumps({"model": "claude", "max_tokens": 64, "messages": [question]}).encode()
    async with running(elsewhere):
        with pytest.raises(Refused, match="502 conflict"):
            await place.harbor.relay.ask("r1", "/v1/messages", body)
    delivered: list[TaskView] = []
    async with running(place, delivered):
        place.harbor.begin("r1", state="finished", rewards={"reward": 1.0})
        await until(lambda: delivered)
    (result,) = await place.client.result(delivered[0].task_id)
    assert said(result) == [first]


async def test_large_requests_and_unknown_paths_get_the_nodes_own_answer(place: Place) -> None:
    place.harbor.begin("r1")
    calls = {"/v1/messages": b'"' + b"x" * (8 << 20) + b'"', "/v1/nowhere?a=%2F": b"{}", "/v1/messages?b": b""}
    async with running(place):
        for target, body in calls.items():
            with pytest.raises(Refused) as refused:
                await place.harbor.relay.ask("r1", target, body)
            assert 400 <= refused.value.status < 500
            assert json.loads(refused.value.code)["error"]["message"]


async def test_another_connector_on_the_folder_continues(place: Place) -> None:
    delivered: list[TaskView] = []
    place.harbor.begin("r1")
    async with running(place):
        first = await asked(place, "r1", [{"role": "user", "content": "one"}])
    place.harbor.begin("r1", state="finished", rewards={"reward": 1.0})
    async with running(place, delivered):
        await until(lambda: delivered)
    (result,) = await place.client.result(delivered[0].task_id)
    assert said(result) == [first]
    assert list(place.folder.glob("*.json")) == []
    async with running(place, delivered) as again:
        await again.look()
    assert len(delivered) == 1


async def test_an_interrupted_delivery_is_taken_up_and_no_node_runs_its_sessions(place: Place) -> None:
    fields = {"instruction": "x", "agent": {"harness": "harbor"}, "evaluator": {"strategy": "harbor"}}
    fields |= {"task_id": "harbor-1", "num_samples": 2, "max_attempts": 9}
    fields |= {"runtime": {"backend": "process", "node_labels": ["run-by-harbor"]}}
    body = msgspec.json.encode(fields)

    async def lease(body: bytes = body) -> list[Lease]:
        return await place.client.request_json("POST", GROUPS, list[Lease], body=body)

    with pytest.raises(InvalidRequest, match=r"runtime\.node_labels must name run-by-harbor"):
        await lease(msgspec.json.encode(fields | {"task_id": "harbor-2", "runtime": {"backend": "process"}}))
    with pytest.raises(NotFound):
        await place.client.task("harbor-2")

    def result(of: Lease) -> SessionResult:
        return SessionResult(
            session_id=of.session_id,
            task_id=of.task_id,
            node_id="harbor",
            attempt=of.attempt,
            fence=of.fence,
            outcome="no_model_call",
        )

    before, after = await lease(), await lease()
    assert [one.session_id for one in before] == [one.session_id for one in after] == ["harbor-1.0", "harbor-1.1"]
    assert {one.attempt for one in after} == {1}
    with pytest.raises(LeaseLost):
        await place.client.post_result(result(before[0]))
    await place.client.post_result(result(after[0]))
    (last,) = await lease()
    await place.client.post_result(result(last))
    assert (await place.client.task("harbor-1")).ended
    assert await lease() == []
    assert [node.node_id for node in (await place.client.status()).nodes] == ["n1"]


@pytest.mark.parametrize(
    ("key", "kind", "words"), [("wrong", InvalidRequest, "HARBOR_API_KEY"), (KEY, Conflict, "--session")]
)
async def test_what_the_relay_refuses_is_said(
    place: Place, monkeypatch: pytest.MonkeyPatch, key: str, kind: type[GanglineError], words: str
) -> None:
    monkeypatch.setattr("gangline.interop.harbor.relay.connection._TAKEN_S", 0.0)
    elsewhere = place._replace(folder=place.folder.with_name("other"))
    async with running(place):
        with pytest.raises(kind, match=words):
            async with connector(spec(elsewhere, key), place.client, lambda _: None, lambda _: None) as other:
                await other.run()


async def test_a_folder_has_one_connector_at_a_time(place: Place) -> None:
    async with running(place):
        with pytest.raises(Conflict, match="another connector works on"):
            async with connector(spec(place), place.client, lambda _: None, lambda _: None):
                pass
    async with running(place):
        pass


async def test_a_harbor_that_is_not_there_is_named(place: Place) -> None:
    away = place._replace(url="http://127.0.0.1:9")
    with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:9.*harbor serve"):
        async with connector(spec(away), place.client, lambda _: None, lambda _: None) as made:
            await made.run()
