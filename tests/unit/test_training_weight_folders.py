"""Folders of weights: whole or not there, and none taken away from an engine that reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.train.weights.update import WeightFolders, num_bytes
from support.node.weights import save


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        save(folder)
        raise OSError("the disk is full")

    folders = WeightFolders(tmp_path / "weights", 1)
    with pytest.raises(OSError, match="full"):
        folders.write(fails, 1)
    path = folders.write(save, 1)
    assert (path.name, num_bytes(path)) == ("v1", 7)
    assert names(tmp_path / "weights") == ["v1"]


def test_a_folder_without_weights_is_no_folder(tmp_path: Path) -> None:
    def saves_no_weights(folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    with pytest.raises(InvalidRequest, match=r"no \*\.safetensors"):
        WeightFolders(tmp_path, 1).write(saves_no_weights, 1)


def test_the_same_version_again_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = WeightFolders(tmp_path, 2)
    assert [folders.write(save, 4).name for _ in range(3)] == ["v4", "v4.2", "v4.3"]


def test_the_newest_stay_and_those_that_are_read(tmp_path: Path) -> None:
    folders = WeightFolders(tmp_path, 2)
    (tmp_path / "notes").mkdir()
    paths = [folders.write(save, version) for version in range(8, 12)]
    folders.prune({paths[0]})
    assert names(tmp_path) == ["notes", "v10", "v11", "v8"]
    folders.prune(())
    assert names(tmp_path) == ["notes", "v10", "v11"]


def test_the_last_weights_are_always_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least the last"):
        WeightFolders(tmp_path, 0)
