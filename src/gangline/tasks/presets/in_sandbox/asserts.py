"""Runs the tests of `tests.json` on the file `solution.py`, and writes `reward.json`: `python3 -I asserts.py`.

A program of its own runs the solution and its tests in one process, as the benchmarks' own runners do. It passes only
if it hands back a random word after the last test, so a solution that merely ends the process has not passed. One that
looks for the word, or returns objects that equal everything, can pass, as with the benchmarks' own runners.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import types
from typing import Any, Dict

MOST_SHOWN = 500


def child() -> None:
    job = json.load(sys.stdin)
    end = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        for part in ("before", "solution", "after"):
            exec(compile(job[part], part, "exec"), module.__dict__)
    except BaseException as error:
        os.write(end, f"{type(error).__name__}: {error}"[:MOST_SHOWN].encode("utf-8", "replace"))
    else:
        os.write(end, job["word"].encode())


def graded(tests: Dict[str, Any]) -> Dict[str, Any]:
    try:
        with open("solution.py", encoding="utf-8") as file:
            solution = file.read()
    except (OSError, ValueError) as error:
        return {"reward": 0.0, "why": f"solution.py: {error}"[:MOST_SHOWN]}
    word = secrets.token_hex(16)
    job = json.dumps({**tests, "solution": solution, "word": word}).encode()
    with tempfile.TemporaryFile() as end:
        run = subprocess.Popen(
            [sys.executable, "-I", __file__, "child"],
            stdin=subprocess.PIPE,
            stdout=end,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            run.communicate(job, timeout=tests["seconds"])
            why = ""
        except subprocess.TimeoutExpired:
            why = f"not done in {tests['seconds']} s"
        with contextlib.suppress(OSError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        end.seek(0)
        said = end.read(MOST_SHOWN).decode("utf-8", "replace")
    if said == word and not why:
        return {"reward": 1.0}
    return {"reward": 0.0, "why": why or said or "the process ended before its tests"}


def main() -> None:
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests.json"), encoding="utf-8") as file:
        found = graded(json.load(file))
    with open("reward.json", "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    child() if sys.argv[1:] == ["child"] else main()
