"""Tasks: repair a function; hidden tests decide.

Writes task.json (one), tasks.jsonl (to train on) and held_out.jsonl (to measure on).

    usage: tasks.py [TASKS HELD_OUT]
"""

import json
import random
import sys
from pathlib import Path

NUM_TASKS, NUM_HELD_OUT = map(int, sys.argv[1:] or (64, 32))
HERE = Path(__file__).resolve().parent
FUNCTIONS = {  # name -> (correct, broken)
    "mean": ("sum(values) / len(values)", "sum(values) / (len(values) + 1)"),
    "spread": ("max(values) - min(values)", "max(values) + min(values)"),
    "second": ("sorted(values)[1]", "values[1]"),
    "product": ("values[0] * values[1] * values[2]", "values[0] * values[1] + values[2]"),
    "evens": ("[one for one in values if one % 2 == 0]", "[one for one in values if one % 2]"),
    "backwards": ("values[::-1]", "values[1::-1]"),
}


def build_task(number: int) -> dict:
    draw = random.Random(number)
    name, (right, wrong) = list(FUNCTIONS.items())[number % len(FUNCTIONS)]
    inputs = [draw.sample(range(2, 60), 5) for _ in range(6)]
    results = [eval(right, {"values": values}) for values in inputs]
    agent = {"type": "write", "path": "agent.py", "content": {"from_file": "agent.py"}}
    source = {"type": "write", "path": "figures.py", "content": f"def {name}(values):\n    return {wrong}\n"}
    return {
        "instruction": f"Repair figures.py: {name}({inputs[0]}) should return {results[0]}.",
        "num_samples": 4,
        "timeout_seconds": 300,
        "runtime": {
            "python": str(HERE / ".venv") if (HERE / ".venv").is_dir() else None,  # the agent's environment, if any
            "prepare": [agent, source],
        },
        "agent": {
            "harness": "shell",
            "settings": {"command": ["python3", "agent.py", "{instruction}"]},
            "max_turns": 8,
        },
        "evaluator": {
            "strategy": "script",
            "refresh_runtime": True,  # hidden tests run in a clean sandbox, with only figures.py from the agent
            "config": {
                "command": ["python3", "reward.py"],
                "files": {"reward.py": {"from_file": "reward.py"}},
                "collect": ["figures.py"],
            },
        },
        "metadata": {
            "function": name,
            "tests": list(zip(inputs[1:], results[1:], strict=True)),
        },  # hidden from the agent
        "held_out": number >= NUM_TASKS,  # used for evaluation, never for training
    }


lines = [json.dumps(build_task(number)) + "\n" for number in range(NUM_TASKS + NUM_HELD_OUT)]
(HERE / "task.json").write_text(lines[0])
(HERE / "tasks.jsonl").write_text("".join(lines[:NUM_TASKS]))
(HERE / "held_out.jsonl").write_text("".join(lines[NUM_TASKS:]))
