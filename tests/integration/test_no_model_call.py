"""Sessions whose agent never calls the model: not graded, not trained on, and never a 0."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path
from typing import Any

import openai
import pytest

from gangline.domain.errors import Failure, InvalidGroup
from gangline.domain.session import SessionResult
from gangline.interop.polar.records import polar_result
from gangline.interop.prorl.routes import job_result
from gangline.node.sessions.attempt import Attempt
from gangline.serving.scripted.server import scripted_server
from gangline.train.collecting.groups import judge_group, why_invalid
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
NOTHING = Failure(boundary="node", code="", message="", retryable=False)
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


REFUSED = """
import os, sys, urllib.request
url, key = os.environ[sys.argv[1]] + sys.argv[2], os.environ["OPENAI_API_KEY"]
headers = {"Authorization": "Bearer " + key, "x-api-key": key, "x-goog-api-key": key}
headers["Content-Type"] = "application/json"
for _ in range(int(sys.argv[4])):
    try:
        urllib.request.urlopen(urllib.request.Request(url, sys.argv[3].encode(), headers)).read()
    except OSError as error:
        print(error)
"""
HELLO = '"messages": [{"role": "user", "content": "hello"}]'


CHAT, RESPONSES = ("OPENAI_BASE_URL", "/chat/completions"), ("OPENAI_BASE_URL", "/responses")


@pytest.mark.parametrize(
    ("base", "path", "body", "named"),
    [
        (*CHAT, '{"model": "m", "max_tokens": 99999999, %s}', "OpenAI Chat, 400: .*99999999"),
        (*CHAT, '{"model": "m", "max_tokens": "9", %s}', "OpenAI Chat, 400: max_tokens"),
        (*CHAT, '{"model": "m", "functions": [{"name": "f"}], %s}', "OpenAI Chat, 400: .*functions"),
        (*CHAT, '{"model": "m", %s', "OpenAI Chat, 400: .*JSON"),
        (*RESPONSES, '{"model": "m", "input": "x", "background": true}', "OpenAI Responses, 400: .*background"),
        ("ANTHROPIC_BASE_URL", "/v1/messages", '{"model": "m", %s}', "Anthropic Messages, 400: max_tokens"),
        (
            *("GOOGLE_GEMINI_BASE_URL", "/v1beta/models/m:generateContent"),
            '{"contents": "x", "cachedContent": "c"}',
            "Google generateContent, 400: .*cachedContent",
        ),
        ("OPENAI_BASE_URL", "/embeddings", '{"model": "m", "input": "x"}', "404: POST .*/embeddings is not served"),
    ],
)
async def test_an_agent_whose_every_call_was_refused_is_told_the_refusal(
    tmp_path: Path, base: str, path: str, body: str, named: str
) -> None:
    body = body % HELLO if "%s" in body else body
    prepared = {"backend": "process", "prepare": [{"type": "write", "path": "agent.py", "content": REFUSED}]}
    command = shlex.join(["python3", "agent.py", base, path, body, "2"])
    result = await ended(tmp_path, command, task={"runtime": prepared})
    assert (result.outcome, result.reward) == ("no_model_call", None)
    assert result.failure is not None
    assert re.search(named, result.failure.message)
    assert "(2 times)" in result.failure.message
    assert "base URL" not in result.failure.message


async def test_an_agent_that_gave_up_over_a_refusal_is_told_it(tmp_path: Path) -> None:
    prepared = {"backend": "process", "prepare": [{"type": "write", "path": "agent.py", "content": REFUSED}]}
    command = shlex.join(["python3", "agent.py", "OPENAI_BASE_URL", "/responses", "{}", "1"]) + "; exit 2"
    result = await ended(tmp_path, command, task={"runtime": prepared})
    assert result.outcome == "agent_error"
    assert (
        "its last requests to the model were refused: OpenAI Responses, 400: input"
        in (result.failure or NOTHING).message
    )


async def test_a_refusal_before_a_call_that_was_answered_is_forgotten(tmp_path: Path) -> None:
    written = [
        {"type": "write", "path": name, "content": text} for name, text in (("agent.py", CALL), ("no.py", REFUSED))
    ]
    command = f"python3 no.py OPENAI_BASE_URL /responses {{}} 1; {WORKS}; exit 2"
    result = await ended(tmp_path, command, task={"runtime": {"backend": "process", "prepare": written}})
    assert (result.outcome, len(result.completions)) == ("agent_error", 1)
    assert "refused" not in (result.failure or NOTHING).message


async def test_a_session_of_an_agent_elsewhere_names_its_refusal_too(tmp_path: Path) -> None:
    async with scripted_server({"default": {"text": "hi"}}) as url, running_node(tmp_path, url) as node:
        opened = await node.client.open_session()
        async with openai.AsyncOpenAI(
            base_url=opened.base_urls["openai"], api_key=opened.api_key, max_retries=0
        ) as client:
            for ask in (
                client.responses.create(model="m", input="x", conversation="conv_1"),
                client.models.retrieve("gpt"),
            ):
                with pytest.raises(openai.APIStatusError):
                    await ask
        result = await node.client.finalize(opened.session_id)
    assert result.outcome == "no_model_call"
    message = (result.failure or NOTHING).message
    assert "OpenAI Responses, 400: conversation" in message
    assert "OpenAI Chat, 404: the model 'gpt' does not exist" in message


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
