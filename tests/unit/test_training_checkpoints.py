"""Checkpoints: a damaged one is passed over, and a full disk is told in one sentence and leaves earlier ones whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gangline.domain.errors import DiskFull, StoreError
from gangline.machine.durable import disk_full_at
from gangline.train.collecting.buffer import BufferState
from gangline.train.run.checkpoint import Checkpoints, TrainerState
from gangline.train.weights.update import WeightFolders

NAMES = ("trained.safetensors", "optimiser.pt", "state.json", "files.json")
DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: os.truncate(path, path.stat().st_size // 2),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "one bit": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a dead link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


def write(folder: Path) -> None:
    (folder / "trained.safetensors").write_bytes(b"\x08" + bytes(99))
    (folder / "optimiser.pt").write_bytes(b"PK" + bytes(99))


def saved(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder / "checkpoints")
    for step in steps:
        state = TrainerState(step=step, version=step, settled=frozenset(), buffer=BufferState({}), wall_s=1.0)
        checkpoints.save(state, write)
    return checkpoints


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_last_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    damage(tmp_path / "checkpoints" / "step-000002" / name)
    warnings: list[str] = []
    found = checkpoints.latest(warnings.append)
    assert found is not None
    assert found[1].step == 1
    (line,) = warnings
    assert name in line
    assert "continues from step-000001" in line

    saved(tmp_path, 2)  # the step is done again
    again = checkpoints.latest(warnings.append)
    assert again is not None
    assert again[1].step == 2
    assert len(warnings) == 1


def test_without_a_whole_checkpoint_the_error_says_what_to_do(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    for path in (tmp_path / "checkpoints").glob("*/optimiser.pt"):
        os.truncate(path, 5)
    with pytest.raises(StoreError, match=r"step-000002 is damaged: optimiser.pt is not what was written.*begin again"):
        checkpoints.latest()


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "checkpoints").latest() is None


FULL = {
    "Python's": OSError(errno.ENOSPC, "No space left on device"),
    "a quota's": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "safetensors'": Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
}


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
def test_a_full_disk_is_one_sentence_and_leaves_what_was_whole(tmp_path: Path, error: Exception) -> None:
    checkpoints = saved(tmp_path, 1)

    def fail(folder: Path) -> None:
        write(folder)
        raise error

    state = TrainerState(step=2, version=2, settled=frozenset(), buffer=BufferState({}), wall_s=1.0)
    with pytest.raises(DiskFull, match=r"the disk of .*step-000002.* is full \(.* free\).*Free some space"):
        checkpoints.save(state, fail)
    with pytest.raises(DiskFull, match="is full"):
        WeightFolders(tmp_path / "weights", keep_last=1).write(fail, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert list((tmp_path / "weights").iterdir()) == []
    found = checkpoints.latest()
    assert found is not None
    assert found[1].step == 1


def test_what_torch_raises_is_a_full_disk_only_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")
    assert disk_full_at(error, tmp_path / "not" / "there") is None
    usage = shutil.disk_usage(tmp_path)

    def nearly_full(_path: Path) -> tuple[int, int, int]:
        return usage._replace(free=4096)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    assert disk_full_at(error, tmp_path) is not None
    assert disk_full_at(RuntimeError("CUDA out of memory"), tmp_path) is None
