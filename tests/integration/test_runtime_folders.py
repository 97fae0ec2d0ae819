"""A node that dies while it makes or removes a runtime's folder: the next one removes what is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gangline.sandbox.shared.leftovers import Mark, reap, remove_folder, write_mark

MARK = Mark(owner="gl1", runtime="sandbox", runtime_id="s.1.agent")


def make_folder(folder: Path) -> None:
    """As a runtime has it at its end."""
    write_mark(folder, MARK)
    for name in ("home", "tmp", "work"):
        (folder / name).mkdir()
    (folder / "passwd").write_text("root")
    (folder / "work" / "deep").mkdir()
    (folder / "work" / "deep" / "file").write_text("x")
    (folder / "home" / "out").symlink_to("/etc")


def die_at(step: int, work: Callable[[], object]) -> bool:
    """Do it in another process, which dies just before its change of the file system number `step`; whether it did."""
    pid = os.fork()
    if pid == 0:
        num_steps = 0

        def counted(change: Callable[..., Any]) -> Callable[..., Any]:
            def changing(*arguments: Any, **options: Any) -> Any:
                nonlocal num_steps
                if num_steps == step:
                    os._exit(9)
                num_steps += 1
                return change(*arguments, **options)

            return changing

        for name in ("unlink", "rmdir", "mkdir", "write"):
            setattr(os, name, counted(getattr(os, name)))
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_a_folder_removed_by_half_is_found_again_wherever_its_removal_ended(tmp_path: Path) -> None:
    folder, step = tmp_path / "r", 0
    make_folder(folder)
    while die_at(step, lambda: remove_folder(folder)):
        reap("sandbox", "gl1", tmp_path, frozenset())
        assert os.listdir(tmp_path) == [], f"step {step}"
        make_folder(folder)
        step += 1
    assert step >= 8
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [None, b"", b'{"owner": "gl'])
def test_a_folder_that_a_node_had_hardly_begun_is_removed(tmp_path: Path, content: bytes | None) -> None:
    write_mark(tmp_path / "r", MARK)
    (mark,) = (tmp_path / "r").iterdir()
    mark.unlink()
    if content is not None:
        mark.write_bytes(content)
    reap("sandbox", "gl1", tmp_path, frozenset())
    assert os.listdir(tmp_path) == []


def test_folders_of_others_and_those_to_keep_stay(tmp_path: Path) -> None:
    write_mark(tmp_path / "other", Mark(owner="gl2", runtime="sandbox", runtime_id="x"))
    write_mark(tmp_path / "kept", MARK)
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "file").write_text("x")
    assert reap("sandbox", "gl1", tmp_path, frozenset({MARK.runtime_id})) == set()
    assert sorted(os.listdir(tmp_path)) == ["kept", "other", "unknown"]
