"""Tasks for Claude Code with an MCP server: which word is in the drawer?

Writes task.json (one), tasks.jsonl (to train on) and held_out.jsonl (to measure on).

    usage: tasks.py [TASKS HELD_OUT]
"""

import json
import random
import sys
from pathlib import Path

NUM_TASKS, NUM_HELD_OUT = map(int, sys.argv[1:] or (64, 32))
DRAWERS = ["amber", "cedar", "copper", "desert", "garden", "kettle", "marble", "needle", "orange", "silver"]
WORDS = ["bear", "bell", "bird", "boat", "book", "cake", "chair", "cherry", "cloud", "coffee", "corn", "fish", "horse"]
HERE = Path(__file__).resolve().parent


def build_task(number: int) -> dict:
    draw = random.Random(number)
    drawers = dict(zip(DRAWERS, draw.sample(WORDS, len(DRAWERS)), strict=True))
    name = draw.choice(DRAWERS)
    server = {"type": "write", "path": "/tmp/drawers.py", "content": {"from_file": "drawers.py"}}
    content = {"type": "write", "path": "/tmp/drawers.json", "content": json.dumps(drawers)}
    return {
        "instruction": f"Open the drawer `{name}` with your tool, and write the word in it to answer.txt.",
        "num_samples": 4,
        "timeout_seconds": 600,
        "runtime": {
            "python": str(HERE / ".venv") if (HERE / ".venv").is_dir() else None,  # the server's environment, if any
            "prepare": [server, content],
        },
        "agent": {
            "harness": "claude_code",
            "max_turns": 20,
            "mcp_servers": {"drawers": {"command": ["python3", "/tmp/drawers.py", "/tmp/drawers.json"]}},
        },
        "evaluator": {
            "strategy": "script",
            "refresh_runtime": True,  # in a clean sandbox that the agent never used
            "config": {
                "command": ["python3", "reward.py"],
                "files": {"reward.py": {"from_file": "reward.py"}},
                "collect": ["answer.txt"],
            },
        },
        "metadata": {"word": drawers[name]},  # for reward.py; hidden from the agent
        "held_out": number >= NUM_TASKS,  # used for evaluation, never for training
    }


lines = [json.dumps(build_task(number)) + "\n" for number in range(NUM_TASKS + NUM_HELD_OUT)]
(HERE / "task.json").write_text(lines[0])
(HERE / "tasks.jsonl").write_text("".join(lines[:NUM_TASKS]))
(HERE / "held_out.jsonl").write_text("".join(lines[NUM_TASKS:]))
