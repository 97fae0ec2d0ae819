"""Tasks of the file-reading example: which word is in this file?

    usage: tasks.py [--harness shell|pi] [--tasks N] [--samples N] [--seed N] [--runtime NAME]

Prints one JSON task a line.

The agent program is `agent.py`, written into each runtime, or pi as its makers ship it; neither knows anything of
Gangline. `grade.py` and the right answer arrive in a clean runtime after the agent is gone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent

NAMES = """
amber anchor apple basket bridge candle carpet cedar copper desert engine falcon garden hammer island jacket kettle
ladder lantern marble meadow mirror needle orange paper pepper pillow pocket rabbit ribbon saddle silver spider
table temple ticket tunnel valley velvet window
"""
WORDS = """
autumn ball bear bell bird boat book bread cake castle chair cherry cloud coffee corn cow crown dog door dragon
eagle fire fish flag flower forest frog glass gold grape hat honey horse house ice key king lake leaf lemon lion
milk moon mouse music ocean owl peach pearl piano queen rain ring rose salt sand ship snow star stone sugar sun tea
tiger tower train tree water whale wind wolf
"""


class Agent(NamedTuple):
    """An agent program, and what it brings along."""

    harness: str
    settings: dict[str, Any]
    reads_by: str
    """How its model looks into a file: a `command` that it says, or a `tool` that it calls."""
    files: dict[str, str]
    """Written into the runtime."""
    max_turns: int | None
    allow_unrendered_tools: bool
    """Whether its model need not be shown its tools."""
    sampling: dict[str, Any]
    """Of the task's `capture`: what the program does not ask for by itself."""


AGENTS = {
    "shell": Agent(
        harness="shell",
        settings={"command": ["python3", "agent.py", "{instruction}", "{model}"]},
        reads_by="command",
        files={"agent.py": (HERE / "agent.py").read_text()},
        max_turns=None,
        allow_unrendered_tools=False,
        sampling={},
    ),
    "pi": Agent(
        harness="pi",
        settings={
            "tools": ["read"],
            # In the marks of SmolLM2's chat, whose template tells of no tools; what pi adds ends its last line.
            "system_prompt": (HERE / "pi_system_prompt.txt").read_text().rstrip(),
            "arguments": [" Begin with <tool_call>."],  # pi puts it behind the instruction
            "context_window": 4096,
            "max_tokens": 40,
            "compaction": False,
        },
        reads_by="tool",
        files={},
        max_turns=2,  # one to read, one to answer: no more are graded
        allow_unrendered_tools=True,  # the system prompt tells of its tool
        sampling={"temperature": {"default": 0.7}},
    ),
}


def build_tasks(
    num_tasks: int,
    *,
    harness: str = "shell",
    num_samples: int = 8,
    seed: int = 0,
    runtime: str = "sandbox",
    model_name: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Bodies of `POST /v1/tasks`, each about another file. The same arguments give the same tasks, and more tasks go on
    from fewer: what comes behind those that are trained on is held out. Every harness has the same questions.
    """
    prefix = "read-file" if harness == "shell" else f"read-file-{harness}"
    for index, (name, word) in enumerate(itertools.islice(_files(random.Random(seed)), num_tasks)):
        yield {
            "task_id": f"{prefix}-{seed}-{index}",
            "instruction": f"Which word is in the file {name}?",
            "num_samples": num_samples,
            "timeout_seconds": 120,
            **_posed(AGENTS[harness], name, word, runtime, model_name),
            "metadata": {"example": "read_file"},
        }


def _files(draw: random.Random) -> Iterator[tuple[str, str]]:
    """Each name once, with its word."""
    names, words, seen = NAMES.split(), WORDS.split(), set[str]()
    while len(seen) < 90 * len(names):
        name, word = f"{draw.choice(names)}{draw.randrange(10, 100)}.txt", draw.choice(words)
        if name not in seen:
            seen.add(name)
            yield name, word


def _posed(agent: Agent, name: str, word: str, runtime: str, model_name: str | None) -> dict[str, Any]:
    """Where the file lies, who answers, and how that is graded."""
    files = {**agent.files, name: f"{word}\n"}
    expected = {"file": name, "word": word, "reads_by": agent.reads_by}
    grader = {"grade.py": (HERE / "grade.py").read_text(), "expected.json": json.dumps(expected)}
    return {
        "runtime": {
            "backend": runtime,
            "prepare": [{"type": "write", "path": path, "content": content} for path, content in files.items()],
        },
        "agent": {
            "harness": agent.harness,
            "model_name": model_name,
            "settings": agent.settings,
            "max_turns": agent.max_turns,
            "allow_unrendered_tools": agent.allow_unrendered_tools,
        },
        "capture": {"sampling": agent.sampling},
        "evaluator": {
            "strategy": "script",
            "refresh_runtime": True,
            "config": {"command": ["python3", "grade.py"], "files": grader, "timeout_seconds": 30},
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Print tasks of the file-reading example, one JSON a line.")
    parser.add_argument("--harness", choices=sorted(AGENTS), default="shell", help="the agent program")
    parser.add_argument("--tasks", type=int, default=2, help="how many tasks, at most 3600")
    parser.add_argument("--samples", type=int, default=8, help="sessions of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runtime", default="sandbox", help="name of the runtime")
    given = parser.parse_args()
    for task in build_tasks(
        given.tasks, harness=given.harness, num_samples=given.samples, seed=given.seed, runtime=given.runtime
    ):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
