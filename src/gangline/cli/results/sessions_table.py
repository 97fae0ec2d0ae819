"""Sessions as CSV, one line each: outcome, reward, tokens, seconds and resources. Cost per reward is plotted from it.

An empty field is unknown. Amounts of `agent_` are of INIT and RUN, those of `grading_` of POSTRUN.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from gangline.domain.lifecycle import STAGES
from gangline.domain.session import SessionResult
from gangline.domain.usage import AMOUNTS
from gangline.machine.durable import replacing

__all__ = ["COLUMNS", "write_sessions_csv"]

_PARTS = ("agent", "grading")
COLUMNS: tuple[str, ...] = (
    *("task_id", "session_id", "attempt", "outcome", "reward"),
    *("num_completions", "num_prompt_tokens", "num_sampled_tokens"),
    *(f"{stage}_s" for stage in STAGES),
    *(f"{part}_{amount}" for part in _PARTS for amount in AMOUNTS),
)


def write_sessions_csv(results: Iterable[SessionResult], path: Path) -> int:
    """Returns how many sessions."""
    num = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, aside.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for result in results:
            writer.writerow(_line(result))
            num += 1
    return num


def _line(result: SessionResult) -> list[str | float | None]:
    calls = [completion for completion in result.completions if completion.choice_index == 0]
    num_prompt = sum(completion.prompt_shared + len(completion.prompt_suffix_ids) for completion in calls)
    num_sampled = sum(len(completion.sampled_ids) for completion in result.completions)
    timings = result.timings
    seconds = {stage: sum(one.ended_at - one.started_at for one in timings if one.stage == stage) for stage in STAGES}
    parts = [None if result.usage is None else getattr(result.usage, part) for part in _PARTS]
    return [
        *(result.task_id, result.session_id, result.attempt, result.outcome, result.reward),
        *(len(result.completions), num_prompt, num_sampled),
        *(f"{seconds[stage]:.3f}" for stage in STAGES),
        *(None if part is None else getattr(part, amount) for part in parts for amount in AMOUNTS),
    ]
