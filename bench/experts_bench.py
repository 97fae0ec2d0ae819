"""What routed experts cost: processor time of the node for a session, and bytes in its journal.

A session is an agent's conversation of about 20,000 tokens in 37 turns: a prompt of 2,000 tokens, then 300 new prompt
tokens and 200 sampled ones each. The model has 48 layers of which each chooses 8 of 128 experts. Two nodes, each with
its own engine, run the same sessions in turns: one asks for experts, the other does not.

- `truth.experts_cpu_ratio`: processor time of a session, with experts over without: its agent, a small program over a
  provider's SDK, and of the node all calls, reading the records back, building traces and encoding the result. There is
  no sandbox, and the engine is not counted.
- `truth.experts_node_cpu_ratio`: the node's part alone.
- `truth.experts_journal_bytes`: bytes of the journal for each token that experts add.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from load_client import HttpClient, get, post
from proxy_bench import BENCH, free_port, process

NUM_TURNS, NUM_FIRST, NUM_NEW, NUM_SAMPLED = 37, 2_000, 300, 200
NUM_LAYERS, NUM_CHOSEN = 48, 8
NUM_TOKENS = NUM_FIRST + NUM_SAMPLED + (NUM_TURNS - 1) * (NUM_NEW + NUM_SAMPLED)
ROUNDS = 9
NUM_COLD = 2
"""First rounds, which find code and connections cold."""

Figures = dict[str, dict[str, Any]]


class Used(NamedTuple):
    """By one session."""

    agent_cpu_s: float
    node_cpu_s: float
    journal_bytes: int

    @property
    def cpu_s(self) -> float:
        return self.agent_cpu_s + self.node_cpu_s


class Arm:
    """A node and its engine."""

    def __init__(self, stack: ExitStack, *, with_experts: bool) -> None:
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gangline-bench-")))
        engine_port, self._port = free_port(), free_port()
        shape = (NUM_SAMPLED, NUM_LAYERS, NUM_CHOSEN)
        engine = (sys.executable, "moe_engine.py", engine_port, *shape, int(with_experts))
        stack.enter_context(process(*engine, port=engine_port))
        capture = json.dumps({"routed_experts": with_experts})
        url = f"http://127.0.0.1:{engine_port}"
        node = (sys.executable, "proxy_node.py", url, self._port, self._folder, 1, "", capture)
        stack.enter_context(process(*node, port=self._port))

    async def session(self) -> Used:
        client = await HttpClient.connect(self._port)
        bytes_before, node_before_s, agents_before_s = self._journal_bytes(), await _cpu_s(client), _agents_cpu_s()
        agent = (sys.executable, "moe_agent.py", f"http://127.0.0.1:{self._port}/s/s0/v1", "gls-bench-s0")
        sizes = (str(size) for size in (NUM_TURNS, NUM_FIRST, NUM_NEW))
        await asyncio.to_thread(subprocess.run, [*agent, *sizes], check=True, cwd=BENCH)
        await client.send(post("/bench/result/s0", b"", ""))
        used = Used(
            agent_cpu_s=_agents_cpu_s() - agents_before_s,
            node_cpu_s=await _cpu_s(client) - node_before_s,
            journal_bytes=self._journal_bytes() - bytes_before,
        )
        await client.send(post("/bench/renew/s0", b"", ""))
        client.close()
        return used

    def _journal_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._folder.glob("*.log"))


def _agents_cpu_s() -> float:
    """Of all agents that have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


async def _cpu_s(client: HttpClient) -> float:
    return json.loads(await client.send(get("/bench/stats")))["cpu_s"]


async def _pairs() -> list[tuple[Used, Used]]:
    """(without, with), side by side."""
    with ExitStack() as stack:
        without, with_experts = Arm(stack, with_experts=False), Arm(stack, with_experts=True)
        pairs = [(await without.session(), await with_experts.session()) for _ in range(ROUNDS + NUM_COLD)]
    return pairs[NUM_COLD:]


def run() -> Figures:
    """Measure; returns figure name -> {value, unit, note}. About a minute."""
    pairs = asyncio.run(_pairs())
    held = NUM_TOKENS * NUM_LAYERS * NUM_CHOSEN
    added = statistics.median(after.journal_bytes - before.journal_bytes for before, after in pairs)
    # Each position once: calls that are not stitched report their whole prompts again.
    assert 0.98 * held < added < 1.02 * held, f"the journal grew by {added} bytes for {held} bytes of experts"
    about = f"{NUM_TOKENS:,} tokens in {NUM_TURNS} turns, {NUM_LAYERS} layers x {NUM_CHOSEN} experts"
    whole = statistics.median(pair[1].journal_bytes for pair in pairs)
    return {
        "truth.experts_cpu_ratio": _ratio([(before.cpu_s, after.cpu_s) for before, after in pairs], about),
        "truth.experts_node_cpu_ratio": _ratio(
            [(before.node_cpu_s, after.node_cpu_s) for before, after in pairs], about
        ),
        "truth.experts_journal_bytes": {
            "value": round(added / NUM_TOKENS, 1),
            "unit": "bytes/token",
            "note": f"{about}: {NUM_LAYERS * NUM_CHOSEN} numbers a token; {whole / 1e6:.2f} MB of journal a session",
        },
    }


def _ratio(pairs: list[tuple[float, float]], about: str) -> dict[str, Any]:
    """pairs: seconds (without, with)."""
    ratio = statistics.median(after / before for before, after in pairs)
    plain_ms, experts_ms = (1000 * statistics.median(pair[which] for pair in pairs) for which in (0, 1))
    note = f"{about}; {experts_ms:.0f} ms with, {plain_ms:.0f} without; median of {ROUNDS} pairs, alongside other work"
    return {"value": round(ratio, 3), "unit": "", "note": note}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
