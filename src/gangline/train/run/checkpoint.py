"""Checkpoints: one folder per step, complete or absent, with everything a trainer needs to resume after a kill."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from gangline.domain.errors import StoreError
from gangline.machine.durable import making, sync, sync_tree
from gangline.machine.private import close_files, make_private_folder
from gangline.train.collecting.buffer import BufferState

_log = logging.getLogger("gangline.trainer")

_STATE = "state.json"
_FILES = "files.json"
"""File with the SHA-256 of every other file: name -> digest."""
_UNFINISHED = ".unfinished"


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a trainer."""

    step: int
    """Steps done."""
    version: int
    """Policy version of the weights after these steps."""
    settled: frozenset[str]
    """Tasks that need not be run again: trained on, not worth training on, or too old."""
    buffer: BufferState
    wall_s: float
    """Seconds that the run has taken, over all its starts."""


def _warn(line: str) -> None:
    _log.warning("trainer.checkpoint_damaged message=%s", line)


class Checkpoints:
    """Checkpoints of one run. keep: number of checkpoints to keep."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, state: TrainerState, save_learner: Callable[[Path], None]) -> Path:
        """Durable on return. save_learner: writes the learner's state into a folder.

        Raises: DiskFull, OSError; earlier checkpoints are left unchanged.
        """
        make_private_folder(self._folder)
        target = self._folder / f"step-{state.step:06d}"
        unfinished = target.with_suffix(_UNFINISHED)
        shutil.rmtree(unfinished, ignore_errors=True)
        with making(unfinished):
            make_private_folder(unfinished)
            save_learner(unfinished)
            (unfinished / _STATE).write_bytes(msgspec.json.encode(state))
            (unfinished / _FILES).write_bytes(msgspec.json.encode(_digests(unfinished)))
            close_files(unfinished)
            sync_tree(unfinished)
        shutil.rmtree(target, ignore_errors=True)  # left by a run that restarted from an earlier step
        unfinished.rename(target)
        sync(self._folder)
        for old in self._all()[: -self._keep]:
            shutil.rmtree(old)
        return target

    def latest(self, warn: Callable[[str], None] = _warn) -> tuple[Path, TrainerState] | None:
        """The newest complete checkpoint; None if no step was saved. warn: called with a line for each damaged
        checkpoint.

        Raises: StoreError if all are damaged.
        """
        damaged: list[str] = []
        for folder in reversed(self._all()):
            if (why := _damage_of(folder)) is None:
                for line in damaged:
                    warn(f"{line} The run continues from {folder.name}, the checkpoint before it.")
                return folder, msgspec.json.decode((folder / _STATE).read_bytes(), type=TrainerState)
            damaged.append(f"The checkpoint {folder} is damaged: {why}.")
        if damaged:
            raise StoreError(
                f"{' '.join(damaged)} There is no whole one to continue from: put back a copy of one, or remove "
                f"{self._folder.parent} and begin again."
            )
        return None

    def _all(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.glob("step-*") if path.suffix != _UNFINISHED)


def checkpoint_digest(folder: Path) -> str:
    """Digest of all files of a complete checkpoint, independent of its location."""
    return _digest(folder / _FILES)


def _digests(folder: Path) -> dict[str, str]:
    """Digests of all files except the list itself."""
    return {
        str(path.relative_to(folder)): _digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _FILES
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damage_of(folder: Path) -> str | None:
    """Returns why a checkpoint is damaged; None if it is complete."""
    try:
        wanted = msgspec.json.decode((folder / _FILES).read_bytes(), type=dict[str, str])
        found = _digests(folder)
    except (OSError, msgspec.MsgspecError) as error:
        return f"{_FILES} cannot be read ({error})"
    if missing := sorted(wanted.keys() - found.keys()):
        return f"{missing[0]} is missing"
    changed = sorted(name for name, digest in wanted.items() if found[name] != digest)
    return f"{changed[0]} is not what was written" if changed else None
