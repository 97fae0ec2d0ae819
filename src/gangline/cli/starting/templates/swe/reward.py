"""The reward of a session: the share of hidden tests that the repaired function passes.

Each test runs in its own process, whose output is compared here: code that exits early fails.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

CALL = "import json, sys, figures; print(json.dumps(getattr(figures, sys.argv[1])(json.loads(sys.argv[2]))))"


def passes(function: str, values: list[int], result: object) -> bool:
    command = [sys.executable, "-c", CALL, function, json.dumps(values)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return json.loads(done.stdout) == result
    except (ValueError, subprocess.TimeoutExpired):
        return False


if __name__ == "__main__":
    expected = json.loads(Path(os.environ["GANGLINE_TRAJECTORY"]).read_text())["metadata"]
    passed = [passes(expected["function"], values, result) for values, result in expected["tests"]]
    Path("reward.json").write_text(json.dumps({"reward": sum(passed) / len(passed), "passed": passed}))
