"""Bytes go in and out of an untrusted folder without leaving it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gangline.domain.errors import InvalidRequest, LimitExceeded, NotFound
from gangline.sandbox.shared.files import SharedFolders


@pytest.fixture
def shared(tmp_path: Path) -> SharedFolders:
    for name in ("work", "home"):
        (tmp_path / name).mkdir()
    (tmp_path / "secret").write_text("secret")
    return SharedFolders({"/workspace": tmp_path / "work", "/home/agent": tmp_path / "home"}, "/workspace")


def test_relative_paths_begin_in_the_workdir_and_absolute_ones_at_their_folder(shared: SharedFolders) -> None:
    shared.write("a/b", b"1", 0o644)
    shared.write("/home/agent/c", b"2", 0o600)
    assert shared.read("/workspace/a/b", 10) == b"1"
    assert shared.read("/home/agent/c", 10) == b"2"


@pytest.mark.parametrize("path", ["", ".", "..", "../secret", "a/../../secret", "/etc/passwd", "/workspace", "a\0b"])
def test_a_path_that_leaves_is_refused(shared: SharedFolders, path: str) -> None:
    with pytest.raises(InvalidRequest):
        shared.read(path, 10)
    with pytest.raises(InvalidRequest):
        shared.write(path, b"x", 0o644)


@pytest.mark.parametrize("target", ["secret", "."])
def test_a_link_is_neither_read_nor_written_through(shared: SharedFolders, tmp_path: Path, target: str) -> None:
    (tmp_path / "work" / "link").symlink_to(tmp_path / target)
    name = "link" if target == "secret" else "link/secret"
    with pytest.raises(InvalidRequest):
        shared.read(name, 10)
    if target == "secret":
        shared.write(name, b"x", 0o644)
        assert not (tmp_path / "work" / "link").is_symlink()
    else:
        with pytest.raises(InvalidRequest):
            shared.write(name, b"x", 0o644)
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_pipe_neither_blocks_nor_is_read(shared: SharedFolders, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "work" / "pipe")
    with pytest.raises(InvalidRequest):
        shared.read("pipe", 10)
    shared.write("pipe", b"x", 0o644)
    assert shared.read("pipe", 10) == b"x"


def test_reading_is_bounded_and_a_missing_file_is_not_found(shared: SharedFolders) -> None:
    shared.write("five", b"12345", 0o644)
    assert shared.read("five", 5) == b"12345"
    with pytest.raises(LimitExceeded):
        shared.read("five", 4)
    with pytest.raises(NotFound):
        shared.read("six", 4)


def test_writing_replaces_and_sets_the_mode_and_leaves_no_temporary_file(shared: SharedFolders, tmp_path: Path) -> None:
    shared.write("run", b"1", 0o755)
    shared.write("run", b"2", 0o640)
    assert shared.read("run", 9) == b"2"
    assert (tmp_path / "work" / "run").stat().st_mode & 0o777 == 0o640
    (tmp_path / "work" / "folder").mkdir()
    with pytest.raises(InvalidRequest):
        shared.write("folder", b"x", 0o644)
    assert sorted(os.listdir(tmp_path / "work")) == ["folder", "run"]
