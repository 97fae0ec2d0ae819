"""Sessions as their submitters meet them: every outcome, through server, node, sandbox, proxy and a scripted engine."""

from __future__ import annotations

import textwrap
import uuid
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest

from gangline.domain.session import SessionResult
from gangline.rows.audit import audit
from gangline.rows.rows import rows_of
from gangline.wire.client.server import ServerClient
from support.requirements import need_command
from support.service.cli_process import GIVE_UP_S, UpProcess, processes_with, wait_for

SCRIPT: dict[str, Any] = {
    "rules": [
        {"pattern": "hang", "text": "too late", "delay_s": 600},
        {"pattern": "break", "faults": {"status": 500, "times": None}},
        {"pattern": "slowly", "text": "slow and steady", "delay_s": 0.4},
    ],
    "default": {"text": "as you wish"},
}

# usage: agent.py SAY...    one call each, in one conversation
AGENT = textwrap.dedent("""
    import json, os, sys, urllib.request
    messages = []
    for say in sys.argv[1:]:
        messages.append({"role": "user", "content": say})
        body = json.dumps({"model": os.environ["GANGLINE_MODEL"], "messages": messages, "max_tokens": 16}).encode()
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
            "Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
        with urllib.request.urlopen(request) as reply:
            messages.append(json.load(reply)["choices"][0]["message"])
    print(messages[-1]["content"])
""")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Generator[UpProcess]:
    need_command("bwrap", "apt-get install bubblewrap")
    service = UpProcess(tmp_path_factory.mktemp("sessions"), script=SCRIPT)
    try:
        assert service.ready(), "the service did not start"
        yield service
    finally:
        service.close()


@pytest.fixture
async def client(up: UpProcess) -> AsyncGenerator[ServerClient]:
    running = up.running()
    async with ServerClient(running["server_url"], running["control_token"]) as client:
        yield client


def task(command: str, **changes: Any) -> dict[str, Any]:
    return {
        "instruction": "whatever",
        "max_attempts": 1,
        "runtime": {"prepare": [{"type": "write", "path": "agent.py", "content": AGENT}]},
        "agent": {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True},
        **changes,
    }


async def run(client: ServerClient, request: dict[str, Any]) -> SessionResult:
    """Submit a task of one session and return its result."""
    submitted = await client.submit(request)
    await client.wait(submitted.task_id, timeout_s=GIVE_UP_S)
    (result,) = await client.result(submitted.task_id)
    return result


async def test_a_conversation_of_three_turns_is_one_row_of_exact_contexts(client: ServerClient) -> None:
    result = await run(client, task("python3 agent.py one two three"))
    assert (result.outcome, result.reward, result.failure) == ("completed", 1.0, None)
    assert result.artifacts["harness.stdout"] == b"as you wish\n"
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    assert [certificate.context for certificate in trace.certificates] == ["first", "exact", "exact"]
    assert trace.loss_mask.sum() == sum(len(completion.sampled_ids) for completion in result.completions)
    assert trace.reward == 1.0
    assert audit(result.trajectory, result.completions).ok
    assert [timing.stage for timing in result.timings] == ["init", "ready", "run", "postrun"]


async def test_a_spent_budget_kills_the_whole_tree_and_keeps_what_was_sampled(client: ServerClient) -> None:
    mark = uuid.uuid4().hex
    command = f"python3 agent.py one two; setsid sleep 600 & MARK={mark} sleep 600"
    agent = {"harness": "shell", "settings": {"command": command}, "env": {"MARK": mark}}
    result = await run(client, task("", agent=agent, timeout_seconds=6))
    assert (result.outcome, result.reward) == ("agent_timeout", 0.0)
    assert result.harness_exit is not None
    assert result.harness_exit.timed_out
    assert [completion.status for completion in result.completions] == ["complete", "complete"]
    assert result.trajectory is not None
    assert result.trajectory.traces[0].loss_mask.any()
    assert processes_with(mark) == {}


async def test_a_call_in_flight_at_the_end_is_kept_as_aborted_and_never_trained_on(client: ServerClient) -> None:
    result = await run(client, task("python3 agent.py one hang", timeout_seconds=6))
    assert result.outcome == "agent_timeout"
    assert [completion.status for completion in result.completions] == ["complete", "aborted"]
    assert result.trajectory is not None
    assert audit(result.trajectory, result.completions).ok
    trained = sum(int(trace.loss_mask.sum()) for trace in result.trajectory.traces)
    assert trained == len(result.completions[0].sampled_ids)


async def test_the_call_beyond_the_turn_limit_ends_the_session(client: ServerClient) -> None:
    request = task("python3 agent.py one two three four || sleep 600")
    request["agent"]["max_turns"] = 2
    result = await run(client, request)
    assert (result.outcome, len(result.completions)) == ("turn_limit", 2)


