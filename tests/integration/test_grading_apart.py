"""A grader as its own user: code under test that it runs can neither write its reward nor read its tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.session import SessionResult
from gangline.node.sessions.attempt import Attempt
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.sandbox.namespaced import can_give_users
from support.node.attempt import lease_of, node_parts

GRADE = """
import json, os, subprocess, sys
ran = subprocess.run(
    [os.environ["GANGLINE_SOLUTION"], "python3", "solution.py", "a b", "$c"],
    input=b"6", capture_output=True, timeout=5,
)
answer = json.load(open("answer.json"))
reward = float(ran.returncode == 0 and ran.stdout.strip() == str(answer).encode())
said = {"said": ran.stdout.decode(), "errors": ran.stderr.decode()[-500:], "code": ran.returncode}
json.dump({"reward": reward, **said}, open("reward.json", "w"))
"""


@pytest.fixture
async def _users() -> None:
    try:
        await BubblewrapRuntime().check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    if not can_give_users():
        pytest.skip("a second user needs root")


async def graded(tmp_path: Path, solution: str, backend: str = "sandbox", **changes: Any) -> SessionResult:
    config = {
        "command": ["python3", "-I", "grade.py"],
        "separate": True,
        "files": {"grade.py": GRADE, "answer.json": "36"},
        "collect": ["solution.py"],
    }
    evaluator = {"strategy": "script", "config": config, "refresh_runtime": True, **changes}
    agent = {
        "harness": "shell",
        "settings": {"command": f"cat > solution.py <<'END'\n{solution}\nEND"},
        "allow_no_model_call": True,
    }
    async with node_parts(tmp_path) as parts:
        lease = lease_of(runtime={"backend": backend}, agent=agent, evaluator=evaluator)
        return await Attempt(lease, parts).live()


@pytest.mark.usefixtures("_users")
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "own"])
async def test_a_solution_runs_with_the_graders_streams_and_arguments(tmp_path: Path, clean: bool) -> None:
    solution = "import sys\nassert sys.argv[1:] == ['a b', '$c']\nprint(int(sys.stdin.read()) ** 2)"
    result = await graded(tmp_path, solution, refresh_runtime=clean)
    assert (result.outcome, result.reward) == ("completed", 1.0), (result.failure, result.reward_details)


CHEATS = {
    "writes the reward": (
        "import os\nfor place in ('/home/grader', '.', '..', os.path.expanduser('~')):\n"
        "  try: open(place + '/reward.json', 'w').write('1')\n  except OSError as error: print(error)"
    ),
    "writes to every descriptor": (
        "import os\nfor fd in range(3, 100):\n  try: os.write(fd, b'1')\n  except OSError: pass\n"
        "import glob\nfor name in glob.glob('/proc/[0-9]*/fd/*'):\n  try: open(name, 'w').write('1')\n"
        "  except OSError: pass"
    ),
    "reads the answer": "print(open('/home/grader/answer.json').read())",
    "kills whom it can": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "plants a module": "open('json.py', 'w').write('raise SystemExit')",
}


@pytest.mark.usefixtures("_users")
@pytest.mark.parametrize("cheat", CHEATS)
async def test_code_under_test_reaches_neither_the_reward_nor_the_tests(tmp_path: Path, cheat: str) -> None:
    result = await graded(tmp_path, CHEATS[cheat])
    assert (result.outcome, result.failure, result.reward) == ("completed", None, 0.0)
    assert result.reward_details["code"] != 0 or "36" not in result.reward_details["said"], json.dumps(
        result.reward_details
    )


async def test_a_runtime_without_a_second_user_says_so(tmp_path: Path) -> None:
    result = await graded(tmp_path, "print(36)", backend="process", on_failure=0.0)
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert "second user" in result.failure.message
