"""Settings of a run's schedule: steps, groups per step, and limits on the age, validity and reuse of groups."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gangline.train.collecting.admission import StalenessSettings
from gangline.train.collecting.groups import ValiditySettings
from gangline.train.options import TrainingOptions


class ScheduleSettings(TrainingOptions):
    mode: Literal["async", "sync"] = "async"
    steps: int = Field(default=100, ge=1)
    groups_per_step: int = Field(default=8, ge=1)
    groups_in_flight: int | None = Field(default=None, ge=1)
    """Only for async: groups always in flight. None: as many as a step uses."""
    staleness: StalenessSettings = StalenessSettings()
    max_uses: int = Field(default=1, ge=1)
    """How often a group is used for training."""
    validity: ValiditySettings = ValiditySettings(on_invalid="resubmit")
    checkpoint_every: int = Field(default=1, ge=1)
    """Steps. Evaluated steps and the last step always have a checkpoint."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept on disk; while one is written, one more."""
    patience_s: float = Field(default=600.0, ge=0)
    """How long engines, nodes and server may be unreachable when weights are due."""

    @property
    def num_in_flight(self) -> int:
        """Groups in flight, with the default applied."""
        return self.groups_in_flight or self.groups_per_step
