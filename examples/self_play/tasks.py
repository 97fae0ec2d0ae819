"""Tasks of the self-play example: sums of numbers below a limit.

    usage: tasks.py [--tasks N] [--runtime NAME]

Prints one JSON task a line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def build_tasks(num_tasks: int, *, runtime: str = "sandbox") -> Iterator[dict[str, Any]]:
    """Bodies of `POST /v1/tasks`, each with another limit."""
    files = {"grade.py": (HERE / "grade.py").read_text()}
    for limit in range(10, 10 + num_tasks):
        yield {
            "task_id": f"self-play-{limit}",
            "instruction": str(limit),
            "timeout_seconds": 120,
            "runtime": {
                "backend": runtime,
                "prepare": [{"type": "write", "path": "agent.py", "content": (HERE / "agent.py").read_text()}],
            },
            "agent": {"harness": "shell", "settings": {"command": ["python3", "agent.py", "{instruction}"]}},
            "evaluator": {
                "strategy": "script",
                "config": {"command": ["python3", "grade.py", str(limit)], "files": files},
                "refresh_runtime": True,
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Print tasks of the self-play example, one a line.")
    parser.add_argument("--tasks", type=int, default=64, metavar="N", help="number of tasks")
    parser.add_argument("--runtime", default="sandbox", metavar="NAME", help="runtime of the agent")
    arguments = parser.parse_args()
    for task in build_tasks(arguments.tasks, runtime=arguments.runtime):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
