"""Forks: how long until 32 forks of one turn run by themselves, each in its own sandbox.

Engine (scripted), server and node are the commands of a service. The parent is an agent in the node that runs three
commands; its forks begin behind the third. Measured is the time from the request to the moment at which the last of
the 32 sends its first call that is sampled: by then each has a sandbox, and has run the three commands again.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from gangline.rows.forks.calls import REPLAYED
from gangline.wire.client.server import ServerClient

NUM_FORKS, ROUNDS = 32, 5
SLOTS = ("--run-slots", "32", "--ready-slots", "32", "--init-workers", "8", "--postrun-workers", "4")
RULES: list[dict[str, Any]] = [
    *({"turn": turn, "pattern": ".", "tool_calls": [{"run": f"echo {turn} >> file; cat file"}]} for turn in range(3)),
    {"pattern": ".", "text": "done"},
]
TASK: dict[str, Any] = {
    "task_id": "parent",
    "instruction": "say hi",
    "num_samples": 1,
    "agent": {"harness": "native", "settings": {"tools": ["shell"]}, "allow_unrendered_tools": True},
    "runtime": {"backend": "sandbox"},
}


@asynccontextmanager
async def command(name: str, *arguments: object) -> AsyncGenerator[str]:
    """A command that serves; its URL."""
    words = (sys.executable, "-m", "gangline", name, *map(str, arguments), "--port", "0", "--json")
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        told = json.loads(await process.stdout.readline())
        assert f"{name}_url" in told, told
        yield told[f"{name}_url"]
    finally:
        process.terminate()
        await process.wait()


async def measure() -> list[float]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gangline-bench-")))
        script = folder / "script.json"
        script.write_text(json.dumps({"rules": RULES}))
        engine = await stack.enter_async_context(command("engine", "--scripted", script))
        server = await stack.enter_async_context(command("server", "--data", folder, "--no-token"))
        where = ("--data", folder, "--server", server, "--engine", engine, "--id", "n1", "--no-token")
        await stack.enter_async_context(command("node", *where, *SLOTS))
        client = await stack.enter_async_context(ServerClient(server))
        await client.submit(TASK)
        await client.wait("parent")
        (parent,) = await client.result("parent")
        assert parent.outcome == "completed", parent.failure
        return [await running_s(client, parent.session_id, f"forks-{number}") for number in range(ROUNDS)]


async def running_s(client: ServerClient, session_id: str, task_id: str) -> float:
    began_at = time.time()
    await client.fork(session_id, 3, samples=NUM_FORKS, task_id=task_id)
    await client.wait(task_id)
    first: list[float] = []
    for fork in await client.result(task_id):
        own = [one for one in fork.completions if REPLAYED not in one.metadata]
        assert fork.outcome == "completed", fork.failure
        assert len(own) == 1
        first.append(own[0].started_at)
    return max(first) - began_at


def run() -> dict[str, dict[str, Any]]:
    found = asyncio.run(measure())
    note = f"median of {ROUNDS}, {min(found):.2f} to {max(found):.2f} s; three commands each, sandboxes, one node"
    return {"fork.children_32_running_s": {"value": statistics.median(found), "unit": "s", "note": note}}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
