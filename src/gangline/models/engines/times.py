"""An engine's own times, from its metrics page: mean times that calls waited, were prefilled and were decoded.

Replies do not contain them. Sources, as read: vLLM's `v1/metrics/loggers.py`, whose page exists unless it runs with
`--disable-log-stats`; SGLang's `observability/metrics_collector.py` and `req_time_stats.py`, with `--enable-metrics`.
SGLang does not measure the decoding of whole calls.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import defaultdict

from gangline.domain.errors import GanglineError
from gangline.domain.node_views import EngineTime
from gangline.models.engines.http import EngineHttp

_PATIENCE_S = 5.0

_PHASES = {
    b"vllm:request_queue_time_seconds": "queue",
    b"vllm:request_prefill_time_seconds": "prefill",
    b"vllm:request_decode_time_seconds": "decode",
    b"sglang:queue_time_seconds": "queue",
    b"sglang:per_stage_req_latency_seconds": "prefill",
}
_STAGED = b"sglang:per_stage_req_latency_seconds"
_SAMPLE = re.compile(
    rb"^(" + b"|".join(map(re.escape, _PHASES)) + rb")_(sum|count)(\{[^\n]*\})?[ \t]+([^ \t\r\n]+)", re.MULTILINE
)


def times_of_page(page: bytes) -> dict[str, EngineTime]:
    """Phase -> its mean over all calls since the engine's start, from Prometheus text format. Empty if the page has no
    such metrics, or no call has ended."""
    totals: dict[str, dict[bytes, float]] = defaultdict(lambda: {b"sum": 0.0, b"count": 0.0})
    for name, part, labels, value in _SAMPLE.findall(page):
        if name != _STAGED or b'stage="prefill_forward"' in labels:
            totals[_PHASES[name]][part] += _number(value)
    return {
        phase: EngineTime(mean_s=total[b"sum"] / total[b"count"], num_calls=int(total[b"count"]))
        for phase, total in totals.items()
        if math.isfinite(total[b"sum"]) and 0 < total[b"count"] < math.inf
    }


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


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
