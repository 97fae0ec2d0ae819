"""A node of the learning benchmarks: the real one, whose sandboxes are agents that only talk and take time.

    python bench/agent_node.py NODE_ID FOLDER SERVER_URL ENGINE_URL

The command of a task (harness `shell`) says which agent: `converse` talks for many turns with tools, and at times sends
a sub-agent or compacts its history; `work` asks the model at its beginning and halfway, and takes its time, and
`straggle` does so as long as a paper says. Model calls go over HTTP to the node's proxy. All is drawn by the session's
id, the same wherever it runs. When a `work` ends, cut off or not, a line of `FOLDER/runs.jsonl` says from when to when
it had a RUN slot. Prints its URL when it is ready, and
serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from no_runtime import NoHandle, NoRuntime
from node_process import run_node

from gangline.agents.harnesses.native.model import ChatModel, Message
from gangline.domain.sandbox import ExecRequest, ExecResult, OutputSink, RuntimeStart, Sandbox
from gangline.settings import plugins
from gangline.settings.node import NodeSettings

RUN_SLOTS = 16
SIZES: dict[str, Any] = {
    "init_workers": RUN_SLOTS,
    "ready_slots": RUN_SLOTS,
    "run_slots": RUN_SLOTS,
    "prewarm_workers": 0,
    "postrun_workers": RUN_SLOTS,
}

CONVERSE, WORK, STRAGGLE, GRADE = "converse", "work", "straggle", "grade"
"""What harness and evaluator run."""

MEDIAN_WORK_S, LONGEST_WORK_S = 0.6, 8.0
NUM_VARIANTS = 12
"""Of the model's replies, chosen by the first word of what it is told last."""

SHELL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
WORDS = ("error", "file", "line", "test", "path", "module", "import", "value", "return", "class", "index", "loop")

Ask = Callable[[list[Message]], Coroutine[Any, Any, Message]]


def work_s_of(session_id: str) -> float:
    """Log-normal: the mean is 1.6 times the median, and one in ten takes 3.6 times the median."""
    return min(random.Random(session_id).lognormvariate(0, 1) * MEDIAN_WORK_S, LONGEST_WORK_S)


STRAGGLER_SPREAD = 0.887
"""Of the logarithm: 63 sessions of 64 end in 3 minutes and one takes 25. The longest of 64 lies 2.39 deviations above
the median. Source: "Inside the Agentic RL Training Loop"."""


def straggle_s_of(session_id: str, median_s: float = MEDIAN_WORK_S) -> float:
    """Log-normal. Half of the spread is the task's, half the session's own."""
    task, session = (random.Random(one).gauss(0, 1) for one in (session_id.rpartition(".")[0], session_id))
    return median_s * math.exp(STRAGGLER_SPREAD * (task + session) / math.sqrt(2))


def reward_of(session_id: str, task_id: str) -> float:
    """Tasks are as hard as they like to be: with four samples, two of five groups have one reward."""
    return float(random.Random(session_id + "/reward").random() < random.Random(task_id).random())


def script() -> dict[str, Any]:
    """Of the engine that answers `converse`: each reply says something and calls the tool."""
    rules: list[dict[str, Any]] = [{"pattern": "^Summarise", "where": "last", "text": "So far: " + _text("sum", 30)}]
    for number in range(NUM_VARIANTS):
        said, command = _text(f"said {number}", 4 + 2 * number), f"grep -n {_text(f'command {number}', 2)} src"
        rules.append({"pattern": f"^v{number} ", "text": said, "tool_calls": [{"run": command}]})
    rules.append({"turn": 0, "text": "I look first.", "tool_calls": [{"run": "ls"}]})
    return {"rules": rules}


