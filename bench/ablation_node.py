"""A node of the ablation: the real one with real sandboxes, and an agent that acts in a shell between its model calls.

    python bench/ablation_node.py SHELL PLACEMENT NODE_ID FOLDER SERVER_URL ENGINE_URL,...

SHELL: `server`, the action server's shell, or `tmux`, the shell in a tmux session, driven from outside.
PLACEMENT: `load`, the node's own choice of an engine, or `turn`, each in its turn, however busy they are.
Each action's seconds are a line of `FOLDER/actions.txt`. Prints its URL when it is ready, and serves until SIGTERM.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from agent_node import reward_of
from node_process import run_node
from pydantic import BaseModel
from tools_bench import Tmux

from gangline.agents.harnesses.native.adapter import NativeConfig
from gangline.agents.harnesses.native.model import ChatModel, Message
from gangline.agents.tools.action_server import ActionServer
from gangline.domain.contracts import Harness, HarnessContext, HarnessVerdict
from gangline.domain.sandbox import ExecResult, Sandbox
from gangline.node.backends import pool
from gangline.node.backends.engine import Backend
from gangline.node.backends.pool import Placement
from gangline.settings import plugins
from gangline.settings.node import NodeSettings

NUM_SESSIONS = 16
"""That run at once."""
SIZES: dict[str, Any] = {
    "init_workers": 4,
    "ready_slots": 8,
    "run_slots": NUM_SESSIONS,
    "prewarm_workers": 2,
    "postrun_workers": 4,
}
MEDIAN_TURNS, MOST_TURNS = 8, 40
TIMEOUT_S = 60.0
EARNED = "earned.txt"
"""Where the agent's reward lies for the grader."""

Act = Callable[[], Awaitable[object]]


def num_turns_of(session_id: str) -> int:
    """Drawn by the session's id. Log-normal: one session in ten takes 2.8 times the median."""
    return min(round(MEDIAN_TURNS * random.Random(session_id).lognormvariate(0, 0.8)) + 1, MOST_TURNS)


@asynccontextmanager
async def by_server(handle: Sandbox) -> AsyncGenerator[Act]:
    async with await ActionServer.start(handle) as server:
        yield lambda: server.shell.run("true", timeout_s=TIMEOUT_S)


@asynccontextmanager
async def by_tmux(handle: Sandbox) -> AsyncGenerator[Act]:
    tmux = Tmux(handle)
    await tmux.start()
    yield tmux.act


class ActingHarness:
    """Asks the model, acts in the shell, asks again, as often as is drawn for the session."""

    name: ClassVar[str] = "native"
    Config: ClassVar[type[BaseModel]] = NativeConfig

    def __init__(self, shell: str, actions: Path) -> None:
        self._shell = by_server if shell == "server" else by_tmux
        self._actions = actions

    async def prepare(self, context: HarnessContext) -> Callable[[], Any]:
        return lambda: self._run(context)

    def judge(self, result: ExecResult) -> HarnessVerdict:
        return HarnessVerdict(result.ok)

    async def _run(self, context: HarnessContext) -> ExecResult:
        messages: list[Message] = [{"role": "user", "content": context.instruction}]
        async with (
            ChatModel(f"{context.node_url}/v1", context.api_key, {"model": context.model}) as model,
            self._shell(context.runtime) as act,
        ):
            for _ in range(num_turns_of(context.session_id)):
                messages.append((await model.ask(messages)).message)
                began_at = time.perf_counter()
                await act()
                with self._actions.open("a") as file:
                    file.write(f"{time.perf_counter() - began_at}\n")
                messages.append({"role": "user", "content": "done"})
        reward = reward_of(context.session_id, context.task_id)
        await context.runtime.upload(EARNED, str(reward).encode())
        return ExecResult(exit_code=0)


class InTurn(Placement):
    """Gives each engine as many sessions as the others, whatever they have to do."""

    _num_chosen = 0

    def _choose(self, task_id: str) -> Backend | None:
        backends = sorted(self._backends)
        self._num_chosen += 1
        return self._backends[backends[self._num_chosen % len(backends)]]


if __name__ == "__main__":
    shell, placement, node_id, folder, server_url, engine_urls = sys.argv[1:]

    def make_harness(_name: str, _settings: dict[str, Any]) -> Harness:
        return ActingHarness(shell, Path(folder) / "actions.txt")

    plugins.make_harness = make_harness
    if placement == "turn":
        pool.Placement = InTurn
    settings = NodeSettings(engines=tuple(engine_urls.split(",")), **SIZES)
    run_node(settings, node_id=node_id, folder=Path(folder), server_url=server_url)
