"""Entries of docs/guides/gallery.md that no other test runs: the notebook, and a dataset for the hub as a dry run."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from support.service.cli_process import UpProcess, gangline

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "gallery.md"
NOTEBOOK = ROOT / "examples" / "notebook"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    service = UpProcess(tmp_path_factory.mktemp("up"), script=json.loads((NOTEBOOK / "replies.json").read_text()))
    try:
        assert "server_url" in service.ready()
        yield service
    finally:
        service.close()


async def shown_by(cells: list[str]) -> list[Any]:
    """Values of a notebook's cells, run as a kernel does: on a thread whose event loop runs already."""
    shell = InteractiveShell()
    shown: list[Any] = []
    for cell in cells:
        ran = await shell.run_cell_async(cell, transformed_cell=shell.transform_cell(cell))
        ran.raise_error()
        shown.append(ran.result)
    return shown


def test_the_notebook_runs_and_its_sessions_become_a_dataset(
    up: UpProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGLINE_DATA", str(up.data))
    document = json.loads((NOTEBOOK / "first_look.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    _, sessions, (num_prompt, tokens), grades, _ = asyncio.run(shown_by(cells))
    assert [one[1:] for one in sessions] == [("completed", 1.0)] * 4
    assert num_prompt > 0
    assert tokens
    assert grades == [(1.0, 0.0)] * 4
    assert not any(cell.get("outputs") for cell in document["cells"]), "kept without its outputs"

    out = tmp_path / "corpus"
    options = ("--out", out, "--keep-duplicates", "--push", "you/corpus", "--data", up.data)
    done = gangline("data", "notebook-*", *options)
    assert done.returncode == 0, done.stderr
    assert "Would publish to you/corpus: " in done.stderr
    assert "README.md" in done.stderr


def test_what_the_page_names_is_there() -> None:
    text = PAGE.read_text()
    tests = re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert len(tests) >= 10
    named = [*tests, *(f"examples/{name}" for name in re.findall(r"`?examples/([\w/.]+)", text))]
    assert [path for path in named if not (ROOT / path).exists()] == []
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir()}
    assert {name for name in folders if f"examples/{name}" not in text} == set()
