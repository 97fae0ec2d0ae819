"""Speed of `gangline check-rows`: JSON lines of slime's samples, from the file to the report."""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from gangline.tasks.check_rows.check import check_records
from gangline.tasks.check_rows.dump import read_records
from gangline.tasks.check_rows.rules import Vocabulary

NUM_ROWS, TURNS, SAMPLED, CONTEXT = 100, 10, 500, 500


def run() -> dict[str, dict[str, Any]]:
    """Measure; returns figure name -> {value, unit, note}. A few seconds."""
    chance = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w") as file:
            for index in range(NUM_ROWS):
                file.write(json.dumps(_row(chance, index)) + "\n")
        rates: list[float] = []
        for _ in range(3):
            start = time.perf_counter()
            report = check_records(read_records(path), vocabulary=Vocabulary(size=150_000, stop_ids={2}))
            rates.append(report.num_tokens / (time.perf_counter() - start))
            assert report.ok, report.findings[:3]
    return {
        "check_rows.tokens_per_s": {
            "value": round(max(rates)),
            "unit": "tokens/s",
            "note": f"{NUM_ROWS * TURNS * (CONTEXT + SAMPLED):,} tokens of JSON lines, one core; best of 3",
        }
    }


def _row(chance: random.Random, index: int) -> dict[str, Any]:
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for _ in range(TURNS):
        tokens += [chance.randint(3, 149_999) for _ in range(CONTEXT + SAMPLED - 1)] + [2]
        mask += [0] * CONTEXT + [1] * SAMPLED
        logprobs += [0.0] * CONTEXT + [-chance.expovariate(2.0) - 1e-6 for _ in range(SAMPLED)]
    return {
        "tokens": tokens,
        "response_length": len(tokens) - CONTEXT,
        "loss_mask": mask[CONTEXT:],
        "rollout_log_probs": logprobs[CONTEXT:],
        "reward": 1.0,
        "status": "completed",
        "session_id": str(index),
    }
