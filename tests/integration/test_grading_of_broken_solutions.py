"""Solutions that end their grader: they earn what the task says, and a broken grader earns nobody anything.

The grid: how a solution breaks x where it is graded x whether a session of its task was graded before.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.session import SessionResult
from gangline.grading import test_on_output
from gangline.node.sessions.attempt import Attempt
from gangline.node.sessions.parts import NodeParts
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from support.node.attempt import lease_of, node_parts

IMPORTS = "import sol, json\njson.dump({'reward': float(sol.f(2) == 4)}, open('reward.json', 'w'))\n"
RIGHT = "def f(x): return 2 * x"
WRONG = "def f(x): return x"
ENDS = {
    "syntax error": "def f(x) return x",
    "no such name": "def g(x): return x",
    "ends well at once": "import os; os._exit(0)",
    "ends badly at once": "import os; os._exit(1)",
    "exits": "import sys; sys.exit(0)",
    "endless": "while True: pass",
    "takes memory": "x = bytearray(8 << 30)",
    "recursion": "def f(x): return f(x)",
    "kills its shell": "import os, signal; os.kill(os.getppid(), 9)",
    "kills itself": "import os, signal; os.kill(os.getpid(), 11)",
    "removes the reward": "import atexit, os\natexit.register(lambda: os.remove('reward.json'))\ndef f(x): return 4",
    "spoils the reward": "import atexit, os\natexit.register(lambda: open('reward.json', 'w').write('NaN'))\n" + RIGHT,
    "a folder for a reward": "import os; os.mkdir('reward.json')\n" + RIGHT,
    "much output": "import sys\nwhile True: sys.stdout.write('x' * 65536)",
    "many processes": "import os\nwhile True: os.fork()",
    "a link for a reward": "import os; os.symlink('/proc/self/environ', 'reward.json'); os._exit(0)",
}


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncGenerator[NodeParts]:
    try:
        await BubblewrapRuntime().check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    async with node_parts(tmp_path) as parts:
        yield parts


class Sessions:
    """Sessions of one task, each with another agent."""

    def __init__(self, parts: NodeParts, *, clean: bool, first: int = 0, **evaluator: Any) -> None:
        config: dict[str, Any] = {"command": "python3 grade.py", "files": {"grade.py": IMPORTS}, "timeout_seconds": 3}
        if clean:
            config["collect"] = ["sol.py"]
        given = {"strategy": "script", "refresh_runtime": clean} | evaluator
        self._evaluator = given | {"config": config | evaluator.get("config", {})}
        self._parts = parts
        self._num = first
        self.backend = "sandbox"

    async def end(self, solution: str | None, name: str = "sol.py") -> SessionResult:
        self._num += 1
        command = "true" if solution is None else f"cat > {name} <<'END'\n{solution}\nEND"
        lease = lease_of(
            f"s{self._num}",
            runtime={"backend": self.backend, "limits": {"memory_bytes": 512 << 20, "max_pids": 64}},
            agent={"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True},
            evaluator=self._evaluator,
        )
        return await Attempt(lease, self._parts).live()


def told(result: SessionResult) -> tuple[str, str | None, float | None]:
    return result.outcome, result.failure and result.failure.code, result.reward


SPOILED = ("agent_error", "grading_spoiled", -1.0)


@pytest.mark.parametrize("ends", ENDS)
async def test_in_a_clean_runtime_the_first_session_earns_what_its_task_says(parts: NodeParts, ends: str) -> None:
    sessions = Sessions(parts, clean=True, on_failure=-1.0)
    assert told(await sessions.end(ENDS[ends])) == SPOILED


@pytest.mark.parametrize("ends", ENDS)
async def test_in_the_agents_runtime_a_session_after_a_good_one_does(parts: NodeParts, ends: str) -> None:
    sessions = Sessions(parts, clean=False, on_failure=-1.0)
    assert told(await sessions.end(RIGHT)) == ("completed", None, 1.0)
    assert told(await sessions.end(ENDS[ends])) == SPOILED


_LOADS = """
import importlib.util
spec = importlib.util.spec_from_file_location("s", "sol.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
ok = module.f(2) == 4
"""
_RUNS = """
import subprocess
out = subprocess.run(["python3", "sol.py"], check=True, capture_output=True, text=True).stdout
ok = out.strip() == "4"
"""
GRADERS = {
    "imports a name": ("from sol import f\nok = f(2) == 4", "sol.py"),
    "imports a module": ("import sol as s\nok = s.f(2) == 4", "sol.py"),
    "adds up": ("import sol\nok = sum(sol.f(x) == 2 * x for x in range(4)) / 4 == 1", "sol.py"),
    "compares numbers": ("import sol\nok = abs(sol.f(2) - 4) < 1e-6", "sol.py"),
    "loads a file": (_LOADS, "sol.py"),
    "runs a program": (_RUNS, "sol.py"),
    "opens a text": ("ok = open('a.txt').read().split()[:1] == ['4']", "a.txt"),
    "loads JSON": ("import json\nok = json.load(open('a.json')).get('x') == 4", "a.json"),
}
"""Name -> a grader of the usual kind, and the file that it needs."""
UNREADABLE = {"sol.py": "def f(x) return x", "a.txt": "", "a.json": "{"}


def grader(source: str, path: str, **config: Any) -> dict[str, Any]:
    source = f"{source}\nopen('reward.txt', 'w').write(str(int(ok)))"
    return {"files": {"grade.py": source}, "collect": [path], **config}


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "own"])
@pytest.mark.parametrize("form", GRADERS)
async def test_graders_of_the_usual_forms_are_not_called_broken(parts: NodeParts, form: str, clean: bool) -> None:
    """`collect` names the files of the solution, also where nothing is copied."""
    source, path = GRADERS[form]
    sessions = Sessions(parts, clean=clean, on_failure=0.0, config=grader(source, path))
    assert told(await sessions.end(None))[2] == 0.0
    assert told(await sessions.end(UNREADABLE[path], path))[2] == 0.0


async def test_a_task_that_says_nothing_gives_a_spoiled_grading_no_reward(parts: NodeParts) -> None:
    sessions = Sessions(parts, clean=True)
    assert told(await sessions.end(ENDS["syntax error"])) == ("agent_error", "grading_spoiled", None)


NEEDY = "import sol, json\nassert sol.ANSWERS['x'] == 1\njson.dump(float(sol.f(2) == 4), open('reward.json', 'w'))"
"""It calls no stand-in good enough."""


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "own"])
async def test_a_grader_that_has_graded_another_session_is_not_broken(parts: NodeParts, clean: bool) -> None:
    config = {"files": {"grade.py": NEEDY}, "timeout_seconds": 8}  # a busy machine needs more than the usual 3 s
    sessions = Sessions(parts, clean=clean, on_failure=-1.0, config=config)
    first = await sessions.end(ENDS["ends badly at once"])
    assert told(first) == ("infra_error", "evaluator_error", None), "nothing shows yet that this grader works"
    assert first.failure is not None
    assert "`gangline vet`" in first.failure.message
    assert told(await sessions.end(f"ANSWERS = {{'x': 1}}\n{WRONG}")) == ("completed", None, 0.0)
    for ends in ("ends badly at once", "syntax error", "endless"):
        assert told(await sessions.end(ENDS[ends])) == SPOILED
    other = Sessions(parts, clean=clean, first=10, on_failure=-1.0, config=config | {"env": {"A": "B"}})
    assert told(await other.end(ENDS["syntax error"]))[0] == "infra_error"


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "own"])
async def test_a_grader_that_worked_and_broke_since_costs_no_agent_anything(
    parts: NodeParts, tmp_path: Path, clean: bool
) -> None:
    """The control asks whether it works now."""
    needed = tmp_path / "service"
    needed.write_text("up")
    config: dict[str, Any] = {"command": f"cat {needed} && python3 grade.py", "collect": ["sol.py"]}
    sessions = Sessions(parts, clean=clean, on_failure=0.0, config=config)
    sessions.backend = "process"
    assert told(await sessions.end(RIGHT)) == ("completed", None, 1.0)
    needed.unlink()
    assert told(await sessions.end(RIGHT)) == ("infra_error", "evaluator_error", None)
    needed.write_text("up")
    assert told(await sessions.end(RIGHT)) == ("completed", None, 1.0)
    assert told(await sessions.end(ENDS["syntax error"])) == ("agent_error", "grading_spoiled", 0.0)


_ASKS = """
try:
    import sol
    ok = sol.f(2) == 4
except Exception:
    ok = False
if ok:
    open(%r).close()
open('reward.txt', 'w').write(str(int(ok)))
"""


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "own"])
async def test_a_grader_that_breaks_only_on_right_solutions_costs_no_agent_anything(
    parts: NodeParts, tmp_path: Path, clean: bool
) -> None:
    """It gives nothing at all and stand-ins their 0 at once, which does not show that it works."""
    needed = tmp_path / "service"
    needed.write_text("up")
    sessions = Sessions(parts, clean=clean, on_failure=0.0, config=grader(_ASKS % str(needed), "sol.py"))
    sessions.backend = "process"
    assert told(await sessions.end(RIGHT)) == ("completed", None, 1.0)
    needed.unlink()
    assert told(await sessions.end(RIGHT)) == ("infra_error", "evaluator_error", None)


BROKEN = {
    "exit code": "exit 3",
    "no reward": "true",
    "no number": "echo much > reward.json",
    "not JSON": "echo '{' > reward.json",
    "not finite": "echo NaN > reward.json",
    "too slow": "sleep 60",
    "killed": "kill -9 $$",
    "not there": "no-such-program",
    "a module is missing": "python3 -c 'import no_such_module'",
}


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "own"])
@pytest.mark.parametrize("how", BROKEN)
async def test_a_broken_grader_gives_nobody_a_reward(parts: NodeParts, how: str, clean: bool) -> None:
    config = {"command": BROKEN[how], "timeout_seconds": 0.3}
    sessions = Sessions(parts, clean=clean, on_failure=0.0, config=config)
    for solution in (RIGHT, ENDS["syntax error"]):
        assert told(await sessions.end(solution)) == ("infra_error", "evaluator_error", None)


async def test_a_session_that_grades_well_only_once_keeps_nobody_elses_grading_from_being_judged(
    parts: NodeParts,
) -> None:
    """Its files fail as a control; they are forgotten, and the next good session's are remembered."""
    once = f"import time\nANSWERS = {{'x': 1 if time.time() < UNTIL else 2}}\n{WRONG}"
    sessions = Sessions(parts, clean=True, on_failure=-1.0, config={"files": {"grade.py": NEEDY}})
    assert told(await sessions.end(once.replace("UNTIL", f"{time.time() + 3}"))) == ("completed", None, 0.0)
    while told(bad := await sessions.end(ENDS["syntax error"])) == SPOILED:
        pass
    assert bad.outcome == "infra_error"
    assert told(await sessions.end(f"ANSWERS = {{'x': 1}}\n{RIGHT}")) == ("completed", None, 1.0)
    assert told(await sessions.end(ENDS["syntax error"])) == SPOILED


async def test_a_tasks_own_endless_pattern_is_the_tasks_mistake(
    parts: NodeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_on_output, "_REGEX_TIMEOUT_S", 0.5)
    check = {"kind": "regex", "value": "(a|a)*$"}
    for spec in (
        {"strategy": "test_on_output", "config": {"checks": [check]}},
        {"strategy": "composite", "config": {"parts": [{"strategy": "test_on_output", "config": {"checks": [check]}}]}},
    ):
        agent = {"settings": {"command": f"echo {'a' * 40}b"}, "harness": "shell", "allow_no_model_call": True}
        lease = lease_of(f"s{spec['strategy']}", agent=agent, evaluator={"on_failure": 0.0, **spec})
        result = await Attempt(lease, parts).live()
        assert told(result) == ("infra_error", "task_at_fault", None)
