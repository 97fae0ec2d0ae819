"""Tasks: small sums.

Writes task.json (one), tasks.jsonl (to train on) and held_out.jsonl (to measure on).

    usage: tasks.py [TASKS HELD_OUT]
"""

import itertools
import json
import random
import sys
from pathlib import Path

NUM_TASKS, NUM_HELD_OUT = map(int, sys.argv[1:] or (64, 32))
SUMS = random.Random(0).sample(list(itertools.product(range(2, 10), repeat=3)), NUM_TASKS + NUM_HELD_OUT)
HERE = Path(__file__).resolve().parent


def build_task(number: int) -> dict:
    first, second, third = SUMS[number]
    return {
        "instruction": f"What is {first} * {second} + {third}?",
        "num_samples": 4,
        "timeout_seconds": 120,
        "runtime": {
            "python": str(HERE / ".venv") if (HERE / ".venv").is_dir() else None,  # the agent's environment, if any
            "prepare": [{"type": "write", "path": "agent.py", "content": {"from_file": "agent.py"}}],
        },
        "agent": {"harness": "shell", "settings": {"command": ["python3", "agent.py", "{instruction}"]}},
        "evaluator": {
            "strategy": "script",
            "refresh_runtime": True,  # in a clean sandbox that the agent never used
            "config": {"command": ["python3", "reward.py"], "files": {"reward.py": {"from_file": "reward.py"}}},
        },
        "metadata": {"answer": first * second + third},  # for reward.py; hidden from the agent
        "held_out": number >= NUM_TASKS,  # used for evaluation, never for training
    }


lines = [json.dumps(build_task(number)) + "\n" for number in range(NUM_TASKS + NUM_HELD_OUT)]
(HERE / "task.json").write_text(lines[0])
(HERE / "tasks.jsonl").write_text("".join(lines[:NUM_TASKS]))
(HERE / "held_out.jsonl").write_text("".join(lines[NUM_TASKS:]))
