"""Sessions that a caller opens on a node for its own agent: keys, claims, results, restarts."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from gangline.domain.completion import CompletionTree
from gangline.domain.errors import Conflict, InvalidRequest, NotFound
from gangline.domain.node_views import OpenedSession
from gangline.domain.session import SessionResult
from gangline.rows.audit import audit
from gangline.serving.scripted.server import scripted_server
from support.node.node import TOKEN, RunningNode, running_node

SCRIPT = {"default": {"text": "as you wish"}}


@pytest.fixture
async def engine_url() -> AsyncGenerator[str]:
    async with scripted_server(SCRIPT) as url:
        yield url


@pytest.fixture
async def node(tmp_path: Path, engine_url: str) -> AsyncGenerator[RunningNode]:
    async with running_node(tmp_path, engine_url) as running:
        yield running


async def talk(opened: OpenedSession, num_turns: int = 2, messages: list[Any] | None = None) -> list[Any]:
    """A small agent on the official SDK; the conversation that it leaves."""
    messages = [] if messages is None else messages
    async with openai.AsyncOpenAI(base_url=opened.base_urls["openai"], api_key=opened.api_key, max_retries=0) as client:
        for turn in range(num_turns):
            messages.append({"role": "user", "content": f"turn {len(messages)} {turn}"})
            reply = await client.chat.completions.create(model=opened.model, messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return messages


async def test_an_agent_that_nobody_runs_for_it_leaves_a_trajectory(node: RunningNode) -> None:
    opened = await node.client.open_session(metadata={"mine": 1})
    await talk(opened, 3)
    result = await node.client.finalize(opened.session_id, completions=True)
    assert result.outcome == "completed"
    assert result.trajectory is not None
    assert len(result.trajectory.traces) == 1
    assert int(result.trajectory.traces[0].loss_mask.sum()) == sum(len(one.sampled_ids) for one in result.completions)
    assert len(result.completions) == 3
    assert audit(result.trajectory, result.completions).ok


async def test_finalizing_again_gives_the_same(node: RunningNode) -> None:
    opened = await node.client.open_session()
    await talk(opened)
    session_id = opened.session_id
    status, first = await node.ask("POST", f"/v1/sessions/{session_id}/finalize")
    assert status == 200
    assert first["completions"] == []
    assert await node.ask("POST", f"/v1/sessions/{session_id}/finalize") == (200, first)
    assert (await node.client.session(session_id)).status == "finalized"


async def test_two_finalizers_at_once_get_one_result(node: RunningNode) -> None:
    opened = await node.client.open_session()
    await talk(opened)
    path = f"/v1/sessions/{opened.session_id}/finalize"
    first, second = await asyncio.gather(node.ask("POST", path), node.ask("POST", path))
    assert first == second
    assert first[0] == 200


async def test_the_key_is_dead_once_the_session_is_finalized(node: RunningNode) -> None:
    opened = await node.client.open_session()
    await node.client.finalize(opened.session_id)
    with pytest.raises(openai.AuthenticationError):
        await talk(opened, 1)


async def test_an_agent_that_never_called_its_model_leaves_an_empty_trajectory(node: RunningNode) -> None:
    opened = await node.client.open_session(builder="per_request")
    result = await node.client.finalize(opened.session_id)
    assert result.trajectory is not None
    assert result.trajectory.traces == ()


async def test_the_named_builder_builds(node: RunningNode) -> None:
    opened = await node.client.open_session(builder="per_request")
    await talk(opened, 3)
    result = await node.client.finalize(opened.session_id)
    assert result.trajectory is not None
    assert len(result.trajectory.traces) == 3


async def test_an_unknown_builder_is_refused_when_the_session_is_opened(node: RunningNode) -> None:
    status, problem = await node.ask("POST", "/v1/sessions", {"builder": "per_reqest"})
    assert (status, problem["code"]) == (400, "unknown_plugin")
    assert "per_request" in problem["detail"]


@pytest.mark.parametrize(("method", "end"), [("POST", "/abort"), ("DELETE", "")])
async def test_an_aborted_session_leaves_nothing(node: RunningNode, method: str, end: str) -> None:
    opened = await node.client.open_session()
    await talk(opened)
    status, view = await node.ask(method, f"/v1/sessions/{opened.session_id}{end}")
    assert (status, view["status"]) == (200, "aborted")
    assert (await node.client.abort_session(opened.session_id)).status == "aborted"
    with pytest.raises(Conflict):
        await node.client.finalize(opened.session_id)
    with pytest.raises(openai.AuthenticationError):
        await talk(opened, 1)


async def test_a_claim_is_kept_but_is_no_reward(node: RunningNode) -> None:
    opened = await node.client.open_session()
    await talk(opened, 1)
    body = {"reward": 1.0, "reward_info": {"why": "I say so"}}
    assert (await node.ask("POST", f"/s/{opened.session_id}/complete", body, opened.api_key))[0] == 200
    result = await node.client.finalize(opened.session_id)
    assert result.reward is None
    assert result.reward_details == {"claimed_reward": 1.0, "reward_info": {"why": "I say so"}}
    assert result.trajectory is not None
    assert result.trajectory.traces[0].reward is None
    assert result.trajectory.traces[0].metadata["claimed_reward"] == 1.0


async def test_a_claim_is_the_reward_where_the_policy_says_so(node: RunningNode) -> None:
    opened = await node.client.open_session(reward_policy="claimed")
    await talk(opened, 1)
    path = f"/v1/sessions/{opened.session_id}/complete"
    assert (await node.ask("POST", path, {"reward": 0.5}, opened.api_key))[0] == 200
    result = await node.client.finalize(opened.session_id)
    assert result.reward == 0.5
    assert result.trajectory is not None
    assert result.trajectory.traces[0].reward == 0.5


async def test_the_first_claim_counts(node: RunningNode) -> None:
    opened = await node.client.open_session()
    path = f"/s/{opened.session_id}/complete"
    assert (await node.ask("POST", path, {"reward": 0.5}, opened.api_key))[0] == 200
    assert (await node.ask("POST", path, {"reward": 0.5}, opened.api_key))[0] == 200
    assert (await node.ask("POST", path, {"reward": 1.0}, opened.api_key))[0] == 409
    claim = (await node.client.session(opened.session_id)).claim
    assert claim is not None
    assert claim.reward == 0.5


@pytest.mark.parametrize("reward", ["much", [1], "NaN"])
async def test_a_claim_that_is_no_number_is_refused(node: RunningNode, reward: Any) -> None:
    opened = await node.client.open_session()
    status, problem = await node.ask("POST", f"/s/{opened.session_id}/complete", {"reward": reward}, opened.api_key)
    assert (status, problem["code"]) == (400, "invalid_request")
    assert (await node.client.session(opened.session_id)).status == "open"


async def test_a_waiter_is_told_when_the_agent_is_done(node: RunningNode) -> None:
    opened = await node.client.open_session()
    waiter = asyncio.create_task(node.client.wait_session(opened.session_id, 60))
    await node.ask("POST", f"/s/{opened.session_id}/complete", {}, opened.api_key)
    assert (await waiter).status == "completed"


async def test_a_waiter_is_told_when_the_session_is_aborted(node: RunningNode) -> None:
    opened = await node.client.open_session()
    waiter = asyncio.create_task(node.client.wait_session(opened.session_id, 60))
    await node.client.abort_session(opened.session_id)
    assert (await waiter).status == "aborted"


async def test_a_wait_ends_with_its_time(node: RunningNode) -> None:
    opened = await node.client.open_session()
    assert (await node.client.wait_session(opened.session_id, 0.01)).status == "open"


async def test_a_turn_limit_is_the_outcome(node: RunningNode) -> None:
    opened = await node.client.open_session(max_turns=1)
    with pytest.raises(openai.APIStatusError):
        await talk(opened, 2)
    result = await node.client.finalize(opened.session_id, completions=True)
    assert result.outcome == "turn_limit"
    assert len(result.completions) == 1


async def test_a_session_goes_on_after_a_restart_of_the_node(tmp_path: Path, engine_url: str) -> None:
    async with running_node(tmp_path, engine_url) as node:
        opened = await node.client.open_session(session_id="mine")
        messages = await talk(opened, 2)
    async with running_node(tmp_path, engine_url) as node:
        moved = msgspec.structs.replace(opened, base_urls={"openai": f"{node.url}/s/mine/v1"})
        await talk(moved, 1, messages)
        result = await node.client.finalize("mine", completions=True)
        assert result.trajectory is not None
        assert len(result.trajectory.traces) == 1
        assert [one.certificate.prompt_source for one in result.completions] == ["engine", "stitched", "stitched"]
    async with running_node(tmp_path, engine_url) as node:
        again = await node.client.finalize("mine", completions=True)
        assert msgspec.to_builtins(again.outcome) == result.outcome
        assert CompletionTree(again.completions).context_ids(again.completions[-1]).tolist() == (
            CompletionTree(result.completions).context_ids(result.completions[-1]).tolist()
        )


async def test_what_is_kept_of_a_session_holds_no_key_and_is_its_owners_alone(tmp_path: Path, engine_url: str) -> None:
    async with running_node(tmp_path, engine_url) as node:
        opened = await node.client.open_session()
        await talk(opened, 1)
        await node.client.finalize(opened.session_id)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in files if opened.api_key.encode() in path.read_bytes()] == []
    kept = [path for path in files if path.parent.name == "sessions"]
    assert {path.suffix for path in kept} == {".json", ".msgpack"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}


async def test_ids_are_taken_once(node: RunningNode) -> None:
    await node.client.open_session(session_id="mine")
    with pytest.raises(Conflict):
        await node.client.open_session(session_id="mine")


@pytest.mark.parametrize("session_id", ["../up", "a/b", ".hidden", "", "x" * 129])
async def test_ids_that_could_be_paths_are_refused(node: RunningNode, session_id: str) -> None:
    with pytest.raises(InvalidRequest):
        await node.client.open_session(session_id=session_id)


async def test_control_routes_want_the_control_token(node: RunningNode) -> None:
    opened = await node.client.open_session()
    one = f"/v1/sessions/{opened.session_id}"
    for method, path in [
        ("POST", "/v1/sessions"),
        ("GET", "/v1/sessions"),
        ("GET", one),
        ("GET", f"{one}/wait"),
        ("POST", f"{one}/finalize"),
        ("POST", f"{one}/abort"),
        ("DELETE", one),
        ("GET", "/v1/status"),
    ]:
        for key in (None, "wrong", opened.api_key):
            status, problem = await node.ask(method, path, {} if method == "POST" else None, key)
            assert (status, problem["code"]) == (401, "unauthorized"), path


async def test_a_session_is_completed_by_its_own_key_only(node: RunningNode) -> None:
    opened, other = await node.client.open_session(), await node.client.open_session()
    for key in (TOKEN, other.api_key, "wrong", None):
        for path in ("complete", "generate"):
            status, problem = await node.ask("POST", f"/s/{opened.session_id}/{path}", {"prompt_ids": [1]}, key)
            assert (status, problem["code"]) == (401, "unauthorized")
    unknown = await node.ask("POST", "/s/nobody/complete", {}, other.api_key)
    assert unknown[0] == 401


async def test_unknown_sessions_are_not_found(node: RunningNode) -> None:
    for call in (node.client.session, node.client.finalize, node.client.abort_session, node.client.wait_session):
        with pytest.raises(NotFound):
            await call("nobody")


async def test_unknown_fields_are_named(node: RunningNode) -> None:
    status, problem = await node.ask("POST", "/v1/sessions", {"max_turn": 3})
    assert (status, problem["code"]) == (400, "invalid_request")
    assert "max_turn" in problem["detail"]


async def test_a_body_that_is_too_long_is_refused(node: RunningNode) -> None:
    status, problem = await node.ask("POST", "/v1/sessions", {"metadata": {"x": "y" * (5 << 20)}})
    assert (status, problem["code"]) == (413, "limit_exceeded")


async def test_an_engine_that_fails_the_agent_is_no_outcome_of_the_agents(tmp_path: Path) -> None:
    broken = {"pattern": "turn 2", "text": "x", "faults": {"status": 503, "times": None}}
    async with scripted_server(SCRIPT | {"rules": [broken]}) as url, running_node(tmp_path, url) as node:
        opened = await node.client.open_session()
        with pytest.raises(openai.APIStatusError):
            await talk(opened, 2)
        result = await node.client.finalize(opened.session_id, completions=True)
    assert result.outcome == "infra_error"
    assert result.failure is not None
    assert result.failure.boundary == "engine"
    assert len(result.completions) == 1


async def test_the_result_is_json_or_messagepack_by_accept(node: RunningNode) -> None:
    opened = await node.client.open_session()
    await talk(opened, 1)
    path = f"/v1/sessions/{opened.session_id}/finalize?completions=1"
    _, as_json = await node.ask("POST", path)
    result: SessionResult = await node.client.finalize(opened.session_id, completions=True)
    assert result.trajectory is not None
    assert as_json["trajectory"]["traces"][0]["response_ids"] == result.trajectory.traces[0].response_ids.tolist()
    assert as_json["completions"][0]["sampled_ids"] == result.completions[0].sampled_ids.tolist()
