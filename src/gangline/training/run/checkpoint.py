"""Checkpoints: a folder a step, whole or not there, of all that a trainer needs to go on after a kill."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from gangline.durable import sync, sync_tree
from gangline.private import close_files, make_private_folder
from gangline.training.collecting.buffer import BufferState

__all__ = ["Checkpoints", "TrainerState"]

_STATE = "state.json"
_UNFINISHED = ".unfinished"


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trainer is."""

    step: int
    """Steps done."""
    version: int
    """Policy version of the weights after them."""
    settled: frozenset[str]
    """Tasks that need not be run again: trained on, not worth it, or too old."""
    buffer: BufferState
    wall_s: float
    """Seconds that the run has taken, over all its lives."""


class Checkpoints:
    """Checkpoints of one run. keep: number of checkpoints to keep."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, state: TrainerState, save_learner: Callable[[Path], None]) -> Path:
        """Durable on return. save_learner: writes the learner's state into a folder."""
        make_private_folder(self._folder)
        target = self._folder / f"step-{state.step:06d}"
        unfinished = target.with_suffix(_UNFINISHED)
        shutil.rmtree(unfinished, ignore_errors=True)
        make_private_folder(unfinished)
        save_learner(unfinished)
        (unfinished / _STATE).write_bytes(msgspec.json.encode(state))
        close_files(unfinished)
        sync_tree(unfinished)
        shutil.rmtree(target, ignore_errors=True)  # of a step that was done before a restart from an earlier one
        unfinished.rename(target)
        sync(self._folder)
        for old in self._all()[: -self._keep]:
            shutil.rmtree(old)
        return target

    def latest(self) -> tuple[Path, TrainerState] | None:
        """None where no step was saved."""
        found = self._all()
        if not found:
            return None
        return found[-1], msgspec.json.decode((found[-1] / _STATE).read_bytes(), type=TrainerState)

    def _all(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.glob("step-*") if path.suffix != _UNFINISHED)
