"""Grade one session of the file-reading task: half for the right command, half for the right word.

Runs in a clean runtime with nothing but the standard library. What counts is what the model said to the agent program,
as recorded on its way (`.gangline/trajectory.json`), not what the program printed.
"""

import json
import shlex
from pathlib import Path

ALLOWED = ("cat", "head", "tail")


def answers(trajectory: dict) -> list[str]:
    """All that the model said, in order."""
    return [
        message["content"]
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


def main() -> None:
    expected = json.loads(Path("expected.json").read_text())
    said = answers(json.loads(Path(".gangline/trajectory.json").read_text()))
    command, word = (*said, "", "")[:2]
    command_ok = prints_file(command, expected["file"])
    word_ok = word.strip() == expected["word"]
    reward = 0.5 * command_ok + 0.5 * word_ok
    result = {"reward": reward, "command": command, "command_ok": command_ok, "word": word, "word_ok": word_ok}
    Path("reward.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
