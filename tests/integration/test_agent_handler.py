"""A handler of ProRL Agent's shape in the stages of a session: its calls are captured, a failure is its stage's."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gangline.domain.errors import InvalidRequest, NodeError, UnknownPlugin
from gangline.domain.session import SessionResult
from gangline.interop.handlers import AgentHandler, jobs
from gangline.node.sessions.attempt import Attempt
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.settings import plugins
from support.node.attempt import lease_of, node_parts
from support.node.handlers import install_handlers
from support.node.node import TOKEN, running_node
from support.service.papers import listing

INSTANCE: dict[str, Any] = {
    "data_source": "ported-math",
    "instance_id": "sum-1",
    "prompt": [{"role": "user", "content": "What is 40 + 2?"}],
    "reward_model": {"style": "rule", "ground_truth": "42"},
}
SCRIPT: dict[str, Any] = {
    "rules": [
        {"turn": 0, "pattern": "40", "text": "cat problem.txt; expr 40 + 2"},
        {"turn": 1, "pattern": "40 . 2.42", "text": "It is \\boxed{42}."},
        {"pattern": ".", "text": "hi"},
    ]
}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_handlers(tmp_path / "site", monkeypatch)


def test_the_interface_is_the_printed_one() -> None:
    printed = {
        name: [argument.strip() for argument in arguments.split(",")]
        for name, arguments in re.findall(r"def (\w+)\(([^)]*)\)", listing("000-listing-1.txt"))
    }
    ours = {name: list(inspect.signature(getattr(AgentHandler, name)).parameters) for name in printed}
    assert ours == printed
    coroutines = re.findall(r"async def (\w+)", listing("000-listing-1.txt"))
    assert [name for name in printed if inspect.iscoroutinefunction(getattr(AgentHandler, name))] == coroutines
    assert AgentHandler.__abstractmethods__ == set(coroutines)


async def lived(folder: Path, *, max_turns: int = 5, script: dict[str, Any] = SCRIPT, **changes: Any) -> SessionResult:
    settings = {"handler": "ported-math", "instance": INSTANCE | changes}
    lease = lease_of(
        agent={"harness": "handler", "settings": settings, "max_turns": max_turns},
        evaluator={"strategy": "handler"},
        timeout_seconds=changes.pop("timeout_seconds", 60),
    )
    async with node_parts(folder, script=script) as parts, asyncio.timeout(60):
        return await Attempt(lease, parts).live()


async def test_its_methods_are_the_stages_and_its_calls_are_the_sessions(tmp_path: Path) -> None:
    result = await lived(tmp_path / "node")
    assert (result.outcome, result.reward, result.failure) == ("completed", 1.0, None)
    assert [timing.stage for timing in result.timings] == ["init", "ready", "run", "postrun"]
    assert result.trajectory is not None
    assert len(result.completions) == 2
    (trace,) = result.trajectory.traces
    assert [span.completion_id for span in trace.spans] == [one.completion_id for one in result.completions]
    final = json.loads(result.artifacts["handler.json"])
    assert (final["instance_id"], final["finish"], final["resolved"]) == ("sum-1", True, True)
    assert final["messages"][2]["content"] == "What is 40 + 2?42\n"
    assert result.reward_details == final


async def test_a_wrong_answer_earns_nothing(tmp_path: Path) -> None:
    result = await lived(tmp_path / "node", reward_model={"ground_truth": "43"})
    assert (result.outcome, result.reward) == ("completed", 0.0)


async def test_a_failed_init_is_a_failed_preparation_with_the_callbacks_result(tmp_path: Path) -> None:
    result = await lived(tmp_path / "node", fail="init")
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert (result.failure.code, result.failure.retryable) == ("prepare_failed", True)
    assert "ValueError: planted in init" in result.failure.message
    assert '"critical_error":"init"' in result.failure.message


async def test_a_failed_run_is_the_agents_and_the_callbacks_result_is_graded(tmp_path: Path) -> None:
    result = await lived(tmp_path / "node", fail="run")
    assert (result.outcome, result.reward, len(result.completions)) == ("agent_error", 0.0, 1)
    assert result.failure is not None
    assert "ValueError: planted in run" in result.failure.message
    assert json.loads(result.artifacts["harness.stdout"])["critical_error"] == "run"
    assert json.loads(result.artifacts["handler.json"])["messages"] == []


async def test_a_failed_eval_gives_no_reward(tmp_path: Path) -> None:
    result = await lived(tmp_path / "node", fail="eval")
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert (result.failure.boundary, "planted in eval" in result.failure.message) == ("evaluator", True)
    assert json.loads(result.artifacts["handler.json"])["critical_error"] == "eval"


async def test_a_time_limit_is_the_results_timeout(tmp_path: Path) -> None:
    hanging = {"rules": [{"pattern": "40", "text": "sleep 600"}, {"pattern": ".", "text": "hi"}]}
    result = await lived(tmp_path / "node", script=hanging, timeout_seconds=1.0)
    assert (result.outcome, result.reward) == ("agent_timeout", 0.0)
    assert json.loads(result.artifacts["handler.json"])["critical_error"] == "timeout"


def test_a_handler_is_named_never_imported_by_a_path() -> None:
    for name in ("support.node.handlers:PortedMathHandler", "nobody"):
        with pytest.raises(InvalidRequest, match="unknown handler"):
            plugins.make_harness("handler", {"handler": name})
    with pytest.raises(UnknownPlugin):
        plugins.load("handler", "nobody")


async def test_a_job_is_gone_with_its_session_and_with_its_node(tmp_path: Path) -> None:
    await lived(tmp_path / "node")
    assert list(jobs._JOBS) == []
    with pytest.raises(NodeError) as caught:
        jobs.job_of("s1")
    assert caught.value.retryable, "the session is tried again"


async def test_a_trainer_names_it_as_the_data_source(tmp_path: Path) -> None:
    async with (
        scripted_server(SCRIPT) as engine,
        serving(data_dir=tmp_path / "server", control_token=TOKEN) as server,
        running_node(tmp_path / "node", engine, server_url=server.url),
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
    ):
        job = {"instance": INSTANCE, "sampling_params": {"max_iterations": 5}}
        async with http.post(f"{server.url}/process", json=job) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
    assert (answer["resolved"], answer["reward"], answer["instance_id"]) == (True, 1.0, "sum-1")
    assert answer["report"]["finish"] is True
    assert [message["role"] for message in answer["messages"]] == ["user", "assistant", "user", "assistant"]
    assert all(message["output_ids"] for message in answer["messages"] if message["role"] == "assistant")
