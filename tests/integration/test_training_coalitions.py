"""Coalitions at a real server and node: a program of two players, one of whom does all the work."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import InvalidGroup
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.train.collecting.collector import PlainCollector
from gangline.train.collecting.side_rollouts.coalition_runs import CoalitionRuns
from gangline.train.collecting.side_rollouts.coalitions import CoalitionSettings
from gangline.train.collecting.side_rollouts.tasks import Beside
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.credit.coalitions import asked_coalitions, group_shapley, player_factors
from gangline.train.learning.samples import make_samples
from gangline.wire.client.server import ServerClient
from support.node.node import TOKEN, running_node

SETTINGS = CoalitionSettings(players=("worker", "idler"), samples=2)

# The worker is right in every second session of a task. Absent, it is replaced by a player that knows nothing.
AGENT = """
import json, os, sys, urllib.request

def ask(role, text):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    headers = {
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "Content-Type": "application/json",
        "x-gangline-role": role,
    }
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]

present = os.environ.get("GANGLINE_COALITION", "worker,idler").split(",")
if "idler" in present or "deaf" in sys.argv:
    ask("idler", "Say something.")
if "worker" in present:
    ask("worker", "Solve it: " + sys.argv[1])
"""

GRADE = """
import json
from pathlib import Path

traces = json.loads(Path(".gangline/trajectory.json").read_text())["traces"]
said = [one["response_messages"][0]["content"] for one in traces if one["agent_roles"] == ["worker"]]
Path("reward.json").write_text(json.dumps({"reward": float(said == ["42"])}))
"""

SCRIPT = {"rules": [{"pattern": r"Solve it: .*[02468]$", "text": "42"}], "default": {"text": "I do not know."}}


def task(*arguments: str) -> dict[str, Any]:
    return {
        "task_id": "t0",
        "instruction": "solve it",
        "num_samples": 2,
        "timeout_seconds": 60,
        "runtime": {
            "backend": "process",
            "prepare": [{"type": "write", "path": "agent.py", "content": AGENT}],
        },
        "agent": {
            "harness": "shell",
            "settings": {"command": [sys.executable, "agent.py", "{session_id}", *arguments]},
        },
        "evaluator": {
            "strategy": "script",
            "config": {"command": [sys.executable, "grade.py"], "files": {"grade.py": GRADE}},
        },
    }


@asynccontextmanager
async def collecting(folder: Path, *arguments: str) -> AsyncGenerator[PlainCollector]:
    async with (
        scripted_server(SCRIPT) as engine,
        serving(data_dir=folder / "server", control_token=TOKEN) as server,
        running_node(folder / "node", engine, server_url=server.url),
        ServerClient(server.url, TOKEN) as client,
    ):
        runs = CoalitionRuns(client, SETTINGS, lambda task_id: asked_coalitions(task_id, SETTINGS))
        async with PlainCollector(client, repeat(task(*arguments), 1), beside=Beside(coalitions=runs)) as collector:
            yield collector


async def test_the_player_that_does_all_the_work_gets_all_the_credit(tmp_path: Path) -> None:
    async with collecting(tmp_path) as collector:
        (group,) = await collector.collect(1)
    assert group.rewards == (1.0, 0.0)
    assert group_shapley(group, SETTINGS) == {"worker": 0.5, "idler": 0.0}
    roles = {
        trace.trace_id: trace.spans[0].agent_role
        for one in group.sessions
        if one.trajectory is not None
        for trace in one.trajectory.traces
    }
    samples = make_samples(group, algorithm("grpo"), factors=player_factors(group, SETTINGS))
    found = {(roles[one.trace_id], one.session_id): one.advantages[0] for one in samples}
    credits = {role: sorted(round(one, 3) for (of, _), one in found.items() if of == role) for role in SETTINGS.players}
    assert credits == {"worker": [-2.0, 2.0], "idler": [0.0, 0.0]}


async def test_a_program_that_does_not_read_its_coalition_is_found_out(tmp_path: Path) -> None:
    async with collecting(tmp_path, "deaf") as collector:
        with pytest.raises(InvalidGroup, match=r"t0\.coalition1 have calls of players that take no part.*: idler"):
            await collector.collect(1)
