"""Compare two checkouts: `python bench/before_after.py BEFORE AFTER [ROUNDS]`, each a folder with its own `.venv`.

The checkouts take turns, so that a busy machine slows both. Prints medians, and the median and range of the ratios of
each round. A round takes 40 s in each checkout: small calls of the proxy and a call of 20,000 tokens, commands in two
runtimes, merging, and sessions that do nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import merge_bench
import proxy_bench
import runtime_bench
import service_bench

ROUNDS = 5
NUM_LONG_CALLS = 200


def measure() -> dict[str, float]:
    """The figures of this checkout."""
    figures: dict[str, Any] = dict(proxy_bench.small_figures())
    figures |= {name: one for name, one in merge_bench.run().items() if name.endswith("_ms")}
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        figures |= asyncio.run(service_bench.noop_sessions(Path(folder)))
    found: dict[str, float] = {name: one["value"] for name, one in figures.items()}
    with ExitStack() as stack:
        stand = proxy_bench.Stand(stack, "20k_500", peers=False)
        stand.load("ours", 1, 20)
        before_s = stand.stats()["cpu_s"]
        num_calls = len(stand.load("ours", 1, NUM_LONG_CALLS).latencies_s)
        found["proxy.20k_500.call_cpu_ms"] = 1000 * (stand.stats()["cpu_s"] - before_s) / num_calls
    for name in ("sandbox", "process"):
        times: runtime_bench.Times = defaultdict(list)
        for _ in range(2):
            runtime_bench.rounds_of(name, None, times)
        medians = runtime_bench.medians(times)
        found |= {f"runtime.{name}.{step}_ms": medians[step] for step in ("start", "exec", "stop")}
    return found


def measured_in(checkout: Path) -> dict[str, float]:
    """This script's text runs in it, so that `import` finds the checkout's own benchmarks."""
    command = [checkout / ".venv/bin/python", "-", "--measure"]
    env = {**os.environ, "PYTHONPATH": str(checkout / "bench")}
    text = Path(__file__).read_bytes()
    done = subprocess.run(command, cwd=checkout, env=env, input=text, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(checkouts: list[Path], rounds: int) -> None:
    found: list[dict[str, list[float]]] = [defaultdict(list) for _ in checkouts]
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for checkout, figures in zip(checkouts, found, strict=True):
            for name, value in measured_in(checkout).items():
                figures[name].append(value)
    before, after = found
    print("| figure | before | after | ratio, median | range |\n|---|---|---|---|---|")
    for name in after:
        ratios = [new / old for old, new in zip(before[name], after[name], strict=True)]
        medians = f"{statistics.median(before[name]):,.2f} | {statistics.median(after[name]):,.2f}"
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"| `{name}` | {medians} | {statistics.median(ratios):.3f} | {spread} |")


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measure()))
    else:
        folders = [Path(name).absolute() for name in sys.argv[1:3]]
        compare(folders, int(sys.argv[3]) if len(sys.argv) > 3 else ROUNDS)
