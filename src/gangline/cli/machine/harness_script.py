"""The script of `gangline harness check`: the played model's steps through the task, in any form that a program allows.

Most programs offer tools, and the scripted engine finds the one that is meant. Some describe in their prompts other
ways for the model to act or to end: those rules come first, and are recognised by the prompts' words.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["CONTENT", "SCRIPT"]

CONTENT = "hello, sled"
_FILE = "/workspace/hello.txt"
"""Some programs refuse to write to a path that is relative."""
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def _told(words: str, **rule: Any) -> dict[str, Any]:
    """A rule for programs that have these words (a pattern) anywhere in their prompt."""
    return {"pattern": words, "where": "any", **rule}


def _typed(turn: int, keys: str, *, is_done: bool = False) -> dict[str, Any]:
    """terminus-2 presses keys. It asks whether the end was meant."""
    commands = [{"keystrokes": keys, "duration": 0.3}] if keys else []
    answer = {"analysis": "as asked", "plan": "go on", "commands": commands, "task_complete": is_done}
    return _told('"keystrokes"', turn=turn, text=json.dumps(answer))


_BY_THEIR_WORDS: list[dict[str, Any]] = [
    _told(_SUBMIT, turn=3, tool_calls=[{"run": f"echo {_SUBMIT}"}]),  # how mini-swe-agent ends
    # OpenHands takes no relative paths.
    _told("You are OpenHands", turn=1, tool_calls=[{"run": f"echo '{CONTENT}' > hello.txt"}]),
    _told("You are OpenHands", turn=2, tool_calls=[{"run": "cat hello.txt"}]),
    _typed(0, "ls\n"),
    _typed(1, f"echo '{CONTENT}' > hello.txt\n"),
    _typed(2, "cat hello.txt\n"),
    _typed(3, "", is_done=True),
    _typed(4, "", is_done=True),
    # aider: an edit in the text is all there is.
    {
        "pattern": r"\*SEARCH/REPLACE block\* Rules",
        "text": f"hello.txt\n```\n<<<<<<< SEARCH\n=======\n{CONTENT}\n>>>>>>> REPLACE\n```\n",
    },
]

SCRIPT: dict[str, Any] = {
    "context_length": 1_000_000,
    "rules": [
        *_BY_THEIR_WORDS,
        {"turn": 0, "text": "I look around first.", "tool_calls": [{"run": "ls"}]},
        {"turn": 1, "tool_calls": [{"write": {"path": _FILE, "content": f"{CONTENT}\n"}}]},
        {"turn": 2, "tool_calls": [{"read": _FILE}]},
        {"turn": 3, "text": "hello.txt is written."},
    ],
    "default": {"text": "Greeting"},
}
