"""Tasks of an agent that talks twice and is graded by the length of what was said: enough for a loop of learning."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

TEMPERATURE = 0.8

AGENT = f"""
import json, os, urllib.request

messages = [{{"role": "user", "content": os.environ["QUESTION"]}}]
for _ in range(2):
    body = {{"model": "tiny", "messages": messages, "temperature": {TEMPERATURE}, "max_tokens": 6}}
    headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        message = json.load(reply)["choices"][0]["message"]
    messages += [{{"role": "assistant", "content": message["content"]}}, {{"role": "user", "content": "go on"}}]
"""
GRADER = """
import json

ids = [one["content"] for trace in json.load(open(".gangline/trajectory.json"))["traces"]
       for one in trace["response_messages"] if one["role"] == "assistant"]
json.dump({"reward": len("".join(ids)) % 7 / 6}, open("reward.json", "w"))
"""


def tasks() -> Iterator[dict[str, Any]]:
    for number in count():
        yield {
            "task_id": f"task-{number}",
            "instruction": "say something",
            "num_samples": 4,
            "timeout_seconds": 120,
            "runtime": {"backend": "process", "prepare": [{"type": "write", "path": "agent.py", "content": AGENT}]},
            "agent": {
                "harness": "shell",
                "settings": {"command": ["env", f"QUESTION=say {number}", sys.executable, "agent.py"]},
            },
            "evaluator": {
                "strategy": "script",
                "config": {"command": [sys.executable, "grade.py"], "files": {"grade.py": GRADER}},
            },
        }
