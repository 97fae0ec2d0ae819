"""The reward of a session: 1 if the agent's last line is the word in the file, else 0."""

import json
import os
from pathlib import Path


def reward(printed: str, expected: dict) -> float:
    return float(printed.strip().splitlines()[-1:] == [expected["word"]])


if __name__ == "__main__":
    session = json.loads(Path(os.environ["GANGLINE_TRAJECTORY"]).read_text())
    printed, expected = session["harness_stdout"], session["metadata"]
    found = {"reward": reward(printed, expected), "printed": printed[-200:], "expected": expected}
    Path("reward.json").write_text(json.dumps(found))
