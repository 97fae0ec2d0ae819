"""Tasks of verifiers as ours: the same rewards as by verifiers itself, and named reasons where that cannot be."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.contracts import Reward
from gangline.domain.errors import InvalidRequest
from gangline.domain.ids import new_id
from gangline.domain.sandbox import RuntimeStart, Sandbox
from gangline.domain.task import ExecAction, RuntimeSpec, decoded
from gangline.machine.reading.imported import Choices, Imported
from gangline.settings import plugins
from gangline.tasks.importers.source import Wanted, read_source
from support.compared import same
from support.node.environments import directly, need_python
from support.requirements import need
from support.training.evaluation_samples import a_context, a_trace, said

ADDING = """
import verifiers.v1 as vf
from shared import is_right

__all__ = ["AddingTaskset"]


class AddingData(vf.TaskData):
    answer: str


class AddingTask(vf.Task[AddingData]):
    @vf.reward(weight=2.0)
    async def correct(self, task, trace) -> float:
        return float(is_right(trace.last_reply, task.answer))

    @vf.reward
    async def short(self, trace):
        return {"brief": 0.25 if len(trace.last_reply) < 20 else 0.0}

    @vf.metric
    async def num_turns(self, trace) -> float:
        return float(trace.num_turns)


class AddingTaskset(vf.Taskset[AddingTask, vf.TasksetConfig]):
    def load(self):
        for number in (40, 50):
            data = AddingData(id=f"plus-{number}", prompt=f"What is {number} + 2?", system_prompt="Be brief.",
                              answer=str(number + 2), timeout=vf.TaskTimeout(agent=77.0))
            yield AddingTask(data, self.config.task)
"""
SHARED = "def is_right(reply, answer):\n    return reply.split()[-1:] == [answer]\n"
CODING = """
import verifiers.v1 as vf

__all__ = ["CodingTaskset"]


class CodingTask(vf.Task[vf.TaskData]):
    async def setup(self, trace, runtime):
        await runtime.write("data/numbers.txt", b"20 22")
        done = await runtime.run(["sh", "-c", "printf %s $WORD >word.txt"], {"WORD": "ready"})
        assert done.exit_code == 0, done.stderr

    async def finalize(self, trace, runtime):
        trace.info["word"] = (await runtime.read("word.txt")).decode()

    @vf.reward
    async def runs(self, trace, runtime) -> float:
        ended = await runtime.run(["python3", "solution.py"], {"BASE": "10"})
        return float(ended.exit_code == 0 and ended.stdout.strip() == "52" and trace.info["word"] == "ready")


