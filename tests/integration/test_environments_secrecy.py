"""An environment in the agent's own sandbox: its configuration and key stay secret there, and nothing of the
agent's is imported by it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from support.node.environments import played
from support.requirements import need, need_command, need_module

SECRET = "the-answer-is-417"
GYM = """
class Dataset:
    def __getitem__(self, index):
        return {"question": "Which number?"}
    def score_answer(self, answer, entry):
        return float(answer == "417")
def create_dataset(name, **given):
    return Dataset()
"""
UTILS = "def extract_answer(text):\n    return None\n"
SEARCH = """
import glob
for path in glob.glob("/proc/[0-9]*/*"):
    if path.endswith(("/cmdline", "/environ")):
        try:
            data = open(path, "rb").read()
        except OSError:
            continue
        if b"gangline_world" in data: print("program", path)
        if b"the-answer" + b"-is-417" in data or b"gl" + b"e-" in data: print("found", path)
print("searched")
"""
IMPOSTOR = "raise SystemExit('the working folder is imported')\n"


@pytest.fixture(autouse=True)
def _needed() -> None:
    need_module("mcp", "pip install 'gangline[mcp]'")
    need_command("bwrap", "apt-get install bubblewrap")
    need_command("setpriv", "apt-get install util-linux")
    need(os.geteuid() == 0, "a second user in a sandbox needs root")


async def test_an_agent_can_neither_read_the_configuration_nor_replace_a_module(tmp_path: Path) -> None:
    files = {"gym/reasoning_gym/__init__.py": GYM, "gym/reasoning_gym/utils.py": UTILS, "search.py": SEARCH}
    runtime: dict[str, Any] = {
        "backend": "sandbox",
        "network": "proxy",  # so the environment has a key for model calls
        "env": {"PYTHONPATH": "/workspace/gym"},
        "prepare": [{"type": "write", "path": path, "content": content} for path, content in files.items()],
    }
    config = {"dataset": "numbers", "options": {"secret": SECRET}}
    environment = {"kind": "reasoning_gym", "place": "inside", "config": config}
    commands = ["python3 search.py", f'echo "{IMPOSTOR.strip()}" | tee json.py >importlib.py']
    rules: list[dict[str, Any]] = [
        {"turn": turn, "pattern": ".", "tool_calls": [{"name": "shell", "arguments": {"command": command}}]}
        for turn, command in enumerate(commands)
    ]
    rules.append({"pattern": ".", "text": "417"})
    agent = {"harness": "native", "settings": {"tools": ["shell"]}}
    result = await played(tmp_path, environment, rules, agent=agent, runtime=runtime)
    assert (result.outcome, result.reward) == ("completed", 1.0), result.failure
    said = str(result.trajectory)
    assert "program /proc/" in said, "the search sees no command lines"
    assert "found /proc/" not in said
