"""A node of the staging benchmark: the real one, with sandboxes whose stages only take time.

    python bench/staging_node.py staged|unstaged NODE_ID FOLDER SERVER_URL ENGINE_URL

`unstaged`: as many workers as the staged node has RUN slots, each of which takes a session from INIT to its evaluation
before it takes the next one. Prints its URL when it is ready, and serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

from no_runtime import NoHandle, NoRuntime
from node_process import run_node

from gangline.domain.sandbox import ExecRequest, ExecResult, OutputSink, RuntimeStart, Sandbox
from gangline.node import node
from gangline.node.sessions.stages import PoolSizes
from gangline.settings import plugins
from gangline.settings.node import NodeSettings

RUN_SLOTS = 8
AGENT, GRADER = "work", "grade"
"""What harness and evaluator run."""

MEAN_INIT_S, MEAN_RUN_S, MEAN_GRADE_S = 0.6, 1.6, 0.8
LONGEST_RUN_S = 8.0


class Times(NamedTuple):
    """What the stages of one session take, seconds."""

    init_s: float
    run_s: float
    grade_s: float


def times_of(session_id: str) -> Times:
    """Drawn by the session's id, the same wherever it runs. RUN's median is two thirds of its mean."""
    chance = random.Random(session_id)
    run_s = min(chance.lognormvariate(0, 1) * MEAN_RUN_S / 1.55, LONGEST_RUN_S)
    return Times(MEAN_INIT_S * chance.uniform(0.5, 1.5), run_s, MEAN_GRADE_S * chance.uniform(0.25, 1.75))


class OneWorkerEach(PoolSizes):
    """No session is taken before another one has gone."""

    @property
    def capacity(self) -> int:
        return self.run_slots


STAGED: dict[str, Any] = {
    "init_workers": 6,
    "ready_slots": 8,
    "run_slots": RUN_SLOTS,
    "prewarm_workers": 6,
    "postrun_workers": 8,
}
UNSTAGED: dict[str, Any] = {
    "init_workers": RUN_SLOTS,
    "ready_slots": 0,
    "run_slots": RUN_SLOTS,
    "prewarm_workers": 0,
    "postrun_workers": RUN_SLOTS,
}


class TimedRuntime(NoRuntime):
    """Starting takes INIT's time; the agent's and the grader's command take theirs."""

    async def start(self, start: RuntimeStart) -> Sandbox:
        times = times_of(start.runtime_id.rsplit(".", 2)[0])
        await asyncio.sleep(times.init_s)
        return _TimedHandle(start.runtime_id, times)


class _TimedHandle(NoHandle):
    def __init__(self, runtime_id: str, times: Times) -> None:
        super().__init__(runtime_id)
        self._takes_s = {AGENT: times.run_s, GRADER: times.grade_s}

    async def run(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        command = request.command
        await asyncio.sleep(self._takes_s.get(command, 0.0) if isinstance(command, str) else 0.0)
        return await super().run(request, on_output)

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        return b"1" if Path(path).name == "reward.txt" else await super().download(path)


if __name__ == "__main__":
    kind, node_id, folder, server_url, engine_url = sys.argv[1:]
    plugins.make_runtime = lambda name: TimedRuntime()
    if kind == "unstaged":
        node.PoolSizes = OneWorkerEach
    settings = NodeSettings(engines=(engine_url,), **(UNSTAGED if kind == "unstaged" else STAGED))
    run_node(settings, node_id=node_id, folder=Path(folder), server_url=server_url)
