"""What a weight update costs, phase by phase: embedded engines with real weights, under a load of streaming agents.

The model is SmolLM2-135M's own folder (540 MB in float32), written again for every update as a trainer would, on the
same disk that the engines read. 2 engines behind 2 nodes, 4 agents that stream without a pause.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import openai

from gangline.models.language.models import resolve_model
from gangline.train.runs.records import UpdateProfile
from gangline.train.weights.update import ServiceWeights
from gangline.wire.client.node import NodeClient
from gangline.wire.client.server import ServerClient

NUM_NODES, NUM_AGENTS, NUM_UPDATES = 2, 2, 5
PHASES = ("transfer_s", "pause_s", "drain_s", "load_s", "resume_s")
ASK: Any = {"model": "smollm2", "messages": [{"role": "user", "content": "Count to a hundred."}], "max_tokens": 32}


def run() -> dict[str, dict[str, Any]]:
    """Measure both modes; returns figure name -> {value, unit, note}. A few minutes."""
    figures: dict[str, dict[str, Any]] = {}
    modes: tuple[Literal["drain", "keep"], ...] = ("drain", "keep")
    for mode in modes:
        profiles, num_calls = asyncio.run(_measure(mode))
        print(_table(mode, profiles, num_calls), file=sys.stderr, flush=True)
        middle = {phase: statistics.median(getattr(one, phase) for one in profiles) for phase in PHASES}
        phases = ", ".join(f"{phase.removesuffix('_s')} {1000 * took_s:.0f}" for phase, took_s in middle.items())
        megabytes = profiles[0].num_bytes / 1e6
        figures[f"weights.{mode}.push_ms"] = {
            "value": round(1000 * statistics.median(one.total_s for one in profiles), 1),
            "unit": "ms",
            "note": f"median of {len(profiles)}: {phases} ms; {megabytes:.0f} MB into {profiles[0].num_engines} "
            f"embedded engines, {num_calls} streamed calls meanwhile, none failed",
        }
        figures[f"weights.{mode}.closed_ms"] = {
            "value": round(1000 * statistics.median(one.closed_s for one in profiles), 1),
            "unit": "ms",
            "note": "of those: gates closed, the most that a call waits",
        }
    return figures


def _table(mode: str, profiles: list[UpdateProfile], num_calls: int) -> str:
    rows = [" ".join(f"{1000 * getattr(one, phase):9.1f}" for phase in (*PHASES, "total_s")) for one in profiles]
    head = " ".join(f"{phase.removesuffix('_s'):>9}" for phase in (*PHASES, "total_s"))
    return "\n".join([f"{mode}, ms ({num_calls} calls meanwhile)", head, *rows])


async def _measure(mode: Literal["drain", "keep"]) -> tuple[list[UpdateProfile], int]:
    """Profiles, and how many calls came whole meanwhile. Raises: whatever a call failed with."""
    model = resolve_model("smollm2")

    def save(folder: Path) -> None:
        for path in model.iterdir():
            if path.is_file():
                shutil.copyfile(path, folder / path.name)

    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as data:
        async with _service(Path(data)) as (server_url, node_urls), ServerClient(server_url) as client:
            weights = ServiceWeights(client, Path(data) / "weights", mode=mode)
            await _all_joined(client)
            done, profiles = asyncio.Event(), list[UpdateProfile]()
            async with asyncio.TaskGroup() as group:
                agents = [group.create_task(_agent(url, done)) for url in node_urls for _ in range(NUM_AGENTS)]
                for version in range(1, NUM_UPDATES + 1):
                    profiles.append(await weights.push(save, version))
                    await asyncio.sleep(0.5)
                done.set()
            return profiles, sum(agent.result() for agent in agents)


async def _all_joined(client: ServerClient) -> None:
    """Until the server has heard of all nodes."""
    num_joined = 0
    async for event in client.events(after=0):
        num_joined += event.kind == "node.joined"
        if num_joined == NUM_NODES:
            return


async def _agent(node_url: str, done: asyncio.Event) -> int:
    """Streams calls until `done`; returns how many."""
    num_calls = 0
    async with NodeClient(node_url) as node:
        opened = await node.open_session()
        async with openai.AsyncOpenAI(
            base_url=opened.base_urls["openai"], api_key=opened.api_key, max_retries=0
        ) as client:
            while not done.is_set():
                async for _ in await client.chat.completions.create(**ASK, stream=True):
                    pass
                num_calls += 1
    return num_calls


@asynccontextmanager
async def _service(folder: Path) -> AsyncGenerator[tuple[str, list[str]]]:
    """Server, engines and nodes, each a process."""
    async with AsyncExitStack() as stack:

        async def start(kind: str, *arguments: str) -> str:
            return await stack.enter_async_context(program(kind, folder, *arguments))

        server = await start("server", "--data", str(folder), "--no-token")
        nodes: list[str] = []
        for number in range(NUM_NODES):
            engine = await start("engine", "--model", "smollm2", "--threads", "1")
            data = str(folder / f"node{number}")
            where = ("--engine", engine, "--server", server, "--data", data, "--id", f"n{number}", "--no-token")
            nodes.append(await start("node", *where))
        yield server, nodes


@asynccontextmanager
async def program(kind: str, folder: Path, *arguments: str) -> AsyncGenerator[str]:
    """`gangline KIND` until the block is left; gives its URL."""
    with (folder / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gangline", kind, *arguments, "--port", "0", "--json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"gangline {kind} did not start: {(folder / 'log').read_text()[-2000:]}")
        yield json.loads(line)[f"{kind}_url"]
    finally:
        process.terminate()
        await process.wait()


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
