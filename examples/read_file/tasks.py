"""Tasks of the file-reading example: which word is in this file?

    usage: tasks.py [--tasks N] [--samples N] [--seed N] [--runtime NAME]    prints one JSON task a line

The agent program (`agent.py`) is written into each runtime and knows nothing of Gangline; `grade.py` and the right
answer arrive in a clean runtime after the agent is gone.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def build_tasks(
    num_tasks: int, *, num_samples: int = 8, seed: int = 0, runtime: str = "sandbox", model_name: str | None = None
) -> Iterator[dict[str, Any]]:
    """Bodies of `POST /v1/tasks`. The same arguments give the same tasks."""
    draw = random.Random(seed)
    names, words = NAMES.split(), WORDS.split()
    for index in range(num_tasks):
        name, word = f"{draw.choice(names)}{draw.randrange(10, 100)}.txt", draw.choice(words)
        yield _task(f"read-file-{seed}-{index}", name, word, num_samples, runtime, model_name)


def _task(task_id: str, name: str, word: str, num_samples: int, runtime: str, model_name: str | None) -> dict[str, Any]:
    agent = (HERE / "agent.py").read_text()
    grader = {"grade.py": (HERE / "grade.py").read_text(), "expected.json": json.dumps({"file": name, "word": word})}
    return {
        "task_id": task_id,
        "instruction": f"Which word is in the file {name}?",
        "num_samples": num_samples,
        "timeout_seconds": 120,
        "runtime": {
            "backend": runtime,
            "prepare": [
                {"type": "write", "path": "agent.py", "content": agent},
                {"type": "write", "path": name, "content": f"{word}\n"},
            ],
        },
        "agent": {
            "harness": "shell",
            "model_name": model_name,
            "settings": {"command": ["python3", "agent.py", "{instruction}", "{model}"]},
        },
        "evaluator": {
            "strategy": "script",
            "refresh_runtime": True,
            "config": {"command": ["python3", "grade.py"], "files": grader, "timeout_seconds": 30},
        },
        "metadata": {"example": "read_file"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Print tasks of the file-reading example, one JSON a line.")
    parser.add_argument("--tasks", type=int, default=2, help="how many tasks")
    parser.add_argument("--samples", type=int, default=8, help="sessions of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runtime", default="sandbox", help="name of the runtime")
    options = parser.parse_args()
    for task in build_tasks(options.tasks, num_samples=options.samples, seed=options.seed, runtime=options.runtime):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
