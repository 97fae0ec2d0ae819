"""Every command and file of ours in docs/guides/coming-from, in its order, over one service."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gangline.cli.main import build_app
from support.requirements import need_command, need_module
from support.service.cli_process import UpProcess

PAGES = Path(__file__).parents[2] / "docs" / "guides" / "coming-from"
BLOCK = re.compile(r"(?:<!-- (?P<note>[^>]+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL)
NAMES = ["agent-lightning", "polar", "prorl-agent", "rllm", "verifiers"]
REPLIES = {
    "rules": [
        {"pattern": "3 \\* 9", "text": "#### 26"},
        {"pattern": "ANSWER", "text": "### ANSWER: 42 ###"},
        {"pattern": "17 \\+ 25", "text": "#### 42"},
    ],
    "default": {"text": "hello"},
}
SEEN = {
    "agent-lightning": "reward 1",
    "polar": "completed ['COMPLETED', 'COMPLETED']",
    "prorl-agent": "hello-0",
    "rllm": "2 rows of 2 sessions",
    "verifiers": "0.500",
}
"""Part of what each page's commands print."""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    need_command("bwrap", "apt-get install bubblewrap")
    need_module("openai", "make .venv/.demo")
    service = UpProcess(tmp_path_factory.mktemp("up"), script=REPLIES)
    try:
        assert "server_url" in service.ready()
        yield service
    finally:
        service.close()


def test_every_page_is_run() -> None:
    assert sorted(path.stem for path in PAGES.glob("*.md")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_page_works_as_it_stands(
    up: UpProcess, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for found in BLOCK.finditer((PAGES / f"{name}.md").read_text()):
        note = found["note"] or ""
        if note.startswith("file: "):
            (tmp_path / note.removeprefix("file: ")).write_text(found["text"])
        elif note != "theirs":
            assert found["kind"] == "sh", found["text"]
            steps += found["text"].replace("--python .venv", f"--python {sys.prefix}").splitlines()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GANGLINE_DATA", str(up.data))
    printed = "".join(run_step(step) for step in steps)
    assert SEEN[name] in printed, printed


def run_step(step: str) -> str:
    """The output of a line; one of `gangline` runs in this process, which takes half of its time."""
    if not step.startswith("gangline ") or ">" in step:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["sh", "-c", step], env={**os.environ, "PATH": path}, text=True, check=True, stdout=subprocess.PIPE
        ).stdout
    _, *arguments = shlex.split(step)
    ran = CliRunner().invoke(build_app(), arguments, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.output
