"""An engine's prefix cache: how many tokens it holds, and how many were looked up and found, from its metrics page.

Sources, as read: vLLM 0.32's `v1/metrics/loggers.py` and `v1/engine/core_client.py`; SGLang's
`observability/metrics_collector.py`, whose page exists with `--enable-metrics`. Without the page, SGLang tells the size
alone (`/get_server_info`).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import msgspec

from gangline.domain.errors import GanglineError
from gangline.models.engines.http import EngineHttp
from gangline.models.engines.metrics_page import read_page, samples
from gangline.models.engines.replies import decode
from gangline.models.engines.times import EngineLoad, load_of_page

_PATIENCE_S = 5.0
_COUNTERS = {
    "vllm:prefix_cache_queries_total": "queried",
    "vllm:prefix_cache_hits_total": "hit",
    "sglang:max_total_num_tokens": "size",
    "sglang:prompt_tokens_total": "queried",
    "sglang:cached_tokens_total": "hit",
}
_CONFIG = "vllm:cache_config_info"
_SIZES = ("kv_cache_size_tokens", "num_gpu_blocks", "block_size")


class EngineCache(msgspec.Struct, frozen=True):
    num_tokens: int
    """Its size: tokens whose keys and values it holds."""
    num_queried: int = 0
    """Tokens of prompts, since the engine's start."""
    num_hit: int = 0
    """Those that were in the cache."""


def cache_of_page(page: bytes) -> EngineCache | None:
    """From Prometheus text format, summed over the engine's replicas. None if the page does not tell the size."""
    found = Counter[str]()
    blocks = 0
    for sample in samples(page, (*_COUNTERS, _CONFIG)):
        if sample.name == _CONFIG:
            size, num, block = (_number(sample.labels.get(name, "")) for name in _SIZES)
            found["size"] += size
            blocks = max(blocks, num * block)
        elif math.isfinite(sample.value):
            found[_COUNTERS[sample.name]] += int(sample.value)
    size = found["size"] or blocks  # each of vLLM's replicas reports its own tokens, but the blocks of all
    return EngineCache(size, found["queried"], found["hit"]) if size > 0 else None


def _number(label: str) -> int:
    return int(label) if label.isdecimal() else 0  # "None" where the engine has not counted it


async def engine_page(url: str, api_key: str | None) -> tuple[EngineCache | None, EngineLoad | None]:
    """From one reading of its page. No cache: the engine does not report its size. No load: it has no page.

    Raises: EngineError, when it does not answer within a few seconds too.
    """
    page = await read_page(url, api_key)
    if page is None:
        return await _size_alone(url, api_key), None
    cache, load = await asyncio.to_thread(lambda: (cache_of_page(page), load_of_page(page)))
    return cache or await _size_alone(url, api_key), load


async def _size_alone(url: str, api_key: str | None) -> EngineCache | None:
    http = EngineHttp(url, api_key=api_key)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            size = decode(await http.get("/get_server_info"), dict[str, Any], url).get("max_total_num_tokens")
            return EngineCache(size) if isinstance(size, int) and size > 0 else None
    except (GanglineError, TimeoutError):
        return None
    finally:
        await http.close()
