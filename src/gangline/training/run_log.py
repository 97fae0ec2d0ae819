"""What a run writes about itself: a line of JSON a step, and the same for TensorBoard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import msgspec

from gangline.training.weight_update import UpdateProfile

__all__ = ["RunLog", "StepRecord", "read_records"]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a trainer."""

    step: int
    """From 1."""
    version: int
    """Policy version that was trained, before the update."""
    wall_s: float
    """Since the run began, over all its lives; without the time between them."""
    reward_mean: float
    """Over the sessions that were trained on."""
    reward_deviation: float
    """Mean over the groups of each one's deviation."""
    collected_reward_mean: float | None
    """Over all whole groups that ended since the step before, those that were not admitted included."""
    num_groups: int
    num_sessions: int
    num_trained_tokens: int
    lag: dict[int, int]
    """versions behind -> trained tokens."""
    num_not_admitted: int
    num_invalid: int
    num_stale: int
    """Groups, since the step before."""
    waited_s: float
    """For groups."""
    trained_s: float
    checkpoint_s: float
    """Of the step before."""
    update: UpdateProfile
    """The weight update that followed."""
    learner: dict[str, float]

    def scalars(self) -> dict[str, float]:
        """Every number, by a name of TensorBoard's form."""
        found = dict[str, float]()
        for name, value in msgspec.to_builtins(self).items():
            if name in ("update", "learner"):
                found |= {f"{name}/{inner}": float(one) for inner, one in value.items()}
            elif isinstance(value, int | float) and name not in ("step", "version"):
                found[f"rollout/{name}"] = float(value)
        total = sum(self.lag.values())
        if total:
            found["rollout/lag_mean"] = sum(lag * num for lag, num in self.lag.items()) / total
        return found


class RunLog:
    """`metrics.jsonl` and a folder `tensorboard` in the run's folder."""

    def __init__(self, folder: Path, *, last_step: int = 0) -> None:
        """last_step: that a checkpoint has; what was written of later ones is taken back, for they come again."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        kept = [record for record in read_records(self._path) if record.step <= last_step]
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in kept))
        unfinished.replace(self._path)
        self._lines = self._path.open("ab")
        self._board = _board(folder / "tensorboard", last_step)

    def write(self, record: StepRecord) -> None:
        """On the disk when it returns."""
        self._lines.write(msgspec.json.encode(record) + b"\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())
        for name, value in record.scalars().items():
            self._board.add_scalar(name, value, record.step, walltime=None)
        self._board.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._lines.close()
        self._board.close()


def read_records(path: Path) -> list[StepRecord]:
    """Of a `metrics.jsonl`; a last line that was cut off is left out."""
    if not path.exists():
        return []
    *lines, _cut_off = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=StepRecord) for line in lines]


def _board(folder: Path, last_step: int) -> Any:
    import tensorboardX  # noqa: PLC0415 - of the extra `training`

    return tensorboardX.SummaryWriter(str(folder), purge_step=last_step + 1)
