"""The sdist and the wheel are complete, and fit to be uploaded."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from gangline import __version__
from release.installed import ROOT, run_uv

EXAMPLE = ("agent.py", "grade.py", "pi_system_prompt.txt", "tasks.py")
"""What `gangline demo` runs."""


def test_both_files_pass_the_checks_of_uploads(dist: Path) -> None:
    files = sorted(dist.glob("gangline-*"))
    assert [path.name for path in files] == [
        f"gangline-{__version__}-py3-none-any.whl",
        f"gangline-{__version__}.tar.gz",
    ]
    run_uv("tool", "run", "twine@7.0.0", "check", "--strict", *files)
    # W004: the agents of templates are not modules.
    run_uv("tool", "run", "check-wheel-contents@0.6.3", "--ignore", "W004", files[0])


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    """It was built from the sdist, so the sdist has them too."""
    tracked = subprocess.run(
        ["git", "-C", ROOT / "src", "ls-files", "gangline"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.startswith(f"gangline-{__version__}.dist-info/")}
    example = {f"gangline/train/commands/read_file/{name}" for name in EXAMPLE}
    assert packed == set(tracked) | example


def test_its_metadata_names_license_readme_and_python(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = HeaderParser().parsestr(archive.read(f"gangline-{__version__}.dist-info/METADATA").decode())
        assert f"gangline-{__version__}.dist-info/licenses/LICENSE" in archive.namelist()
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert str(metadata.get_payload()).startswith("# Gangline")


@pytest.mark.parametrize("platform", ["aarch64-apple-darwin", "x86_64-apple-darwin", "x86_64-pc-windows-msvc"])
def test_macos_and_windows_have_a_wheel_of_every_dependency(platform: str) -> None:
    """Nothing is compiled where only the client, `show`, `export`, `audit` and `check-rows` run."""
    wanted = ("--python-platform", platform, "--python-version", "3.11", "--only-binary", ":all:")
    assert "aiohttp==" in run_uv("pip", "compile", "--quiet", *wanted, ROOT / "pyproject.toml")


@pytest.mark.parametrize("name", ["tested.txt", "docs.txt", "uv.txt"])
def test_the_locks_fit_the_dependencies(name: str, tmp_path: Path) -> None:
    """Versions of a lock stay where they fit, so that new releases of dependencies change nothing."""
    lock = ROOT / "requirements" / name
    again = tmp_path / name
    shutil.copy(lock, again)
    subprocess.run([ROOT / "scripts" / "lock.sh", again], check=True, timeout=120)
    assert again.read_text() == lock.read_text(), "run: make lock"