def _text(seed: str, num_words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


class _Conversation:
    """An agent's messages and what it does with them."""

    def __init__(self, ask: Ask, chosen: random.Random, role: str, task: str) -> None:
        self._ask = ask
        self._chosen = chosen
        self._opening: list[Message] = [
            {"role": "system", "content": f"You are the {role}. {_text(role, 40)}"},
            {"role": "user", "content": task},
        ]
        self.messages = list(self._opening)

    def _told(self) -> str:
        variant = self._chosen.randrange(NUM_VARIANTS)
        return f"v{variant} {' '.join(self._chosen.choices(WORDS, k=self._chosen.randint(5, 40)))}"

    async def turn(self) -> None:
        reply = await self._ask(self.messages)
        self.messages.append(reply)
        for call in reply.get("tool_calls", ()):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self._told()})

    async def sub_agent(self) -> None:
        other = _Conversation(self._ask, self._chosen, "explorer", f"Find out: {self._told()}")
        for _ in range(self._chosen.randint(2, 4)):
            await other.turn()

    async def compact(self) -> None:
        reply = await self._ask([*self.messages, {"role": "user", "content": "Summarise what was done."}])
        self.messages = [*self._opening, {"role": "user", "content": f"Before: {reply['content']}"}]


async def converse(ask: Ask, session_id: str, task: str) -> None:
    """5 to 15 turns; one session in five sends a sub-agent on its way, another compacts its history."""
    chosen = random.Random(session_id)
    num_turns, kind = chosen.randint(5, 15), chosen.random()
    main = _Conversation(ask, chosen, "coder", task)
    for turn in range(num_turns):
        if turn == num_turns // 2 and kind < 0.2:
            await main.sub_agent()
        if turn == num_turns // 2 and kind > 0.8:
            await main.compact()
        await main.turn()


class AgentRuntime(NoRuntime):
    def __init__(self, runs: Path) -> None:
        self._runs = runs

    async def start(self, start: RuntimeStart) -> Sandbox:
        return _AgentHandle(start, self._runs)


class _AgentHandle(NoHandle):
    def __init__(self, start: RuntimeStart, runs: Path) -> None:
        super().__init__(start.runtime_id, f"http://127.0.0.1:{start.proxy_port}")
        self._session_id = start.runtime_id.rsplit(".", 2)[0]
        self._runs = runs
        self._reward = 0.0

    async def run(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        command, env = request.command, request.env
        if command in (CONVERSE, WORK, STRAGGLE):
            task = env["GANGLINE_INSTRUCTION"]
            self._reward = reward_of(self._session_id, task)
            fields: Message = {"model": env["OPENAI_MODEL"], "tools": [SHELL]}
            async with ChatModel(env["OPENAI_BASE_URL"], env["OPENAI_API_KEY"], fields) as model:

                async def ask(messages: list[Message]) -> Message:
                    return (await model.ask(messages)).message

                if command == CONVERSE:
                    await converse(ask, self._session_id, task)
                else:
                    length_of = work_s_of if command == WORK else straggle_s_of
                    await self._work(ask, task, length_of(self._session_id))
        return ExecResult(exit_code=0)

    async def _work(self, ask: Ask, task: str, length_s: float) -> None:
        started_at = time.time()
        try:
            messages: list[Message] = [{"role": "user", "content": task}]
            for told in ("halfway", "done"):
                messages.append(await ask(messages))
                await asyncio.sleep(length_s / 2)
                messages.append({"role": "user", "content": told})
        finally:
            with self._runs.open("a") as file:
                run = {"session_id": self._session_id, "started_at": started_at, "ended_at": time.time()}
                file.write(json.dumps(run) + "\n")

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        return str(self._reward).encode() if Path(path).name == "reward.txt" else await super().download(path)


def task_of(task_id: str, command: str, num_samples: int) -> dict[str, Any]:
    """The instruction is the task's id: agents draw by it how hard it is."""
    return {
        "task_id": task_id,
        "instruction": task_id,
        "num_samples": num_samples,
        "agent": {"harness": "shell", "settings": {"command": command}},
        "evaluator": {"strategy": "script", "config": {"command": GRADE, "reward_file": "reward.txt"}},
    }


if __name__ == "__main__":
    node_id, folder, server_url, engine_url = sys.argv[1:]
    runtime = AgentRuntime(Path(folder) / "runs.jsonl")
    plugins.make_runtime = lambda name: runtime
    settings = NodeSettings(engines=(engine_url,), **SIZES)
    run_node(settings, node_id=node_id, folder=Path(folder), server_url=server_url)
