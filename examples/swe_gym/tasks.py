"""Give an agent to the tasks that `gangline tasks from` makes of SWE-Gym's rows.

usage: gangline tasks from ROWS --format swe | tasks.py [--harness codex|claude_code] [--prompts] > tasks.jsonl

`template.json` has what all tasks share. With --prompts each line is a row of slime's prompt data in place of a task.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_name("template.json")
CONTEXT = 50_000
"""Tokens that the engines read, prompt and reply together."""
SETTINGS: dict[str, dict[str, Any]] = {
    "codex": {"context_window": CONTEXT},
    "claude_code": {"context_window": CONTEXT, "max_output_tokens": 16_000},
}


def with_agent(imported: Iterable[dict[str, Any]], harness: str) -> Iterator[dict[str, Any]]:
    """Bodies of `POST /v1/tasks`. Images, preparation, evaluator and budgets of the importer stay."""
    template = json.loads(TEMPLATE.read_text())
    agent = template["agent"] | {"harness": harness, "settings": SETTINGS[harness]}
    for task in imported:
        yield {**task, **template, "agent": agent}


def prompt_of(task: dict[str, Any]) -> dict[str, Any]:
    """A row of slime's prompt data."""
    return {"prompt": task["instruction"], "metadata": {"task": task}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Give an agent to imported tasks of SWE-Gym, one JSON a line.")
    parser.add_argument("--harness", choices=list(SETTINGS), default="codex")
    parser.add_argument("--prompts", action="store_true", help="write rows of slime's prompt data")
    options = parser.parse_args()
    for task in with_agent(map(json.loads, sys.stdin), options.harness):
        print(json.dumps(prompt_of(task) if options.prompts else task))


if __name__ == "__main__":
    main()
