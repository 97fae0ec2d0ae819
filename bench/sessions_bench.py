"""A node with 2,000 sessions, which is one process: what its proxy takes of a core, and what it adds to a call.

Every session is a conversation. Its engine answers 200 tokens in 4 s, in one piece; its tools take 4 s in the mean, so
half of the sessions wait for the engine at a time. A conversation begins with 2,000 tokens, and begins anew after ten
turns. From its second turn on the ids that were sampled are sent (the engine renders twice for that). Journal on disk.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from contextlib import ExitStack
from typing import Any

from load_client import HttpClient, post
from proxy_bench import PATHS, SIZES, Figures, Stand

NUM_SESSIONS = 2_000
TOKENS_PER_S = 50
TOOLS_S = 4.0
TURNS = 10
WARM_UP_S, MEASURED_S = 25.0, 30.0
ANSWER_S = SIZES["2k_200"][1] / TOKENS_PER_S


async def converse(stand: Stand, number: int, added_ms: list[float], ends_at: float) -> None:
    """One session's agent."""
    draw = random.Random(number)
    client = await HttpClient.connect(stand.ports["ours"])
    path, key = PATHS["ours"].format(number), f"gls-bench-s{number}"
    messages: list[dict[str, Any]] = []
    await asyncio.sleep(draw.uniform(0, ANSWER_S + TOOLS_S))
    while time.monotonic() < ends_at:
        if len(messages) >= 2 * TURNS:
            await client.send(post(f"/bench/renew/s{number}", b"", key))
            messages = []
        text = f"{os.urandom(4).hex()} " + "word " * (100 if messages else SIZES["2k_200"][0])
        messages.append({"role": "user", "content": text})
        body = json.dumps({"model": "mock", "messages": messages}).encode()
        asked_at = time.perf_counter()
        answer = await client.send(post(path, body, key))
        added_ms.append(1000 * (time.perf_counter() - asked_at - ANSWER_S))
        messages.append({"role": "assistant", "content": json.loads(answer)["choices"][0]["message"]["content"]})
        await asyncio.sleep(draw.expovariate(1 / TOOLS_S))
    client.close()


async def measured(stand: Stand) -> Figures:
    added_ms: list[float] = []
    ends_at = time.monotonic() + WARM_UP_S + MEASURED_S
    async with asyncio.TaskGroup() as agents:
        for number in range(NUM_SESSIONS):
            agents.create_task(converse(stand, number, added_ms, ends_at))
        await asyncio.sleep(WARM_UP_S)
        before, began = await asyncio.to_thread(stand.stats), time.perf_counter()
        added_ms.clear()
        await asyncio.sleep(MEASURED_S)
        after, wall_s = await asyncio.to_thread(stand.stats), time.perf_counter() - began
        rate = len(added_ms) / wall_s
        ordered = sorted(added_ms)
    cores = (after["cpu_s"] - before["cpu_s"]) / wall_s
    stitched = (after["num_stitched"] - before["num_stitched"]) / (rate * wall_s)
    assert stitched > 0.8, f"{stitched:.0%} of the turns were stitched"
    note = (
        f"{NUM_SESSIONS:,} sessions on one node, {rate:.0f} calls/s of 2,000 to 5,000 prompt and 200 sampled tokens, "
        f"{stitched:.0%} of them stitched; {cores:.2f} of a core, {1000 * cores / rate:.2f} ms a call; loop lag p99 "
        f"{after['lag_p99_ms']:.0f} ms"
    )
    p50, p99 = statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]
    return {
        "proxy.sessions_2000.cores": _figure(cores, "cores", note),
        "proxy.sessions_2000.added_p50_ms": _figure(p50, "ms", note),
        "proxy.sessions_2000.added_p99_ms": _figure(p99, "ms", note),
        "proxy.sessions_2000.rss_mb": _figure(after["rss_mb"], "MB", note),
    }


def _figure(value: float, unit: str, note: str) -> dict[str, Any]:
    return {"value": round(value, 2), "unit": unit, "note": note}


def run() -> Figures:
    """Measure; returns figure name -> {value, unit, note}. A minute and a half."""
    with ExitStack() as stack:
        stand = Stand(stack, "2k_200", events_per_s=TOKENS_PER_S, peers=False, renders=True, num_sessions=NUM_SESSIONS)
        return asyncio.run(measured(stand))


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
