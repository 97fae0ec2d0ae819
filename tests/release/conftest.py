"""The files of a release, built from this checkout, and environments that have nothing but the wheel."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from release.installed import Installed, install, run_uv


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the sdist, and of the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run_uv("build", "--out-dir", folder)
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel and its dependencies alone."""
    return install(wheel, "", tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="session")
def with_tokenizer(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel with the extra of the scripted engine."""
    return install(wheel, "[tokenizer]", tmp_path_factory.mktemp("tokenizer"))


WINGS = ("interop", "serving", "tasks", "testing", "train")


@pytest.fixture(scope="session")
def core_alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An installation of the wheel without its wings, and without their entry points."""
    folder = tmp_path_factory.mktemp("core_alone")
    left = folder / wheel.name
    is_wing = re.compile(rf"gangline/(?:{'|'.join(WINGS)})/")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(left, "w", zipfile.ZIP_DEFLATED) as part:
        for name in whole.namelist():
            text = whole.read(name)
            if is_wing.match(name):
                continue
            if name.endswith(("/RECORD", "/entry_points.txt")):
                wing_line = re.compile(is_wing.pattern.encode() + rb"|= gangline\.(?:%s)\." % "|".join(WINGS).encode())
                text = b"".join(line for line in text.splitlines(keepends=True) if not wing_line.search(line))
                if name.endswith("/RECORD"):  # its digest has changed
                    text = re.sub(rb"(entry_points\.txt),[^\n\r]*", rb"\1,,", text)
            part.writestr(name, text)
    return install(left, "", folder)
