"""A stand-in for a strong model: a script for the scripted engine that solves a part of each repository's tasks.

    usage: teacher.py > teacher.json

With a real teacher, leave this out and name its engine: `gangline up --engine http://...`.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from repositories import NAMES, Bug, bugs

SOLVED = dict(zip(NAMES, (9, 8, 6, 5, 3, 2), strict=True))
"""Of the ten tasks of each repository."""

_REPLACE = "import sys; text = open('core.py').read(); open('core.py', 'w').write(text.replace(*sys.argv[1:]))"


def script() -> dict[str, Any]:
    seen = dict.fromkeys(NAMES, 0)
    rules: list[dict[str, Any]] = []
    for bug in bugs():
        rules += _rules(bug, place=seen[bug.repository])
        seen[bug.repository] += 1
    return {"rules": rules, "default": {"text": "I do not know."}}


def _rules(bug: Bug, place: int) -> list[dict[str, Any]]:
    """Unsolved tasks fail in turn by a wrong fix, and by none."""
    solved = place < SOLVED[bug.repository]
    turns: list[dict[str, Any]] = [
        {"thinking": "I look at the code first.", "tool_calls": [{"run": "cat core.py"}]},
    ]
    if solved or place % 2:
        fix = bug.fix if solved else bug.wrong_fix
        command = shlex.join(["python3", "-c", _REPLACE, bug.planted, fix])
        turns.append({"thinking": f"It should say `{fix}`.", "tool_calls": [{"run": command}]})
    turns += [{"tool_calls": [{"run": "git diff"}]}, {"text": "I fixed the function in core.py."}]
    where = {"pattern": re.escape(f"({bug.instance_id})"), "where": "any"}
    return [{**where, "turn": turn, **reply} for turn, reply in enumerate(turns)]


if __name__ == "__main__":
    print(json.dumps(script()))
