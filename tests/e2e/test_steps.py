"""A task with steps through a real service: its agent is run and graded twice, and it can be neither forked nor graded
again."""

from __future__ import annotations

from typing import Any

import pytest

from gangline.domain.errors import Conflict, InvalidRequest
from gangline.wire.client.server import ServerClient
from support.service.cli_process import Start, gangline

SCRIPT: dict[str, Any] = {
    "rules": [
        {"pattern": "write it", "turn": 0, "tool_calls": [{"run": "echo one > dog.txt"}]},
        {"pattern": "read it", "turn": 0, "tool_calls": [{"run": "cat dog.txt > cat.txt"}]},
        {"turn": 1, "text": "Done."},
    ]
}


def step(name: str, instruction: str, wanted: str) -> dict[str, Any]:
    config = {"command": f"grep -q one {wanted}; echo $((1 - $?)) > reward.txt"}
    return {"name": name, "instruction": instruction, "evaluator": {"strategy": "script", "config": config}}


async def test_a_service_runs_the_steps_of_a_task(start: Start) -> None:
    up = start(script=SCRIPT)
    assert up.ready()
    running = up.running()
    task: dict[str, Any] = {
        "task_id": "steps",
        "instruction": "write and read",
        "runtime": {"backend": "process"},
        "agent": {"harness": "native", "settings": {"tools": ["shell"]}},
        "steps": [step("write", "write it", "dog.txt"), step("read", "read it", "cat.txt")],
    }
    async with ServerClient(running["server_url"], running["control_token"]) as client:
        await client.submit(task)
        await client.wait("steps", timeout_s=120)
        (result,) = await client.result("steps")
        assert (result.outcome, result.failure, result.reward) == ("completed", None, 1.0)
        told = [(one["name"], one["num_completions"]) for one in result.reward_details["steps"]]
        assert told == [("write", 2), ("read", 2)]
        assert result.trajectory is not None
        assert [span.score for trace in result.trajectory.traces for span in trace.spans] == [None, 1.0] * 2
        shown = gangline("show", result.session_id, "--data", up.data)
        assert shown.returncode == 0, shown.stderr
        with pytest.raises(Conflict, match="not forkable, because its task has steps"):
            await client.fork(result.session_id, 1)
        with pytest.raises(Conflict, match="had steps, which cannot be graded again"):
            await client.regrade(result.session_id)
        with pytest.raises(InvalidRequest, match=r"a task with steps cannot have .*begins anew where its node is lost"):
            await client.submit({**task, "task_id": "durable", "capture": {"durable": "turn"}})
        unsafe = [task["steps"][0] | {"evaluator": {"strategy": "math", "config": {"answer": "1"}}}, task["steps"][1]]
        with pytest.raises(InvalidRequest, match=r"steps\.0 \(write\): evaluator 'math'"):
            await client.submit({**task, "task_id": "unsafe", "steps": unsafe})
