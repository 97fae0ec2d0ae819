"""Harbor's own runner judges tasks with several steps: the same task gives the same rewards there and here.

Harbor needs Python 3.12 or newer and much else, so it is in its own environment: GANGLINE_HARBOR_PYTHON names its
Python.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.session import SessionResult
from gangline.interop.harbor.tasks.task import read_harbor_task
from gangline.machine.reading.imported import Choices
from gangline.machine.reading.paths import SourcePath
from gangline.node.sessions.attempt import Attempt
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.tasks.vetting.trials import solved_task
from support.compared import same
from support.node.attempt import lease_of, node_parts
from support.requirements import need
from support.service.field_tasks import harbor_task

RUNNER = Path(__file__).parents[1] / "support" / "service" / "harbor_trials.py"
TOML = """
[agent]
timeout_sec = 60
[environment]
network_mode = "no-network"
env = { SLED = "red" }
"""


def step(name: str, **lines: str) -> str:
    return f'[[steps]]\nname = "{name}"\n' + "".join(f"{key} = {value}\n" for key, value in lines.items())


def files(name: str, solve: str, test: str, **more: str) -> dict[str, str]:
    """A step's. more: path in the step's folder -> text."""
    given = {"instruction.md": "Walk.\n", "solution/solve.sh": f"#!/bin/bash\n{solve}\n"}
    given |= {"tests/test.sh": f"#!/bin/bash\n{test}\n", **more}
    return {f"steps/{name}/{path}": text for path, text in given.items()}


def scores(text: str) -> str:
    return f"echo '{text}' > /logs/verifier/reward.json"


GIVES = "echo {} > /logs/verifier/reward.txt".format
IF_MADE = '[ "$(cat made 2>/dev/null)" = "red 4" ] && echo 1 > /logs/verifier/reward.txt || ' + GIVES(0.25)
ALL_GONE = (
    "hidden=$(ls -A /tests | tr '\\n' ' '); [ \"$hidden\" = 'test.sh wanted.bin ' ] && [ ! -e /logs/verifier/old ] && "
    "[ ! -s seen ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
)
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "mean of numbers by name": (
        step("a") + step("b") + step("c"),
        files("a", "true", scores('{"reward": 1, "style": 0.5}'))
        | files("b", "true", scores('{"reward": 0.5}'))
        | files("c", "true", scores('{"reward": 0, "speed": 3}')),
    ),
    "one number with another name": (
        step("a", min_reward="{ style = 0.1 }") + step("b"),
        files("a", "true", scores('{"style": 0.5}')) | files("b", "true", scores('{"style": 0.1}')),
    ),
    "final": (
        step("a") + step("b"),
        files("a", "true", GIVES(1)) | files("b", "touch b", "[ -e b ]; echo $((1 - $?)) > /logs/verifier/reward.txt"),
    ),
    "a step continues from what the one before left": (
        step("a") + step("b", healthcheck='{ command = "test -e prepared" }'),
        files("a", 'echo "$SLED" > first', GIVES(0.5))
        | files(
            "b",
            'echo "$(cat first) $(wc -c < data/words.bin | tr -d " ")" > made',
            IF_MADE,
            **{"workdir/deep/seed": "7", "workdir/setup.sh": "test -e deep/seed && touch prepared\n"},
        ),
    ),
    "below a minimum": (
        step("a", min_reward="0.5") + step("b", min_reward="0.5") + step("c"),
        files("a", "true", GIVES(0.5)) | files("b", "true", GIVES(0.25)) | files("c", "true", GIVES(1)),
    ),
    "below a minimum of one name": (
        step("a", min_reward="{ reward = 0, style = 0.5 }") + step("b"),
        files("a", "true", scores('{"reward": 1, "style": 0.4}')) | files("b", "true", GIVES(1)),
    ),
    "a minimum for a number that is not given": (
        step("a", min_reward="{ speed = -1 }") + step("b"),
        files("a", "true", GIVES(1)) | files("b", "true", GIVES(1)),
    ),
    "an agent that fails": (
        step("a") + step("b"),
        files("a", "touch a; exit 3", "[ -e a ]; echo $((1 - $?)) > /logs/verifier/reward.txt")
        | files("b", "true", GIVES(0.5)),
    ),
    "an agent that is late": (
        step("a", agent="{ timeout_sec = 3 }") + step("b"),
        files("a", "touch a; exec sleep 60", "[ -e a ]; echo $((1 - $?)) > /logs/verifier/reward.txt")
        | files("b", "true", GIVES(0.5)),
    ),
    "what a shared verifier had is gone": (
        step("a") + step("b"),
        files("a", "true", f"touch /logs/verifier/old; {GIVES(1)}", **{"tests/secret": "42"})
        | files("b", "ls -A /logs/verifier > seen; ls /tests >> seen", ALL_GONE),
    ),
    "its own verifier gets artifacts": (
        step("a", artifacts='["/app/answer"]', verifier='{ environment_mode = "separate" }') + step("b"),
        files("a", "echo 5 > answer; echo 6 > other", "[ -e answer ] && [ ! -e other ] && [ ! -e seed ]; "
              "echo $((1 - $?)) > /logs/verifier/reward.txt", **{"workdir/seed": "1"})
        | files("b", "true", "[ -e other ] && [ -e seed ]; echo $((1 - $?)) > /logs/verifier/reward.txt"),
    ),
}  # fmt: skip


@pytest.fixture
async def python() -> str:
    found = os.environ.get("GANGLINE_HARBOR_PYTHON", "")
    need(shutil.which(found), "GANGLINE_HARBOR_PYTHON names no Python with Harbor: run make test-peers")
    try:
        await BubblewrapRuntime().check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    return found


async def theirs(python: str, task: Path, work: Path, agent: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(python, str(RUNNER), str(task), str(work), agent),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out.splitlines()[-1])


async def ours(task: Path, work: Path, agent: str) -> SessionResult:
    body = read_harbor_task(SourcePath.of(task), Choices(runtime="sandbox", network="proxy")).body
    body["agent"] = {"harness": "shell", "settings": {"command": "true"}, "allow_no_model_call": True}
    if agent == "oracle":
        body |= solved_task("t", body) or {}
    async with node_parts(work) as parts, asyncio.timeout(180):
        return await Attempt(lease_of(**body), parts).live()


def floats(values: Mapping[str, float]) -> dict[str, Any]:
    return {name: pytest.approx(value) for name, value in values.items()}


@pytest.mark.parametrize("agent", ["oracle", "nop"])
@pytest.mark.parametrize("case", CASES)
async def test_a_task_gives_the_rewards_that_harbors_runner_gives(
    tmp_path: Path, python: str, case: str, agent: str
) -> None:
    steps, given = CASES[case]
    strategy = f'multi_step_reward_strategy = "{"final" if case == "final" else "mean"}"\n'
    task = harbor_task(tmp_path / "task", strategy + TOML + steps, **given)
    wanted = await theirs(python, task, tmp_path / "harbor", agent)
    assert wanted["error"] is None
    found = await ours(task, tmp_path / "gangline", agent)
    told = found.reward_details
    values = {(case, agent): [one["values"] for one in told["steps"]]}
    same("Harbor, its Trial", {(case, agent): [floats(one) for one in wanted["steps"]]}, values)
    if "reward" in wanted["rewards"] or len(wanted["rewards"]) == 1:
        assert told["values"] == floats(wanted["rewards"])
        assert found.reward == wanted["rewards"].get("reward", next(iter(wanted["rewards"].values())))


async def test_a_step_that_cannot_be_graded_ends_both_and_only_harbor_rewards_the_steps_before(
    tmp_path: Path, python: str
) -> None:
    given = files("a", "true", GIVES(1)) | files("b", "true", "true") | files("c", "true", GIVES(1))
    task = harbor_task(tmp_path / "task", TOML + step("a") + step("b") + step("c"), **given)
    wanted = await theirs(python, task, tmp_path / "harbor", "oracle")
    assert (wanted["steps"], wanted["rewards"]) == ([{"reward": 1}, None], {"reward": 1})
    found = await ours(task, tmp_path / "gangline", "oracle")
    assert (found.outcome, found.reward, len(found.reward_details["steps"])) == ("infra_error", None, 2)
