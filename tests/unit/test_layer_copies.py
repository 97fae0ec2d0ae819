"""Copies of folders for checkpoints: holes are never read, and nobody has a tree copied without end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gangline.domain.errors import RuntimeFailed
from gangline.sandbox.layers.copying import TreeCopy, copy_content, have_equal_content
from gangline.sandbox.layers.records import measured

FOLDER = os.O_RDONLY | os.O_DIRECTORY
HOLE_BYTES = 1 << 40


def _file(path: Path, pieces: dict[int, bytes], size: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, size)
    for position, data in pieces.items():
        os.pwrite(fd, data, position)
    return fd


def test_files_of_holes_are_copied_and_compared_at_once(tmp_path: Path) -> None:
    pieces = {1 << 20: b"one", HOLE_BYTES - 4096: b"two"}
    one = _file(tmp_path / "one", pieces, HOLE_BYTES)
    other = _file(tmp_path / "other", {}, 0)
    assert copy_content(one, other, HOLE_BYTES) <= 1 << 20
    assert have_equal_content(one, other, HOLE_BYTES)
    assert os.pread(other, 3, HOLE_BYTES - 4096) == b"two"
    for position, data in ((1 << 20, b"not"), (1 << 30, b"more")):
        changed = _file(tmp_path / str(position), pieces | {position: data}, HOLE_BYTES)
        assert not have_equal_content(one, changed, HOLE_BYTES)
        assert not have_equal_content(changed, one, HOLE_BYTES)
        os.close(changed)
    os.close(one)
    os.close(other)


@pytest.mark.parametrize(("max_bytes", "max_files"), [(99_999, None), (None, 10)])
def test_a_copy_ends_at_the_limits(tmp_path: Path, max_bytes: int | None, max_files: int | None) -> None:
    (tmp_path / "target").mkdir()
    for number in range(11):
        (tmp_path / "source" / str(number)).mkdir(parents=True)
        (tmp_path / "source" / str(number) / "file").write_bytes(bytes(10_000))
    source, target = os.open(tmp_path / "source", FOLDER), os.open(tmp_path / "target", FOLDER)
    with pytest.raises(RuntimeFailed, match="the sandbox's limit"):
        TreeCopy(target, max_bytes=max_bytes, max_files=max_files).add(source)
    TreeCopy(target).add(source, "all")
    assert measured(tmp_path / "target" / "all")[1] == 11
    os.close(source)
    os.close(target)


def test_a_folder_is_measured_whatever_the_length_of_its_paths(tmp_path: Path) -> None:
    here = os.open(tmp_path, FOLDER)
    for _ in range(40):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, FOLDER, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here))
    os.close(here)
    assert measured(tmp_path)[1] == 1
