"""Grade one session of the file-reading task: half for looking into the right file, half for the right word.

Runs in a clean runtime with nothing but the standard library. What counts is what the model said to the agent program,
as recorded on its way (`.gangline/trajectory.json`), not what the program printed: its first answer must be the look,
its second the word.
"""

import json
import shlex
from pathlib import Path
from typing import Any

ALLOWED = ("cat", "head", "tail")


def answers(trajectory: dict) -> list[dict[str, Any]]:
    """All that the model said, in order, as messages of OpenAI's chat API."""
    return [
        message
        for trace in trajectory["traces"]
        for message in trace["response_messages"]
        if message["role"] == "assistant"
    ]


def prints_file(command: str, name: str) -> bool:
    """Whether this is exactly one allowed command, and on the named file."""
    try:
        words = shlex.split(command)
    except ValueError:
        return False
    return len(words) == 2 and words[0] in ALLOWED and words[1] == name


def reads_file(calls: list[dict[str, Any]], name: str) -> bool:
    """Whether this is exactly one call of the tool `read`, and on the named file."""
    functions = [call["function"] for call in calls]
    return [function["name"] for function in functions] == ["read"] and _path(functions[0]["arguments"]) == name


def _path(arguments: str) -> object:
    try:
        return json.loads(arguments)["path"]
    except (ValueError, KeyError, TypeError):
        return None


def main() -> None:
    expected = json.loads(Path("expected.json").read_text())
    said = answers(json.loads(Path(".gangline/trajectory.json").read_text()))
    look, word = (*said, {"content": ""}, {"content": ""})[:2]
    calls = look.get("tool_calls", [])
    if expected["reads_by"] == "tool":
        look_ok = reads_file(calls, expected["file"])
    else:
        look_ok = not calls and prints_file(look["content"], expected["file"])
    word_ok = word["content"].strip() == expected["word"] and not word.get("tool_calls")
    result = {
        "reward": 0.5 * look_ok + 0.5 * word_ok,
        "look": calls or look["content"],
        "look_ok": look_ok,
        "word": word["content"],
        "word_ok": word_ok,
    }
    Path("reward.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
