"""slime's `Sample`, as far as samples are made and read: its fields, their types and defaults, its statuses.

slime is on no package index. Described after github.com/THUDM/slime at 624b824 (2026-08-21), `slime/utils/types.py`;
what its rollout manager does with rewards after its `slime/ray/rollout.py`. `tests/trainers/test_slime.py` compares
both with slime itself.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None

    def get_reward_value(self, args: Any) -> Any:
        return self.reward if not args.reward_key else self.reward[args.reward_key]  # type: ignore[index]


Sample.Status = Status  # type: ignore[attr-defined]  # it is a class within the class there


def normalised(samples: list[Sample], num_samples: int, *, divided: bool) -> list[float]:
    """slime's own comparing of rewards: rows of `num_samples`, the mean taken off, divided by the sample deviation."""
    found = list[float]()
    for start in range(0, len(samples), num_samples):
        rewards = [float(sample.reward) for sample in samples[start : start + num_samples]]  # type: ignore[arg-type]
        mean = statistics.fmean(rewards)
        scale = statistics.stdev(rewards) + 1e-6 if divided else 1.0
        found += [(reward - mean) / scale for reward in rewards]
    return found
