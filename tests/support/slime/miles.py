"""miles's types of a rollout call. Described after github.com/radixark/miles at 31f1ca9 (2026-08-21),
`miles/rollout/base_types.py`; `tests/trainers/test_miles.py` compares them with miles itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["RolloutFnEvalInput", "RolloutFnTrainInput", "RolloutFnTrainOutput"]


@dataclass(frozen=True)
class RolloutFnTrainInput:
    rollout_id: int
    weight_version: int | None = None

    @property
    def evaluation(self) -> bool:
        return False


@dataclass(frozen=True)
class RolloutFnEvalInput:
    rollout_id: int
    generate_state: Any = None
    weight_version: str | None = None
    hf_dir: str | None = None

    @property
    def evaluation(self) -> bool:
        return True


@dataclass
class RolloutFnTrainOutput:
    samples: Any
    metrics: dict[str, Any] | None = None
