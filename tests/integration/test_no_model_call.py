"""Sessions whose agent never calls the model: not graded, not trained on, and never a 0."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from gangline.domain.errors import InvalidGroup
from gangline.domain.session import SessionResult
from gangline.gateway.sessions.attempt import Attempt
from gangline.server.compat.prorl.jobs import job_result
from gangline.server.compat.records import polar_result
from gangline.serving.scripted.server import scripted_server
from gangline.training.collecting.groups import judge_group, why_invalid
from support.node.attempt import lease_of, node_parts
from support.node.node import running_node

CALL = """
import json, os, sys, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + sys.argv[1], body, headers)
try:
    urllib.request.urlopen(request).read()
except OSError as error:
    print(error)
"""
WORKS = "python3 agent.py /chat/completions"
GRADED: dict[str, Any] = {
    "strategy": "script",
    "config": {"command": "touch was_graded; echo 1 > reward.txt", "reward_file": "reward.txt"},
}


async def ended(
    folder: Path, command: str, *, engine_url: str | None = None, task: dict[str, Any] | None = None, **agent: Any
) -> SessionResult:
    """The end of a session whose agent is `command`, graded with 1.0 by a script."""
    agent |= {"harness": "shell", "settings": {"command": command}}
    fields: dict[str, Any] = {
        "agent": agent,
        "evaluator": GRADED,
        "runtime": {"backend": "process", "prepare": [{"type": "write", "path": "agent.py", "content": CALL}]},
        **(task or {}),
    }
    async with node_parts(folder, engine_url=engine_url) as parts, asyncio.timeout(60):
        return await Attempt(lease_of(**fields), parts).live()


async def test_a_session_without_a_call_earns_nothing_and_says_why(tmp_path: Path) -> None:
    result = await ended(tmp_path, "echo working hard")
    assert (result.outcome, result.reward, result.trajectory) == ("no_model_call", None, None)
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.code, result.failure.retryable) == (
        *("harness", "no_model_call"),
        False,
    )
    assert result.artifacts["harness.stdout"] == b"working hard\n"
    assert "no_model_call" in (why_invalid(result) or "")
    assert result.usage is not None
    assert result.usage.grading is None, "nothing was graded"


async def test_a_task_that_allows_it_is_graded(tmp_path: Path) -> None:
    result = await ended(tmp_path, "true", allow_no_model_call=True)
    assert (result.outcome, result.reward, result.failure) == ("completed", 1.0, None)


async def test_a_clean_grader_that_waits_is_given_back(tmp_path: Path) -> None:
    result = await ended(tmp_path, "true", task={"evaluator": GRADED | {"refresh_runtime": True}})
    assert (result.outcome, result.reward) == ("no_model_call", None)
    assert list((tmp_path / "runtimes").iterdir()) == []


async def test_one_call_is_enough(tmp_path: Path) -> None:
    result = await ended(tmp_path, WORKS)
    assert (result.outcome, result.reward, len(result.completions)) == ("completed", 1.0, 1)


async def test_counting_tokens_is_no_call(tmp_path: Path) -> None:
    result = await ended(tmp_path, "python3 agent.py /messages/count_tokens")
    assert (result.outcome, result.artifacts["harness.stdout"]) == ("no_model_call", b"")


@pytest.mark.parametrize(
    ("command", "task", "outcome", "reward"),
    [("exit 3", {}, "agent_error", 1.0), ("sleep 600", {"timeout_seconds": 0.3}, "agent_timeout", 1.0)],
)
async def test_an_agent_that_failed_before_its_first_call_keeps_its_outcome(
    tmp_path: Path, command: str, task: dict[str, Any], outcome: str, reward: float
) -> None:
    result = await ended(tmp_path, command, task=task)
    assert (result.outcome, result.reward) == (outcome, reward)


async def test_an_engine_that_answers_no_call_is_our_fault(tmp_path: Path) -> None:
    """The agent takes it in its stride and ends well: all the same nothing of it was sampled."""
    broken = {"pattern": "hello", "text": "hi", "faults": {"status": 500, "times": None}}
    script = {"rules": [broken], "default": {"text": "hi"}}
    async with scripted_server(script) as url:
        result = await ended(tmp_path, WORKS, engine_url=url)
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert result.failure.boundary == "engine"


async def test_a_group_counts_it_as_invalid_and_other_systems_are_told(tmp_path: Path) -> None:
    result = await ended(tmp_path, "true")
    with pytest.raises(InvalidGroup, match="s1: it ended as no_model_call"):
        judge_group("t1", [result], 1)
    polar = polar_result(result, {"agent": {"harness": "shell"}}, "floats")
    assert (polar["status"], polar["metadata"]["outcome"]) == ("ERROR", "no_model_call")
    assert "without a model call" in polar["error"]
    job = job_result(result, "j", {}, ())
    assert (job["filter"], job["success"], job["reward"]) == (True, False, None)


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_claim_without_a_call_is_no_reward(tmp_path: Path, allowed: bool) -> None:
    """Of an agent that runs elsewhere."""
    async with scripted_server({"default": {"text": "hi"}}) as url, running_node(tmp_path, url) as node:
        opened = await node.client.open_session(reward_policy="claimed", allow_no_model_call=allowed)
        async with openai.AsyncOpenAI(base_url=opened.base_urls["openai"], api_key=opened.api_key) as client:
            await client.post(f"{opened.base_url.removesuffix('/v1')}/complete", cast_to=object, body={"reward": 1.0})
        result = await node.client.finalize(opened.session_id)
    expected = ("completed", 1.0) if allowed else ("no_model_call", None)
    assert (result.outcome, result.reward, result.reward_details["claimed_reward"]) == (*expected, 1.0)
