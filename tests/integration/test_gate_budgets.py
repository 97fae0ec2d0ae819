"""RUN's budget stands still while the gate holds the session, and no longer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from gangline.domain.session import Lease, SessionResult
from gangline.node.backends.gate import Gate
from gangline.node.sessions.attempt import Attempt
from gangline.node.sessions.parts import NodeParts
from support.node.attempt import lease_of, node_parts

AGENT = """
import json, os, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def _lease(command: str, budget_s: float) -> Lease:
    return lease_of(
        timeout_seconds=budget_s,
        runtime={"backend": "process", "prepare": [{"type": "write", "path": "agent.py", "content": AGENT}]},
        agent={"harness": "shell", "settings": {"command": command}},
    )


async def _held(gate: Gate, parts: NodeParts, at_least_s: float) -> None:
    """Until the gate has held the session's call for so long."""
    while gate.state.num_waiting == 0:
        await asyncio.sleep(0.01)
    meter = parts.proxy._sessions["s1"].meter
    while meter.held_s < at_least_s:
        await asyncio.sleep(0.01)


async def test_a_held_session_outlives_its_budget_and_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    gate, budget_s = Gate(), 3.0
    async with node_parts(tmp_path, gate=gate) as parts, asyncio.timeout(60):
        await gate.pause("drain", 600)
        living = asyncio.create_task(Attempt(_lease("python3 agent.py", budget_s), parts).live())
        await _held(gate, parts, budget_s * 1.2)
        assert not living.done()
        gate.set_version(9)
        gate.resume()
        result: SessionResult = await living
    assert (result.outcome, result.harness_exit and result.harness_exit.exit_code) == ("completed", 0)
    (completion,) = result.completions
    assert completion.status == "complete"


async def test_what_is_not_spent_at_the_gate_still_ends_with_the_budget(tmp_path: Path) -> None:
    gate = Gate()
    async with node_parts(tmp_path, gate=gate) as parts, asyncio.timeout(60):
        await gate.pause("keep", 600)
        living = asyncio.create_task(Attempt(_lease("echo begun; python3 agent.py; sleep 600", 5.0), parts).live())
        await _held(gate, parts, 0.1)
        gate.resume()
        result = await living
    assert result.outcome == "agent_timeout"
    assert result.harness_exit is not None
    assert result.harness_exit.timed_out
    assert result.artifacts["harness.stdout"] == b"begun\nhi\n"
    assert [completion.status for completion in result.completions] == ["complete"]


@pytest.mark.parametrize("override", [0.25])
async def test_the_sampling_policies_of_task_and_node_reach_the_engine(tmp_path: Path, override: float) -> None:
    gate = Gate()
    async with node_parts(tmp_path, gate=gate) as parts, asyncio.timeout(60):
        lease = _lease("python3 agent.py", 30.0)
        task = lease.task | {"capture": {"sampling": {"temperature": {"override": override}}}}
        result = await Attempt(msgspec.structs.replace(lease, task=task), parts).live()
    assert result.completions[0].certificate.sampling.temperature == override
    assert result.completions[0].metadata["sampling_wished"]["temperature"] is None
