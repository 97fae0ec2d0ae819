"""An engine's own times, from its metrics page: mean times that calls waited, were prefilled and were decoded.

Replies do not contain them. Sources, as read: vLLM's `v1/metrics/loggers.py`, whose page exists unless it runs with
`--disable-log-stats`; SGLang's `observability/metrics_collector.py` and `req_time_stats.py`, with `--enable-metrics`.
SGLang does not measure the decoding of whole calls.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict

from gangline.domain.errors import GanglineError
from gangline.domain.node_views import EngineTime
from gangline.models.engines.http import EngineHttp
from gangline.models.engines.metrics_page import samples

_PATIENCE_S = 5.0

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


async def engine_times(url: str, api_key: str | None) -> dict[str, EngineTime]:
    """Empty if the engine has no such page, or does not answer within a few seconds."""
    http = EngineHttp(url, api_key=api_key)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            page = await http.get("/metrics")
    except (GanglineError, TimeoutError):
        return {}
    finally:
        await http.close()
    return await asyncio.to_thread(times_of_page, page)
