"""An agent that gives up on a call is not blamed where its engine had stopped answering, and is where it was well."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gangline.node.sessions.attempt import Attempt
from support.node.attempt import lease_of, node_parts

ENGINE = """
import asyncio
from gangline.serving.scripted.server import scripted_server

async def main():
    async with scripted_server({"default": {"text": "a b c", "token_delay_s": 60}}) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
CALL = """curl -sf -m 2 -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \\
  -d '{"model": "m", "messages": [{"role": "user", "content": "hi"}]}' "$OPENAI_BASE_URL/chat/completions"
"""


@asynccontextmanager
async def slow_engine() -> AsyncGenerator[tuple[Process, str]]:
    """Its own process. Its health checks are answered at once, its calls after a minute."""
    engine = await asyncio.create_subprocess_exec(sys.executable, "-c", ENGINE, stdout=PIPE)
    try:
        assert engine.stdout is not None
        yield engine, (await engine.stdout.readline()).decode().strip()
    finally:
        engine.send_signal(signal.SIGCONT)
        engine.kill()
        await engine.communicate()


def task_of(command: str, **fields: Any) -> dict[str, Any]:
    agent = {"harness": "shell", "settings": {"command": command}}
    return {"agent": agent, "evaluator": {"strategy": "session_completed"}, **fields}


@pytest.mark.parametrize("end", ["", " || true", "; sleep 60"], ids=["fails", "ends well", "runs out of time"])
async def test_an_agent_that_gives_up_on_a_frozen_engine_is_retried_without_blame(tmp_path: Path, end: str) -> None:
    async with slow_engine() as (engine, url), node_parts(tmp_path, engine_url=url) as parts:
        engine.send_signal(signal.SIGSTOP)
        result = await Attempt(lease_of(**task_of(CALL.rstrip() + end, timeout_seconds=4)), parts).live()
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.code) == ("engine", "engine_unavailable")
    assert result.failure.retryable
    assert url in result.failure.message


async def test_an_agent_that_gives_up_on_an_engine_that_was_frozen_meanwhile_is_not_blamed(tmp_path: Path) -> None:
    async with slow_engine() as (engine, url), node_parts(tmp_path, engine_url=url) as parts:
        engine.send_signal(signal.SIGSTOP)
        living = asyncio.create_task(Attempt(lease_of(**task_of(CALL.replace("-m 2", "-m 9"))), parts).live())
        async with asyncio.timeout(30):
            while parts.backends.policy.views()[0].num_calls == 0:
                await asyncio.sleep(0.02)
        await parts.backends.policy.check()
        engine.send_signal(signal.SIGCONT)
        await parts.backends.policy.check()
        assert parts.backends.policy.views()[0].state == "healthy"
        result = await living
    assert (result.outcome, result.failure and result.failure.code) == ("infra_error", "engine_unavailable")


async def test_an_agent_that_gives_up_on_a_healthy_engine_has_failed_itself(tmp_path: Path) -> None:
    async with slow_engine() as (_, url), node_parts(tmp_path, engine_url=url) as parts:
        result = await Attempt(lease_of(**task_of(CALL)), parts).live()
    assert (result.outcome, result.reward) == ("agent_error", 0.0)
    assert result.failure is not None
    assert result.failure.boundary == "harness"


@pytest.mark.parametrize("end", ["", " || true"], ids=["fails", "ends well"])
@pytest.mark.parametrize("fault", [{"status": 500}, {"drop_connection": 0}, {"garbage": True}], ids=str)
async def test_an_agent_whose_last_call_failed_through_its_engine_is_not_blamed(
    tmp_path: Path, fault: dict[str, Any], end: str
) -> None:
    script = {"rules": [{"pattern": "unwell", "text": "hi", "faults": {**fault, "times": None}}]}
    call = CALL.rstrip().replace('"hi"', '"unwell"').replace("-m 2", "-m 20")
    async with node_parts(tmp_path, script=script) as parts:
        result = await Attempt(lease_of(**task_of(call + end)), parts).live()
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.retryable) == ("engine", True)
