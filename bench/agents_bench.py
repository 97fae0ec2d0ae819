"""What an agent in the node (harness `native`) costs: the whole service as processes, real sandboxes, a scripted model.

- `agents.turn_overhead_ms`: from the end of one model call, as the node records it, to the begin of the next: the
  answer's way to the agent, one command in the session's shell, and the next request's way to the node.
- `agents.sessions_per_s_per_core`: sessions of three tool calls (a command, a file written, a file read), over the
  processor time of the service and of their sandboxes, which is all but the engine's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.session import SessionResult
from gangline.settings.plugins import make_runtime
from gangline.wire.client.server import ServerClient

RUNTIME = "sandbox"
NUM_TURNS = 40
NUM_LONG_SESSIONS = 5
NUM_SESSIONS = 48
NUM_AT_ONCE = 4
TIMEOUT_S = 300.0

TURNS, SESSIONS = "turns", "three calls"
"""Instructions, by which the script tells tasks apart."""
TRUE: dict[str, Any] = {"pattern": f"^{TURNS}$", "where": "any", "tool_calls": [{"run": "true"}]}
CALLS: list[dict[str, Any]] = [
    {"run": "ls"},
    {"write": {"path": "hello.txt", "content": "hello, sled\n"}},
    {"read": "hello.txt"},
]
SCRIPT: dict[str, Any] = {
    "context_length": 1_000_000,
    "rules": [
        {"pattern": f"^{TURNS}$", "where": "any", "turn": NUM_TURNS, "text": "done"},
        TRUE,
        *({"turn": turn, "tool_calls": [call]} for turn, call in enumerate(CALLS)),
    ],
    "default": {"text": "done"},
}

Figures = dict[str, dict[str, Any]]


class Service:
    """A running `gangline up`."""

    def __init__(self, running: dict[str, Any]) -> None:
        self.server_url: str = running["server_url"]
        self.token: str = running["control_token"]
        self._pid: int = running["pid"]
        self._engine_pids: set[int] = {pid for name, pid in running["pids"].items() if "engine" in name}

    def cpu_s(self) -> float:
        """Processor time of its processes so far, user and system, without the engine and without sandboxes."""
        return sum(map(_cpu_s, _descendants(self._pid) - self._engine_pids))


def _descendants(pid: int) -> set[int]:
    """`pid` and all below it that still run."""
    found, front = {pid}, [pid]
    while front:
        parent = front.pop()
        for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
            children = {int(child) for child in tasks.read_text().split()}
            front += children - found
            found |= children
    return found


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def service(folder: Path) -> AsyncGenerator[Service]:
    script = folder / "script.json"
    script.write_text(json.dumps(SCRIPT))
    command = [sys.executable, "-m", "gangline", "up", "--json", "--port", "0", "--data", str(folder / "data")]
    command += ["--engine", f"scripted:{script}", "--tokenizer", "tiny", "--run-slots", str(NUM_AT_ONCE)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        await process.stdout.readline()
        yield Service(json.loads((folder / "data" / "up.json").read_text()))
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def results(client: ServerClient, task_id: str, instruction: str, num_samples: int = 1) -> list[SessionResult]:
    task = {
        "task_id": task_id,
        "instruction": instruction,
        "num_samples": num_samples,
        "timeout_seconds": TIMEOUT_S,
        "runtime": {"backend": RUNTIME, "network": "none"},
        "agent": {"harness": "native"},
    }
    await client.submit(task)
    await client.wait(task_id, timeout_s=TIMEOUT_S)
    found = await client.result(task_id)
    assert all(one.outcome == "completed" for one in found), [one.failure for one in found]
    return found


async def turn_overhead(client: ServerClient) -> Figures:
    between: list[float] = []
    for number in range(NUM_LONG_SESSIONS):  # one after the other
        (result,) = await results(client, f"turns-{number}", TURNS)
        calls = result.completions[1:]  # the action server starts between the first two
        between += [1000 * (after.started_at - before.finished_at) for before, after in pairwise(calls)]
    slow = statistics.quantiles(between, n=10)[-1]
    note = f"median of {len(between)}, p90 {slow:.1f} ms: from the end of a model call to the begin of the next, with "
    note += "`true` in the session's shell between them"
    return {"agents.turn_overhead_ms": {"value": statistics.median(between), "unit": "ms", "note": note}}


async def sessions_per_core(client: ServerClient, running: Service) -> Figures:
    await results(client, "warm-up", SESSIONS, NUM_AT_ONCE)
    before_s = running.cpu_s()
    found = await results(client, "sessions", SESSIONS, NUM_SESSIONS)
    service_s = running.cpu_s() - before_s
    used = [one.usage.agent.cpu_s for one in found if one.usage is not None]
    if None in used or len(used) < len(found):
        print("  sessions are not measured: their sandboxes' processor time is not known", file=sys.stderr)
        return {}
    sandboxes_s = sum(seconds or 0.0 for seconds in used)
    in_service, in_sandbox = (1000 * seconds / len(found) for seconds in (service_s, sandboxes_s))
    note = f"{len(found)} sessions of 3 tool calls, {NUM_AT_ONCE} at once, over the processor time of each: "
    note += f"{in_service:.0f} ms in the service, {in_sandbox:.0f} ms in its sandbox"
    rate = 1000 / (in_service + in_sandbox)
    return {"agents.sessions_per_s_per_core": {"value": rate, "unit": "sessions/s", "note": note}}


async def measured() -> Figures:
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        async with service(Path(folder)) as running, ServerClient(running.server_url, running.token) as client:
            return await turn_overhead(client) | await sessions_per_core(client, running)


def run() -> Figures:
    """Measure; returns figure name -> {value, unit, note}. Some seconds."""
    try:
        asyncio.run(make_runtime(RUNTIME).check())
    except RuntimeUnavailable as error:
        print(f"  agents are not measured: {error.message}", file=sys.stderr)
        return {}
    return asyncio.run(measured())


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
