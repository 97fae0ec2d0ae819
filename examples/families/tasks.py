"""Tasks of eight families of shell work.

    usage: tasks.py [--families read,find,...] [--style plain|fenced|react|oracle|nothing] [--tasks N] [--first N]
                    [--samples N] [--seed N] [--runtime NAME]

Prints one JSON task a line, the families in turn. The same options give the same tasks; `--first` skips those that are
trained on. `oracle` runs the right commands instead of a model, `nothing` ends at once; they earn 1 and 0.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from families import FAMILIES, Puzzle, make_puzzle

HERE = Path(__file__).parent
STYLES = ("plain", "fenced", "react")
AGENT = ".agent.py"
"""Hidden from `ls`."""
PYTHON = ("python3", "-I", "-S")
"""Without site packages it starts in a third of the time."""


def build_tasks(
    num_tasks: int,
    *,
    families: Sequence[str] = tuple(FAMILIES),
    style: str = "plain",
    first: int = 0,
    num_samples: int = 8,
    seed: int = 0,
    runtime: str = "sandbox",
) -> Iterator[dict[str, Any]]:
    """Bodies of `POST /v1/tasks`."""
    for number in range(first, first + num_tasks):
        family = families[number % len(families)]
        puzzle = make_puzzle(family, seed, number // len(families))
        yield {
            "task_id": f"families-{style}-{family}-{seed}-{number}",
            "instruction": puzzle.instruction,
            "num_samples": num_samples,
            "timeout_seconds": 120,
            "runtime": {"backend": runtime, "prepare": _prepared(puzzle)},
            "agent": {
                "harness": "shell",
                "settings": {"command": _command(puzzle, style)},
                "allow_no_model_call": style not in STYLES,
            },
            "evaluator": _evaluator(puzzle, runtime),
            "metadata": {"example": "families", "family": family},
        }


def _prepared(puzzle: Puzzle) -> list[dict[str, str]]:
    files = {**puzzle.files, AGENT: (HERE / "agent.py").read_text()}
    return [{"type": "write", "path": path, "content": content} for path, content in files.items()]


def _command(puzzle: Puzzle, style: str) -> list[str]:
    if style == "oracle":
        return ["sh", "-ec", "\n".join([*puzzle.commands, f"printf %s {shlex.quote(puzzle.answer)} > answer.txt"])]
    if style == "nothing":
        return ["true"]
    return [*PYTHON, AGENT, style, "{instruction}", "{model}"]


def _evaluator(puzzle: Puzzle, runtime: str) -> dict[str, Any]:
    """The grader has its own user, where the runtime has one."""
    expected = {"answer": puzzle.answer, "changed": dict(puzzle.changed)}
    return {
        "strategy": "script",
        "config": {
            "command": [*PYTHON, "grade.py"],
            "separate": runtime != "process",
            "files": {"grade.py": (HERE / "grade.py").read_text(), "expected.json": json.dumps(expected)},
            "timeout_seconds": 30,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Print tasks of eight families of shell work, one JSON a line.")
    parser.add_argument("--families", default=",".join(FAMILIES), help="which, separated by commas")
    parser.add_argument("--style", choices=(*STYLES, "oracle", "nothing"), default="plain", help="who does them")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--first", type=int, default=0, help="number of the first task")
    parser.add_argument("--samples", type=int, default=8, help="sessions of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runtime", default="sandbox", help="name of the runtime")
    given = parser.parse_args()
    families = given.families.split(",")
    if unknown := sorted(set(families) - set(FAMILIES)):
        parser.error(f"no such family: {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    for task in build_tasks(
        given.tasks,
        families=families,
        style=given.style,
        first=given.first,
        num_samples=given.samples,
        seed=given.seed,
        runtime=given.runtime,
    ):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
