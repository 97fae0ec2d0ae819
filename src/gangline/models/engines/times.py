"""An engine's own times, from its metrics page: mean times that calls waited, were prefilled and were decoded; times to
the first token; and how many calls wait in it.

Replies do not contain them. Sources, as read: vLLM's `v1/metrics/loggers.py`, whose page exists unless it runs with
`--disable-log-stats`; SGLang's `observability/metrics_collector.py` and `req_time_stats.py`, with `--enable-metrics`.
SGLang does not measure the decoding of whole calls.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict

import msgspec

from gangline.domain.errors import GanglineError
from gangline.domain.node_views import EngineTime
from gangline.models.engines.metrics_page import read_page, samples

_PHASES = {
    "vllm:request_queue_time_seconds": "queue",
    "vllm:request_prefill_time_seconds": "prefill",
    "vllm:request_decode_time_seconds": "decode",
    "sglang:queue_time_seconds": "queue",
    "sglang:per_stage_req_latency_seconds": "prefill",
}
_STAGED = "sglang:per_stage_req_latency_seconds"
_PARTS = {f"{name}_{part}": (phase, part) for name, phase in _PHASES.items() for part in ("sum", "count")}


def times_of_page(page: bytes) -> dict[str, EngineTime]:
    """Phase -> its mean over all calls since the engine's start, from Prometheus text format. Empty if the page has no
    such metrics, or no call has ended."""
    totals: dict[str, dict[str, float]] = defaultdict(lambda: {"sum": 0.0, "count": 0.0})
    for sample in samples(page, tuple(_PARTS)):
        if not sample.name.startswith(_STAGED) or sample.labels.get("stage") == "prefill_forward":
            phase, part = _PARTS[sample.name]
            totals[phase][part] += sample.value
    return {
        phase: EngineTime(mean_s=total["sum"] / total["count"], num_calls=int(total["count"]))
        for phase, total in totals.items()
        if math.isfinite(total["sum"]) and 0 < total["count"] < math.inf
    }


_LOAD = {
    "vllm:num_requests_waiting": "num_queued",
    "vllm:time_to_first_token_seconds_sum": "first_s",
    "vllm:time_to_first_token_seconds_count": "num_first",
    "sglang:num_queue_reqs": "num_queued",
    "sglang:time_to_first_token_seconds_sum": "first_s",
    "sglang:time_to_first_token_seconds_count": "num_first",
}


class EngineLoad(msgspec.Struct, frozen=True):
    """Sums over the engine's replicas."""

    num_queued: int | None
    """Calls that wait in it; None: not on its page."""
    first_s: float
    """Total time to the first token, over the calls since its start."""
    num_first: int
    """Their number."""


def load_of_page(page: bytes) -> EngineLoad:
    totals: dict[str, float] = defaultdict(float)
    for sample in samples(page, tuple(_LOAD)):
        if math.isfinite(sample.value):
            totals[_LOAD[sample.name]] += sample.value
    queued = int(totals["num_queued"]) if "num_queued" in totals else None
    return EngineLoad(queued, totals["first_s"], int(totals["num_first"]))


async def engine_times(url: str, api_key: str | None) -> dict[str, EngineTime]:
    """Empty if the engine has no such page, or does not answer within a few seconds."""
    try:
        page = await read_page(url, api_key)
    except GanglineError:
        return {}
    return await asyncio.to_thread(times_of_page, page or b"")
