"""Sixty tasks of six repositories, for an agent with a shell and the evaluator of SWE-bench.

usage: tasks.py [--samples N] > tasks.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from repositories import Bug, bugs

_COMMIT = (
    "git init -q && git add -A && git -c user.name=kennel -c user.email=kennel@localhost commit -q -m base && "
    "git rev-parse HEAD"
)


def build_tasks(num_samples: int = 1) -> Iterator[dict[str, Any]]:
    """Bodies of `POST /v1/tasks`."""
    for bug in bugs():
        yield {
            "task_id": f"swe-{bug.instance_id}",
            "instruction": f"{bug.issue}\nFind the cause in this repository ({bug.instance_id}) and fix it.",
            "num_samples": num_samples,
            "timeout_seconds": 60,
            "runtime": {"backend": "sandbox", "prepare": _prepared(bug)},
            "agent": {"harness": "native", "settings": {"tools": ["shell"]}, "max_turns": 10},
            "evaluator": {"strategy": "swe_bench", "refresh_runtime": True, "config": _grading(bug)},
            "metadata": {
                "instance_id": bug.instance_id,
                "repo": bug.repository,
                "problem_statement": bug.issue,
                "version": "1.0",
            },
        }


def _prepared(bug: Bug) -> list[dict[str, Any]]:
    files = [{"type": "write", "path": path, "content": content} for path, content in bug.files.items()]
    return [*files, {"type": "exec", "command": _COMMIT}]


def _grading(bug: Bug) -> dict[str, Any]:
    return {
        "fail_to_pass": [bug.fail_to_pass],
        "pass_to_pass": bug.pass_to_pass,
        "test_patch": bug.tests,
        "test_command": "python3 -m unittest -v test_core",
        "log_parser": "unittest",
        "timeout_seconds": 30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Print sixty tasks of six repositories, one JSON a line.")
    parser.add_argument("--samples", type=int, default=1, help="sessions of each task")
    for task in build_tasks(parser.parse_args().samples):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
