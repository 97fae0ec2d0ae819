"""A trainer's folder of weights on its way to the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import EngineUnavailable, GanglineError, InvalidRequest
from gangline.train.trainers import pushing
from gangline.train.trainers.pushing import push_folder


class Weights:
    """errors: of the first attempts."""

    def __init__(self, root: Path, *errors: GanglineError) -> None:
        self._root, self._errors = root, list(errors)
        self.files: dict[int, set[str]] = {}

    async def push(self, save: Any, version: int) -> Any:
        folder = self._root / f"{version}.{len(self._errors)}"
        folder.mkdir()
        save(folder)
        if self._errors:
            raise self._errors.pop(0)
        self.files[version] = {path.name for path in folder.iterdir()}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pushing, "_AGAIN_S", 0.0)
    folder = tmp_path / "written"
    folder.mkdir()
    for name in ("model.safetensors", "STABLE"):
        (folder / name).write_bytes(b"weights")
    return folder


async def test_engines_that_are_down_are_asked_again(tmp_path: Path, written: Path) -> None:
    down = [EngineUnavailable("it does not answer.") for _ in range(2)]
    weights = Weights(tmp_path, *down)
    await push_folder(weights, written, 3, without=frozenset({"STABLE"}))
    assert weights.files == {3: {"model.safetensors"}}
    assert (written / "model.safetensors").read_bytes() == b"weights"


async def test_patience_ends_with_the_last_error(tmp_path: Path, written: Path) -> None:
    weights = Weights(tmp_path, EngineUnavailable("it does not answer."))
    with pytest.raises(EngineUnavailable):
        await push_folder(weights, written, 3, patience_s=-1.0)


async def test_what_another_attempt_would_not_mend_is_raised_at_once(tmp_path: Path, written: Path) -> None:
    weights = Weights(tmp_path, InvalidRequest("version 3 would go back."), EngineUnavailable("never asked."))
    with pytest.raises(InvalidRequest):
        await push_folder(weights, written, 3)


async def test_files_are_copied_where_they_cannot_be_linked(
    tmp_path: Path, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("another disk")

    monkeypatch.setattr(pushing.os, "link", refuse)
    weights = Weights(tmp_path)
    await push_folder(weights, written, 3)
    assert weights.files == {3: {"model.safetensors", "STABLE"}}
