"""Sessions in containers, from submit to rows: exact contexts, and nothing left of the container or the agent."""

from __future__ import annotations

import os
import textwrap
import uuid
from pathlib import Path
from typing import Any

import pytest

from containers.engines import IMAGE
from containers.test_container_images import engine
from gangline.domain.session import SessionResult
from gangline.rows.audit import audit
from gangline.wire.client.server import ServerClient
from support.service.cli_process import UpProcess, processes_with

AGENT = textwrap.dedent("""
    import json, os, sys, urllib.request
    messages = []
    for say in ("one", "two", "three"):
        messages.append({"role": "user", "content": say})
        body = json.dumps({"model": os.environ["GANGLINE_MODEL"], "messages": messages, "max_tokens": 16}).encode()
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
            "Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
        with urllib.request.urlopen(request) as reply:
            messages.append(json.load(reply)["choices"][0]["message"])
    open("answer.txt", "w").write(messages[-1]["content"])
""")
GRADER = """
import json, pathlib
text = pathlib.Path("answer.txt").read_text()
pathlib.Path("reward.json").write_text(json.dumps({"reward": float(text == "as you wish")}))
"""


def task(name: str, command: str, **changes: Any) -> dict[str, Any]:
    return {
        "instruction": "whatever",
        "max_attempts": 1,
        "runtime": {
            "backend": name,
            "image": IMAGE,
            "prepare": [{"type": "write", "path": "agent.py", "content": AGENT}],
        },
        "agent": {"harness": "shell", "settings": {"command": command}},
        "evaluator": {
            "strategy": "script",
            "config": {"command": ["python3", "grade.py"], "files": {"grade.py": GRADER}, "collect": ["answer.txt"]},
        },
        **changes,
    }


def service(folder: Path, *options: str) -> UpProcess:
    return UpProcess(
        folder, *options, env={name: value for name, value in os.environ.items() if name == "GANGLINE_DOCKER"}
    )


async def run(up: UpProcess, request: dict[str, Any]) -> list[SessionResult]:
    assert up.ready(), "the service did not start"
    running = up.running()
    async with ServerClient(running["server_url"], running["control_token"]) as client:
        submitted = await client.submit(request)
        await client.wait(submitted.task_id, timeout_s=120)
        return await client.result(submitted.task_id)


@pytest.mark.parametrize("refresh", [False, True])
async def test_sessions_complete_with_exact_contexts_and_leave_nothing(
    container_runtime: str, tmp_path: Path, refresh: bool
) -> None:
    request = task(container_runtime, "python3 agent.py", num_samples=2)
    if refresh:  # the grader's clean container has no answer of the agent's but what was collected
        request["evaluator"]["refresh_runtime"] = True
    up = service(tmp_path)
    try:
        results = await run(up, request)
    finally:
        up.close()
    assert len(results) == 2
    for result in results:
        assert (result.outcome, result.reward, result.failure) == ("completed", 1.0, None)
        assert result.trajectory is not None
        (trace,) = result.trajectory.traces
        assert [certificate.context for certificate in trace.certificates] == ["first", "exact", "exact"]
        assert audit(result.trajectory, result.completions).ok
    assert engine(container_runtime, "ps", "--all", "--quiet") == ""


async def test_a_spent_budget_leaves_nothing_of_the_agent(container_runtime: str, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    agent = {
        "harness": "shell",
        "settings": {"command": "python3 agent.py; setsid sleep 600 & sleep 600"},
        "env": {"MARK": mark},
    }
    up = service(tmp_path)
    try:
        (result,) = await run(up, task(container_runtime, "", agent=agent, timeout_seconds=6))
        assert processes_with(mark) == {}
    finally:
        up.close()
    assert (result.outcome, result.reward) == ("agent_timeout", 1.0)
    assert [completion.status for completion in result.completions] == ["complete"] * 3
    assert engine(container_runtime, "ps", "--all", "--quiet") == ""
