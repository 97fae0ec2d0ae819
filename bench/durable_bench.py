"""Durable turns: the processor time that a node's proxy takes for a call whose record it also sends to a server.

Two nodes' proxies with one engine, one of them with `capture.durable: turn` in all of its sessions. They take turns,
and the median of the ratios counts. The server is a process that reads and throws away: it is the node's time that
counts.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

from proxy_bench import NUM_SESSIONS, Stand, free_port, process

ROUNDS = 9
CONCURRENCY = 32
NUM_CALLS = {"small": 1500, "2k_200": 800}


def run() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for size, num_calls in NUM_CALLS.items():
        with ExitStack() as stack:
            stand = Stand(stack, size, peers=False)
            sink = free_port()
            stack.enter_context(process(sys.executable, "turn_sink.py", sink, port=sink))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gangline-bench-"))
            port = stand.ports["durable"] = free_port()
            engine = f"http://127.0.0.1:{stand.ports['direct']}"
            command = ("proxy_node.py", engine, port, folder, NUM_SESSIONS, f"http://127.0.0.1:{sink}")
            stack.enter_context(process(sys.executable, *command, port=port))
            ratios, costs = [], []
            for system in ("ours", "durable"):
                stand.cpu_ms(system, CONCURRENCY, num_calls)  # warms up
            for _ in range(ROUNDS):
                plain, durable = (stand.cpu_ms(system, CONCURRENCY, num_calls) for system in ("ours", "durable"))
                ratios.append(durable / plain)
                costs.append(plain)
            note = (
                f"{size}, 32 at once: {ROUNDS} rounds of {num_calls} calls, {statistics.median(costs):.2f} ms a call "
                f"without; {min(ratios):.3f} to {max(ratios):.3f}"
            )
            figures[f"durable.{size}.cpu_ratio"] = {"value": statistics.median(ratios), "unit": "x", "note": note}
    return figures
