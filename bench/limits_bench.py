"""What a call of the proxy cannot do without: the engine's JSON, the kernel and the disk, alongside all that it takes.

- `kernel`: processor time in the kernel, which is sockets and the journal's file.
- `json`: the engine's answer decoded by the code that the proxy uses, alone.
- `disk`: a record of that size written and synced alone. It is waited for, and takes hardly any processor time; calls
  that end at the same time share one.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack

from mock_engine import Replies
from proxy_bench import SIZES, Figures, Stand

from gangline.models.engines.vllm.wire import WireReply, decode_reply, engine_reply

NUM_CALLS = {"small": 2_000, "2k_200": 800, "20k_500": 400}
ROUNDS = 5


def run() -> Figures:
    """Measure; returns figure name -> {value, unit, note}. Half a minute."""
    return {f"proxy.{size}.cpu_ms": _figure(size) for size in SIZES}


def _figure(size: str) -> dict[str, object]:
    with ExitStack() as stack:
        stand = Stand(stack, size, peers=False)
        stand.load("ours", 32, NUM_CALLS[size] // 4)
        whole, kernel = zip(*(_call_ms(stand, NUM_CALLS[size]) for _ in range(ROUNDS)), strict=True)
    replies = Replies(*SIZES[size])
    answer = replies.whole(replies.prompt_ids)
    json_ms = _median_ms(lambda: engine_reply(decode_reply(answer, WireReply, "")), 200)
    total_ms, kernel_ms = statistics.median(whole), statistics.median(kernel)
    note = (
        f"all of a call, 32 at once; of it {kernel_ms:.2f} ms in the kernel ({kernel_ms / total_ms:.0%}) and "
        f"{json_ms:.2f} ms to decode the engine's {len(answer) / 1000:.0f} kB of JSON ({json_ms / total_ms:.0%}); "
        f"alongside it, {_sync_ms(len(answer) // 4):.2f} ms until the disk has a record, which calls share"
    )
    return {"value": round(total_ms, 2), "unit": "ms", "note": note}


def _call_ms(stand: Stand, num_calls: int) -> tuple[float, float]:
    """Of the node's processor time for a call: all of it, and what the kernel takes."""
    before = stand.stats()
    stand.load("ours", 32, num_calls)
    after = stand.stats()
    whole_ms, kernel_ms = (1000 * (after[name] - before[name]) / num_calls for name in ("cpu_s", "kernel_s"))
    return whole_ms, kernel_ms


def _sync_ms(num_bytes: int) -> float:
    """num_bytes: a record's; ids are four bytes each, about a quarter of their digits with what stands around them."""
    with tempfile.NamedTemporaryFile(prefix="gangline-bench-") as file:

        def write() -> None:
            os.write(file.fileno(), bytes(num_bytes))
            os.fdatasync(file.fileno())

        return _median_ms(write, 100)


def _median_ms(work: Callable[[], object], rounds: int) -> float:
    taken: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken)


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
