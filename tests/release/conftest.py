"""The files of a release, built from this checkout, and environments that have nothing but the wheel."""

from __future__ import annotations

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
