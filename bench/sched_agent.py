"""The agents of `sched_vllm_bench`, and a node that runs them.

    python bench/sched_agent.py NODE_ID FOLDER SERVER_URL ENGINE_URL NUM_SLOTS PLACES

PLACES: `none`, or `places` for the default of `--session-places`. An agent plays the trace of its task and sample: it
asks for as many tokens as the trace has, and is told as many words. Prints the node's URL when it is ready, and serves
until SIGTERM.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from no_runtime import NoHandle, NoRuntime
from node_process import run_node
from sched_simulation import Trace, traces

from gangline.agents.harnesses.native.model import ChatModel, Message
from gangline.domain.sandbox import ExecRequest, ExecResult, OutputSink, RuntimeStart, Sandbox
from gangline.settings import plugins
from gangline.settings.node import NodeSettings

NUM_GROUPS, GROUP_SIZE = 8, 4
NUM_WORDS = 1000
MAX_TOOL_S = 15.0
PROMPTS, REPLIES = 0.35, 0.15
"""Factors of the simulation's lengths: contexts of some 2,000 tokens at their ends."""
_MESSAGE_TOKENS = 3
"""What the model's template adds to a message."""

Ask = Callable[[Sequence[Message], int], Awaitable[Message]]
"""Messages, and how many tokens to sample."""


def all_traces() -> dict[str, Trace]:
    """By name, `GROUP-SAMPLE`."""
    found = traces(NUM_GROUPS, GROUP_SIZE, random.Random(1), prompts=PROMPTS, replies=REPLIES)
    return {trace.name: trace for trace in found}


def words(seed: str, num: int) -> str:
    """So many tokens of the benchmark's model."""
    return " ".join(f"w{number}" for number in random.Random(seed).choices(range(NUM_WORDS), k=max(num, 1)))


async def play(trace: Trace, ask: Ask) -> None:
    messages: list[Message] = []
    for number, turn in enumerate(trace.turns):
        seed = f"{trace.name}.{number}" if number else trace.group  # a group begins with the same words
        messages.append({"role": "user", "content": words(seed, turn.num_new - _MESSAGE_TOKENS)})
        messages.append(await ask(messages, turn.num_sampled))
        await asyncio.sleep(min(turn.tool_s, MAX_TOOL_S))


class _TraceRuntime(NoRuntime):
    async def start(self, start: RuntimeStart) -> Sandbox:
        return _TraceHandle(start)


class _TraceHandle(NoHandle):
    def __init__(self, start: RuntimeStart) -> None:
        super().__init__(start.runtime_id, f"http://127.0.0.1:{start.proxy_port}")
        session_id = start.runtime_id.rsplit(".", 2)[0]
        self._sample = int(session_id.rpartition(".")[2])

    async def run(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        env = request.env
        trace = all_traces()[f"{env['GANGLINE_INSTRUCTION']}-{self._sample}"]

        async def ask(messages: Sequence[Message], num_tokens: int) -> Message:
            fields: Message = {"model": env["OPENAI_MODEL"], "max_tokens": num_tokens}
            async with ChatModel(env["OPENAI_BASE_URL"], env["OPENAI_API_KEY"], fields) as model:
                return (await model.ask(messages)).message

        await play(trace, ask)
        return ExecResult(exit_code=0)


def task_of(group: str) -> dict[str, Any]:
    agent = {"harness": "shell", "settings": {"command": "play"}}
    return {"task_id": group, "instruction": group, "num_samples": GROUP_SIZE, "agent": agent, "timeout_seconds": 7200}


if __name__ == "__main__":
    node_id, folder, server_url, engine_url, num_slots, places = sys.argv[1:]
    runtime = _TraceRuntime()
    plugins.make_runtime = lambda name: runtime
    settings = NodeSettings(
        engines=(engine_url,),
        init_workers=int(num_slots),
        ready_slots=int(num_slots),
        run_slots=int(num_slots),
        prewarm_workers=0,
        postrun_workers=int(num_slots),
        session_places="auto" if places == "places" else "off",
    )
    run_node(settings, node_id=node_id, folder=Path(folder), server_url=server_url)