async def test_the_call_beyond_the_token_limit_ends_the_session(client: ServerClient) -> None:
    request = task("echo begins; python3 agent.py one two three four || sleep 600")
    request["agent"]["max_sampled_tokens"] = 1
    result = await run(client, request)
    assert (result.outcome, len(result.completions)) == ("token_limit", 1)
    assert result.artifacts["harness.stdout"].startswith(b"begins")


async def test_an_agent_that_goes_round_in_circles_ends_as_a_loop_and_keeps_its_rows(client: ServerClient) -> None:
    request = task("echo begins; python3 agent.py again again again again again || sleep 600", max_attempts=3)
    request["agent"]["max_repeated_actions"] = 3
    result = await run(client, request)
    assert (result.outcome, result.failure, result.attempt, len(result.completions)) == ("agent_loop", None, 1, 3)
    assert result.reward == 0.0
    assert result.artifacts["harness.stdout"].startswith(b"begins")
    (row,) = rows_of(result)
    assert (row.outcome, row.loss_mask.any()) == ("agent_loop", True)


async def test_an_agent_that_fails_is_scored_and_not_tried_again(client: ServerClient) -> None:
    result = await run(client, task("python3 agent.py one; exit 3", max_attempts=5))
    assert (result.outcome, result.reward, result.attempt) == ("agent_error", 0.0, 1)
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.retryable) == ("harness", False)


async def test_an_engine_that_fails_is_our_fault_tried_again_and_never_scored(client: ServerClient) -> None:
    result = await run(client, task("python3 agent.py one break", max_attempts=2))
    assert (result.outcome, result.reward, result.attempt) == ("infra_error", None, 2)
    assert result.failure is not None
    assert result.failure.boundary == "engine"
    assert [completion.status for completion in result.completions] == ["complete"], "what worked is kept"


async def test_a_grader_that_breaks_gives_no_reward_and_keeps_the_rows(client: ServerClient) -> None:
    evaluator = {"strategy": "script", "refresh_runtime": True, "config": {"command": "exit 7"}}
    result = await run(client, task("python3 agent.py one", evaluator=evaluator))
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert result.failure.boundary == "evaluator"
    assert result.trajectory is not None
    assert result.trajectory.traces[0].reward is None


async def test_a_grader_sees_nothing_that_the_agent_left(client: ServerClient) -> None:
    config = {"command": "test ! -e planted && echo 0.75 > reward.txt", "reward_file": "reward.txt"}
    evaluator = {"strategy": "script", "refresh_runtime": True, "config": config}
    result = await run(client, task("touch planted; python3 agent.py one", evaluator=evaluator))
    assert (result.outcome, result.reward) == ("completed", 0.75)


async def test_a_prepare_action_that_fails_is_told_with_what_it_said(client: ServerClient) -> None:
    prepare = [{"type": "exec", "command": "echo no such thing >&2; exit 4"}]
    result = await run(client, task("true", runtime={"prepare": prepare}))
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert result.failure.boundary == "runtime"
    assert "no such thing" in result.failure.message


async def test_an_agent_that_never_calls_its_model_is_scored_without_rows(client: ServerClient) -> None:
    result = await run(client, task("true"))
    assert (result.outcome, result.reward) == ("completed", 1.0)
    assert result.trajectory is not None
    assert result.trajectory.traces == ()


async def test_cancelling_a_running_task_kills_its_agents(client: ServerClient) -> None:
    mark = uuid.uuid4().hex
    request = task(f"sleep 600; : {mark}", num_samples=3)
    submitted = await client.submit(request)
    async for event in client.events(after=0, task_id=submitted.task_id):
        if event.kind == "session.stage" and event.data.get("stage") == "run":
            break
    wait_for(lambda: processes_with(mark))  # the stage begins before its command
    view = await client.cancel(submitted.task_id)
    assert view.outcomes == {"cancelled": 3}
    wait_for(lambda: not processes_with(mark))


async def test_two_groups_of_eight_run_at_the_same_time(client: ServerClient) -> None:
    submitted = [await client.submit(task("python3 agent.py slowly slowly", num_samples=8)) for _ in range(2)]
    results: list[SessionResult] = []
    for one in submitted:
        await client.wait(one.task_id, timeout_s=GIVE_UP_S)
        results += await client.result(one.task_id)
    runs = [
        (timing.started_at, timing.ended_at) for result in results for timing in result.timings if timing.stage == "run"
    ]
    most = max(sum(start <= at < end for start, end in runs) for at, _ in runs)
    assert most > 8, "sessions of both groups were in RUN at once"


async def test_a_harness_that_is_unknown_is_refused_with_the_nearest_name(client: ServerClient) -> None:
    from gangline.domain.errors import UnknownPlugin

    with pytest.raises(UnknownPlugin, match="Did you mean 'shell'"):
        await client.submit(task("true", agent={"harness": "shel"}))
