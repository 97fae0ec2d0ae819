"""Speed of the embedded engine: sampled tokens per second at 1, 8, 16 and 32 concurrent sequences.

The load is a trainer's: groups of eight samples of one prompt (150 tokens), 48 tokens each, temperature 0.7, with
prompts that no earlier measurement has seen, so nothing is served from a warm prefix. Levels take turns and the best
round of each counts: what else the machine does makes a round slower, never faster.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from typing import Any

from gangline.models.engine_server.sampler import SampleRequest
from gangline.models.language.models import SMOLLM2
from gangline.serving.embedded.sampler import EmbeddedSampler
from gangline.serving.embedded.server import create_sampler

LEVELS = (1, 8, 16, 32)
GROUP = 8
NUM_PROMPT_TOKENS = 150
NUM_NEW_TOKENS = 48
ROUNDS = 3


def run() -> dict[str, dict[str, Any]]:
    """Measure; returns figure name -> {value, unit, note}. About two minutes on two idle cores."""
    best = asyncio.run(_measure())
    note = (
        f"SmolLM2-135M float32, {os.cpu_count()} cores; groups of {GROUP}, {NUM_PROMPT_TOKENS} prompt and "
        f"{NUM_NEW_TOKENS} new tokens; best of {ROUNDS}, prompt included"
    )
    figures: dict[str, dict[str, Any]] = {
        f"engine.tokens_per_s_at_{level}": {"value": round(rate, 1), "unit": "tokens/s", "note": note}
        for level, rate in best.items()
    }
    ratio = {"value": round(best[16] / best[1], 2), "unit": "ratio", "note": note}
    return {**figures, "engine.tokens_per_s_ratio_16_to_1": ratio}


async def _measure() -> dict[int, float]:
    sampler = await asyncio.to_thread(create_sampler, SMOLLM2, seed=0)
    prompts = random.Random(0)
    try:
        await _rate(sampler, 1, prompts)
        best: dict[int, float] = dict.fromkeys(LEVELS, 0.0)
        for _ in range(ROUNDS):
            for level in LEVELS:
                best[level] = max(best[level], await _rate(sampler, level, prompts))
        return best
    finally:
        await sampler.close()


async def _rate(sampler: EmbeddedSampler, concurrent: int, prompts: random.Random) -> float:
    """Tokens per second of `concurrent` sequences that start together, until the last one ends."""
    num_groups = -(-concurrent // GROUP)
    groups = [[prompts.randrange(100, 49_000) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(num_groups)]
    started_at_s = time.perf_counter()
    counts = await asyncio.gather(*(_sample(sampler, groups[i // GROUP]) for i in range(concurrent)))
    return sum(counts) / (time.perf_counter() - started_at_s)


async def _sample(sampler: EmbeddedSampler, prompt_ids: list[int]) -> int:
    # No stop id: every sequence gives the same number of tokens.
    request = SampleRequest(prompt_ids=prompt_ids, max_tokens=NUM_NEW_TOKENS, temperature=0.7)
    return len([token async for token in sampler.sample(request)])


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
