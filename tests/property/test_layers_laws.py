"""Layers of a sandbox's files against a plain model: whatever was done, forked and returned to, the files are as the
model has them. Removed files do not return, and nobody sees another one's."""

from __future__ import annotations

import copy
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gangline.domain.sandbox import Checkpoint, RuntimeStart
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.layers.mounting import can_mount
from gangline.sandbox.layers.records import release
from gangline.sandbox.layers.stack import Layers
from gangline.sandbox.shared.users import FIRST_UID

NAMES = ("a", "b", "c")
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("write", "write", "folder", "remove", "rename", "mode", "link", "hard", "swap", "checkpoint")),
        st.integers(0, 7),
        PATHS,
        PATHS,
        st.binary(max_size=40),
    )
    | st.tuples(
        st.sampled_from(("stack", "stack", "copy", "fork", "reset")),
        st.integers(0, 7),
        PATHS,
        PATHS,
        st.binary(max_size=0),
    ),
    max_size=25,
)
Model = dict[str, Any]


class _Idle:
    def is_populated(self) -> bool:
        return False

    def frozen(self) -> AbstractContextManager[bool]:
        return nullcontext(True)


class _Sandbox:
    """Real layers alongside their model: name -> (mode, content), a link's target, or a folder's model."""

    def __init__(self, root: Path, number: int, *, mounts: bool, base: tuple[Checkpoint, Model] | None) -> None:
        folder = root / f"sandbox{number}"
        start = RuntimeStart(
            runtime_id=folder.name,
            owner="laws",
            spec=RuntimeSpec(),
            folder=folder,
            base=None if base is None else base[0],
        )
        folders = {"/work": folder / "work", "/more": folder / "folders" / "0"}
        for path in folders.values():
            path.mkdir(parents=True)
        self.model: Model = {} if base is None else copy.deepcopy(base[1])
        self.beginning = copy.deepcopy(self.model)
        uid = FIRST_UID + number if mounts else None
        self.layers = Layers(start, "sandbox", folders, uid=uid, mounts=mounts, processes=_Idle())
        self.layers.begin()

    @property
    def work(self) -> Path:
        return self.layers.folders()["/work"]

    def act(self, action: str, path: str, other: str, content: bytes) -> None:
        """Do it in both, where the model allows it."""
        *above, name = path.split("/")
        inside = _found(self.model, above)
        if inside is None:
            return
        real = self.work / path
        there = inside.get(name)
        if action == "write" and not isinstance(there, dict | str):
            real.write_bytes(content)
            inside[name] = (0o644 if there is None else there[0], content)
        elif action == "folder" and there is None:
            real.mkdir()
            inside[name] = {}
        elif action == "remove" and there is not None:
            _remove(real)
            del inside[name]
        elif action == "swap" and there is not None:  # a folder becomes a file, and a file or link a folder
            _remove(real)
            if isinstance(there, dict):
                real.write_bytes(content)
                inside[name] = (0o644, content)
            else:
                real.mkdir()
                inside[name] = {}
        elif action == "mode" and isinstance(there, tuple):
            real.chmod(0o600)
            inside[name] = (0o600, there[1])
        elif action == "link" and there is None:
            real.symlink_to(other)
            inside[name] = other
        elif action in ("rename", "hard") and there is not None:
            self._place(action, real, inside, name, other)

    def _place(self, action: str, real: Path, inside: Model, name: str, other: str) -> None:
        *above, target = other.split("/")
        into = _found(self.model, above)
        if into is None or target in into or f"{self.work / other}/".startswith(f"{real}/"):
            return
        if action == "rename":
            os.rename(real, self.work / other)
            into[target] = inside.pop(name)
        elif isinstance(inside[name], tuple):
            os.link(real, self.work / other)
            os.chmod(self.work / other, inside[name][0])
            into[target] = inside[name]
            _unlink_others(self.work / other)

    def check(self) -> None:
        assert dict(_read(self.work)) == self.model


def _unlink_others(path: Path) -> None:
    """The model knows no hard links: write the file anew alongside the other one."""
    content, mode = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    path.unlink()
    path.write_bytes(content)
    path.chmod(mode)


def _found(model: Model, names: list[str]) -> Model | None:
    for name in names:
        below = model.get(name)
        if not isinstance(below, dict):
            return None
        model = cast("Model", below)
    return model


def _read(folder: Path) -> Iterator[tuple[str, Any]]:
    for entry in os.scandir(folder):
        if entry.is_symlink():
            yield entry.name, os.readlink(entry.path)
        elif entry.is_dir():
            yield entry.name, dict(_read(Path(entry.path)))
        else:
            yield entry.name, (stat.S_IMODE(entry.stat().st_mode), Path(entry.path).read_bytes())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@pytest.mark.parametrize("mounts", [True, False], ids=["stacked", "copied"])
@given(actions=ACTIONS)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_layers_are_as_a_plain_copy_would_be(mounts: bool, actions: list[tuple[str, int, str, str, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if mounts and not can_mount(root):
            pytest.skip("does not apply: views of layers cannot be mounted here")
        sandboxes = [_Sandbox(root, 0, mounts=mounts, base=None)]
        checkpoints: list[tuple[Checkpoint, Model]] = []
        try:
            for action, number, path, other, content in actions:
                one = sandboxes[number % len(sandboxes)]
                if action in ("checkpoint", "stack", "copy"):
                    take = one.layers.stack if action == "stack" and mounts else one.layers.copy
                    checkpoints.append((take(""), copy.deepcopy(one.model)))
                elif action == "fork" and checkpoints:
                    base = checkpoints[number % len(checkpoints)]
                    sandboxes.append(_Sandbox(root, len(sandboxes), mounts=mounts, base=base))
                elif action == "reset":
                    chosen = checkpoints[number % len(checkpoints)] if checkpoints and number else None
                    one.layers.reset(None if chosen is None else chosen[0])
                    one.model = copy.deepcopy(one.beginning if chosen is None else chosen[1])
                else:
                    one.act(action, path, other, content)
                for each in sandboxes:
                    each.check()
        finally:
            for one in sandboxes:
                one.layers.close()
            for checkpoint, _model in checkpoints:
                release(checkpoint)
        assert not [path for path in root.iterdir() if not path.name.startswith("sandbox")], "checkpoints are left"
