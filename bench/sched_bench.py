"""Places in engines' caches against none, simulated: `sched_simulation` over the engine model of `sched_engine`.

96 agents of 8 to 20 turns in groups of eight, 48 at a time for each engine, with tools of a tenth of a second to a
minute. The cache holds the mean contexts of a third of the 48, or one and a half times as many as there are. Ratios are
of seconds for the same sessions, medians of three traces (`fits_ratio`: of one).

- `sched.simulated.sessions_ratio.*`: sessions in a time with places, over those without
- `sched.simulated.hit_rate.*`: prompt tokens that were in the cache, with places; `*_without`
- `sched.simulated.fits_ratio.*`: as `sessions_ratio`, with a cache that holds all
- `sched.simulated.longest_wait_s.*`

`cpu` is an engine that computes prompts slowly, as a small model on a CPU does, with a tenth of the tokens; `gpu` has
an 8B model's times on one H100, roughly; `gpu_long` the same with prompts of three times the length (contexts of 15 to
40 thousand tokens at the end).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from sched_engine import EngineModel, Speed
from sched_simulation import Result, simulate, traces

from gangline.node.backends.admission import Admission

NUM_GROUPS, GROUP_SIZE, NUM_SLOTS, SEEDS = 12, 8, 48, (1, 2, 3)


class Setup(NamedTuple):
    speed: Speed
    prompts: float
    """Factor of their lengths, as `replies` of theirs."""
    replies: float
    num_engines: int = 1


_GPU = Speed(step_s=0.008, prefill_s=5e-5, decode_s=1e-4, max_step_tokens=8192)
SETUPS = {
    "cpu": Setup(Speed(step_s=0.03, prefill_s=1e-3, decode_s=0.004), 0.1, 0.1),
    "gpu": Setup(_GPU, 1.0, 1.0),
    "gpu_long": Setup(_GPU, 3.0, 1.0),
}

Figures = dict[str, dict[str, Any]]


def simulated(setup: Setup, fraction: float, policy: Admission | None, seed: int) -> Result:
    """fraction: of the contexts of all sessions that live at a time, which the caches hold together."""
    num_engines = setup.num_engines
    rng = random.Random(seed)
    work = traces(NUM_GROUPS * num_engines, GROUP_SIZE, rng, prompts=setup.prompts, replies=setup.replies)
    num_slots = NUM_SLOTS * num_engines
    capacity = int(num_slots * fmean(one.mean_context for one in work) * fraction / num_engines)
    return simulate(work, [EngineModel(capacity, setup.speed) for _ in range(num_engines)], num_slots, policy)


def run() -> Figures:
    figures: Figures = {}
    for name, setup in SETUPS.items():
        tight = [_both(setup, 1 / 3, seed) for seed in SEEDS]
        loose = [_both(setup, 1.5, SEEDS[0])]
        values = {
            f"sessions_ratio.{name}": (_ratio(tight), "x"),
            f"fits_ratio.{name}": (_ratio(loose), "x"),
            f"hit_rate.{name}": (median(places.hit_rate for _, places in tight), ""),
            f"hit_rate.{name}_without": (median(without.hit_rate for without, _ in tight), ""),
            f"longest_wait_s.{name}": (max(places.longest_wait_s for _, places in tight), "s"),
        }
        note = f"{NUM_SLOTS * setup.num_engines} sessions at a time; simulated"
        figures |= {
            f"sched.simulated.{figure}": {"value": round(value, 2), "unit": unit, "note": note}
            for figure, (value, unit) in values.items()
        }
    return figures


def _both(setup: Setup, fraction: float, seed: int) -> tuple[Result, Result]:
    return simulated(setup, fraction, None, seed), simulated(setup, fraction, Admission(), seed)


def _ratio(pairs: Sequence[tuple[Result, Result]]) -> float:
    return median(without.seconds / places.seconds for without, places in pairs)


if __name__ == "__main__":
    for figure, found in run().items():
        print(figure, found["value"], found["unit"])
