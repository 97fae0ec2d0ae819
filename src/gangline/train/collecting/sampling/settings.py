"""The settings of samplers: `data.sampler` of an experiment."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gangline.train.options import TrainingOptions

Label = str | int | bool
"""Value of the labelling key in a task's metadata."""


class DifficultyPool(TrainingOptions):
    threshold: float
    """Largest mean reward of tasks in this pool."""
    weight: float = Field(ge=0)
    """Weight of each of its tasks; 0 retires them."""


def _pools() -> dict[str, DifficultyPool]:
    return {
        "hard": DifficultyPool(threshold=0.25, weight=0.2),
        "normal": DifficultyPool(threshold=0.75, weight=1.0),
        "easy": DifficultyPool(threshold=1.0, weight=0.2),
    }


class DifficultyPoolSettings(TrainingOptions):
    """Assigns tasks to pools by their last measured mean reward, like prime-rl's sampler of the same name."""

    kind: Literal["difficulty_pool"]
    pools: dict[str, DifficultyPool] = Field(default_factory=_pools, min_length=1)
    """By name, in rising order of threshold. Means above the last threshold belong to the last pool."""
    unseen_weight: float = Field(default=1.0, gt=0)
    """Weight of each task that was not yet measured."""

    @model_validator(mode="after")
    def _fits(self) -> DifficultyPoolSettings:
        thresholds = [pool.threshold for pool in self.pools.values()]
        if any(one >= other for one, other in itertools.pairwise(thresholds)):
            raise ValueError("thresholds must rise from pool to pool")
        if not any(pool.weight for pool in self.pools.values()):
            raise ValueError("at least one pool needs a weight above 0")
        if "unseen" in self.pools:
            raise ValueError("the pool `unseen` is that of tasks that were not measured yet: use another name")
        return self


class Stage(TrainingOptions):
    """A part of the run. It ends at `until` or `most_tasks`, whichever comes first."""

    shares: Mapping[Label, float] = Field(min_length=1)
    """Label -> share of tasks drawn with this label, relative to the other labels."""
    until: float | None = None
    """The stage ends when the mean reward of its last `window` measured tasks reaches this value."""
    window: int = Field(default=32, ge=1)
    """Number of tasks; only for `until`."""
    most_tasks: int | None = Field(default=None, ge=1)
    """Number of tasks after which the next stage begins."""

    @model_validator(mode="after")
    def _fits(self) -> Stage:
        if any(share <= 0 for share in self.shares.values()):
            raise ValueError("shares must be above 0: leave out labels that the stage does not draw from")
        return self

    @property
    def ends(self) -> bool:
        return self.until is not None or self.most_tasks is not None


class StageSettings(TrainingOptions):
    """A curriculum by labels: consecutive stages, each a mixture of tasks by a key of their metadata."""

    kind: Literal["stages"]
    key: str = "difficulty"
    """Key in each task's metadata."""
    stages: tuple[Stage, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> StageSettings:
        *earlier, last = self.stages
        if last.ends:
            raise ValueError("the last stage lasts to the end of the run: leave out its until and most_tasks")
        if not all(stage.ends for stage in earlier):
            raise ValueError("a stage before the last needs until or most_tasks, else the next one never begins")
        return self


SamplerSettings = Annotated[DifficultyPoolSettings | StageSettings, Field(discriminator="kind")]
