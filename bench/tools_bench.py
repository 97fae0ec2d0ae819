"""How long one action takes through an action server: a command, a Python cell, a view of a file, alongside tmux.

All act in the same sandbox of a node's keeper. tmux is driven as Harbor's terminus-2 drives it: `send-keys` types a
command that ends with `tmux wait -S`, `tmux wait` waits for that, `capture-pane` reads the screen. Each is a command
in the sandbox, without a pause. The systems take turns; medians count. Without tmux its figures are left out.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from runtime_bench import Figures, Times, figure, timed

from gangline.agents.tools.action_server import ActionServer
from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.ids import new_id
from gangline.domain.sandbox import RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.settings.plugins import make_runtime
from gangline.testing.adoption_conformance import in_keeper

RUNTIME = "sandbox"
NUM_STARTS = 8
NUM_ROUNDS = 10
NUM_ACTIONS = 40
NUM_TMUX_ACTIONS = 4
TIMEOUT_S = 60.0


class Tmux:
    """A session of tmux in the sandbox, driven as Harbor's terminus-2 does with blocking keys."""

    def __init__(self, handle: Sandbox) -> None:
        self._handle = handle

    async def start(self) -> None:
        await self._run("tmux new-session -d -s bench -x 200 -y 50 sh")
        await self.act()

    async def act(self) -> None:
        """Type `true`, wait for its end, and take the screen."""
        await self._run("tmux send-keys -t bench -- true '; tmux wait -S done' Enter")
        await self._run(f"timeout {TIMEOUT_S:g}s tmux wait done")
        assert "true" in await self._run("tmux capture-pane -p -t bench")

    async def _run(self, command: str) -> str:
        result = await self._handle.exec(command)
        assert result.ok, result.stderr
        return result.stdout.decode()


async def act(server: ActionServer, times: Times) -> None:
    """Each tool once."""
    result = await timed(times, "shell", server.shell.run("true", timeout_s=TIMEOUT_S))
    assert result.exit_code == 0
    cell = await timed(times, "python", server.python.run("x = 1", timeout_s=TIMEOUT_S))
    assert cell.traceback is None
    await timed(times, "view", server.files.view("a.txt"))


async def measured(handle: Sandbox, times: Times) -> None:
    for _ in range(NUM_STARTS):
        server = await timed(times, "start", ActionServer.start(handle))
        await server.close()
    tmux = Tmux(handle) if shutil.which("tmux") else None
    if tmux is None:
        print("  tmux is not measured: it is not installed", file=sys.stderr)
    else:
        await tmux.start()
    async with await ActionServer.start(handle) as server:
        await server.files.write("a.txt", "line\n" * 100)
        await act(server, defaultdict(list))  # shell and interpreter start with their first action
        for _ in range(NUM_ROUNDS):
            for _ in range(NUM_ACTIONS):
                await act(server, times)
            for _ in range(NUM_TMUX_ACTIONS if tmux else 0):
                assert tmux is not None
                await timed(times, "tmux", tmux.act())


async def in_sandbox(times: Times) -> None:
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        async with in_keeper(RUNTIME, Path(folder) / "keeper") as runtime:
            runtime_id = new_id("bench")
            spec = RuntimeSpec(backend=RUNTIME, network="none")
            start = RuntimeStart(runtime_id=runtime_id, owner="bench", spec=spec, folder=Path(folder) / runtime_id)
            handle = await runtime.start(start)
            try:
                await measured(handle, times)
            finally:
                await handle.stop()


def run() -> Figures:
    """Measure; returns figure name -> {value, unit, note}. Some seconds."""
    try:
        asyncio.run(make_runtime(RUNTIME).check())
    except RuntimeUnavailable as error:
        print(f"  tools are not measured: {error.message}", file=sys.stderr)
        return {}
    times: Times = defaultdict(list)
    asyncio.run(in_sandbox(times))
    medians = {step: statistics.median(took_ms) for step, took_ms in times.items()}
    notes = {
        "start": f"{NUM_STARTS} times: an action server in a running sandbox",
        "shell": f"{len(times['shell'])} times: command `true` in the action server's shell",
        "python": f"{len(times['python'])} times: cell `x = 1`, in the sandbox's python3",
        "view": f"{len(times['view'])} times: a file of 100 lines",
        "tmux": f"{len(times['tmux'])} times: `true` by send-keys, wait and capture-pane, in the same sandbox",
    }
    figures = {f"tools.{step}_ms": figure(ms, "ms", f"median; {notes[step]}") for step, ms in medians.items()}
    if "tmux" in medians:
        note = f"{medians['tmux']:.1f} ms of tmux to {medians['shell']:.2f} ms of the action server, the same sandbox"
        figures["tools.shell_ratio_tmux"] = figure(medians["tmux"] / medians["shell"], "ratio", note)
    return figures


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