class CodingTaskset(vf.Taskset[CodingTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield CodingTask(vf.TaskData(prompt="Add data/numbers.txt and $BASE in solution.py."), self.config.task)
"""
ODD = """
import verifiers.v1 as vf

__all__ = ["OddTaskset"]


class OddTask(vf.Task[vf.TaskData]):
    @vf.stop
    async def enough(self, trace) -> bool:
        return True

    @vf.reward
    async def right(self, trace) -> float:
        return 1.0


class OddTaskset(vf.Taskset[OddTask, vf.TasksetConfig]):
    def load(self):
        yield OddTask(vf.TaskData(agent_user="root", image="alpine", network_allow=["example.org"]), self.config.task)
"""
THEIRS = """
import asyncio
sys.path.insert(0, given["folder"])
import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type
task = next(iter(load_taskset(taskset_config_type("adding")(id="adding"))))
async def rewarded(reply):
    trace = vf.Trace(task=vf.TraceTask(type="AddingTask", data=task.data), agent=vf.AgentInfo(config=vf.AgentConfig()))
    trace.nodes.append(MessageNode(message={"role": "user", "content": task.data.prompt}))
    trace.nodes.append(MessageNode(parent=0, message={"role": "assistant", "content": reply}, sampled=True))
    await task.score(trace)
    return trace.reward
result = [asyncio.run(rewarded(reply)) for reply in given["replies"]]
"""
REPLIES = ["42", "I think that it must be 42", "no"]
SOLUTION = "import os; print(sum(map(int, open('data/numbers.txt').read().split())) + int(os.environ['BASE']))"
CHEAT = """
for path in ("reward.json", "/home/grader/reward.json"):
    try:
        open(path, "w").write('{"reward": 1}')
    except OSError:
        pass
"""


@pytest.fixture(scope="module")
def python() -> str:
    return need_python("GANGLINE_VERIFIERS", "verifiers", "verifiers")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasksets")
    for name, text in (("adding", ADDING), ("shared", SHARED), ("coding", CODING), ("odd", ODD)):
        (folder / f"{name}.py").write_text(text)
    return folder


def imported(python: str, place: Path, name: str, **wanted: Any) -> list[dict[str, Any]]:
    found = [*read_source(Path(f"verifiers:{place}/{name}.py"), Wanted(choices=Choices(python=python), **wanted))]
    return [one.body for one in found if isinstance(one, Imported)]


@asynccontextmanager
async def prepared(body: dict[str, Any], folder: Path) -> AsyncGenerator[Sandbox]:
    spec = RuntimeSpec.model_validate({**body["runtime"], "network": "none"})
    runtime_id = new_id("sandbox")
    start = RuntimeStart(runtime_id=runtime_id, owner="test", spec=spec, folder=folder / runtime_id)
    handle = await plugins.make_runtime(spec.backend).start(start)
    try:
        for action in spec.prepare:
            if isinstance(action, ExecAction):
                ran = await handle.exec(action.command)
                assert ran.ok, ran.stderr
            else:
                await handle.upload(action.path, decoded(action.content, action.encoding), mode=action.mode)
        yield handle
    finally:
        await handle.stop()


async def scored(body: dict[str, Any], handle: Sandbox, *answers: str) -> Reward:
    evaluator = plugins.make_evaluator(body["evaluator"]["strategy"], body["evaluator"]["config"])
    traces = tuple(a_trace(said("assistant", one), prompt=(said("user", body["instruction"]),)) for one in answers)
    fresh = handle if body["evaluator"].get("refresh_runtime") else None
    return await evaluator.evaluate(a_context(handle, fresh=fresh, traces=traces))


async def test_an_answer_earns_what_verifiers_gives(python: str, place: Path, tmp_path: Path) -> None:
    first, second = imported(python, place, "adding")
    assert (first["instruction"], first["timeout_seconds"]) == ("Be brief.\n\nWhat is 40 + 2?", 77.0)
    assert first["solution"] == {"answer": "42", "reward": 2.25, "floor": 0.25}
    assert second["metadata"]["instance"]["answer"] == "52"
    assert "42" not in str(first["runtime"])
    theirs = directly(python, THEIRS, folder=str(place), replies=REPLIES)
    assert theirs == [2.25, 2.0, 0.25]
    async with prepared(first, tmp_path) as handle:
        ours = [await scored(first, handle, reply) for reply in REPLIES]
    keys = [("adding", reply) for reply in REPLIES]
    given = dict(zip(keys, (one.reward for one in ours), strict=True))
    same("verifiers", dict(zip(keys, theirs, strict=True)), given)
    assert ours[0].details["metrics"] == {"num_turns": 1.0}
    assert ours[0].details["rewards"]["correct"] == {"score": 1.0, "weight": 2.0}


async def test_hooks_run_over_the_sandbox_as_the_agent(python: str, place: Path, tmp_path: Path) -> None:
    need(os.geteuid() == 0, "does not apply: a scorer's own user needs root")
    (body,) = imported(python, place, "coding", limit=1)
    async with prepared(body, tmp_path) as handle:
        assert not (await handle.exec("ls -d .verifiers")).ok, "the set-up's files are left"
        await handle.upload("solution.py", CHEAT.encode())
        assert (await scored(body, handle)).reward == 0.0
        await handle.upload("solution.py", SOLUTION.encode())
        assert (await scored(body, handle)).reward == 1.0


def test_what_cannot_be_taken_over_is_named(python: str, place: Path, tmp_path: Path) -> None:
    for name, why in (("odd", "when to stop; .*agent_user.*prompt.*network_allow.*alpine"), ("coding", "no end")):
        with pytest.raises(InvalidRequest, match=why):
            imported(python, place, name)
    around = tmp_path / "bin" / "python3"
    around.parent.mkdir()
    around.write_text(f'#!/bin/sh\nexec {python}/bin/python "$@"\n')
    around.chmod(0o755)
    (tmp_path / "adding.py").write_text(ADDING)
    (tmp_path / "shared.py").write_text(SHARED)
    with pytest.raises(InvalidRequest, match="agents see the Python environment"):
        imported(str(tmp_path), tmp_path, "adding")
    with pytest.raises(InvalidRequest, match="--python"):
        next(read_source(Path("verifiers:adding"), Wanted()))
