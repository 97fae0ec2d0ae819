"""The stages of sessions on one node: what waits for what, what is started during RUN, what is dead before grading."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gangline.agents.harnesses.shell import ShellHarness
from gangline.domain.completion import Completion
from gangline.domain.contracts import EvaluationContext, HarnessVerdict, Reward
from gangline.domain.errors import EngineUnavailable, RuntimeFailed, StoreError
from gangline.domain.sandbox import ExecRequest, ExecResult, OutputSink, Runtime, RuntimeStart
from gangline.node.health.watchdog import Watchdog
from gangline.node.sessions.attempt import Attempt
from gangline.node.sessions.parts import NodeParts
from gangline.node.sessions.stages import PoolSizes
from gangline.settings import plugins
from gangline.store.journal.log import Journal
from support.node.attempt import lease_of, node_parts
from support.node.folder_runtime import FolderRuntime
from support.service.cli_process import processes_with

SIZES = PoolSizes(init_workers=1, ready_slots=2, run_slots=3, prewarm_workers=1, postrun_workers=1)
GRADED_CLEAN: dict[str, Any] = {
    "evaluator": {
        "strategy": "script",
        "refresh_runtime": True,
        "config": {"command": "echo 1 > reward.txt", "reward_file": "reward.txt"},
    }
}


class Sandboxes(Runtime):
    """A runtime whose starts, commands and kills wait until they are let go."""

    name = "held"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[str] = []
        self.handles: dict[str, Held] = {}
        self.graders_may_start = asyncio.Event()
        self.graders_may_start.set()
        self.agents_may_end = asyncio.Event()
        self.kills_end = asyncio.Event()
        self.kills_end.set()
        self.failing_starts: list[str] = []

    async def start(self, start: RuntimeStart) -> Held:
        self.started.append(start.runtime_id)
        if ".grader" in start.runtime_id:
            await self.graders_may_start.wait()
        if start.runtime_id in self.failing_starts:
            raise RuntimeFailed("no room")
        handle = Held(self.folder / start.runtime_id, self)
        self.handles[start.runtime_id] = handle
        return handle

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        return 0

    def num_graders(self) -> int:
        return sum(".grader" in name for name in self.started)


class Held(FolderRuntime):
    def __init__(self, folder: Path, sandboxes: Sandboxes) -> None:
        super().__init__(folder)
        self._sandboxes = sandboxes

    async def run(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        if request.command == "agent":
            await self._sandboxes.agents_may_end.wait()
            return ExecResult(exit_code=0)
        return await super().run(request, on_output)

    async def kill(self, *, grace_s: float = 0.0) -> None:
        await self._sandboxes.kills_end.wait()
        await super().kill(grace_s=grace_s)


@pytest.fixture
def sandboxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandboxes:
    made = Sandboxes(tmp_path / "sandboxes")
    monkeypatch.setattr(plugins, "make_runtime", lambda name: made)
    return made


def begun(parts: NodeParts, name: str, **task: Any) -> tuple[Attempt, asyncio.Task[Any]]:
    agent = {"harness": "shell", "settings": {"command": "agent"}, "allow_no_model_call": True}
    attempt = Attempt(lease_of(name, agent=agent, **task), parts)
    return attempt, asyncio.create_task(attempt.live(), name=f"session.{name}")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_clean_runtimes_come_one_by_one_while_agents_run_and_keep_no_session_from_running(
    tmp_path: Path, sandboxes: Sandboxes
) -> None:
    sandboxes.graders_may_start.clear()
    async with node_parts(tmp_path, sizes=SIZES) as parts:
        lives = [begun(parts, f"s{number}", **GRADED_CLEAN) for number in range(3)]
        await until(lambda: all(attempt.stage == "run" for attempt, _ in lives))
        assert sandboxes.num_graders() == 1, "the others wait for the only worker"
        sandboxes.graders_may_start.set()
        await until(lambda: sandboxes.num_graders() == 3)
        assert all(attempt.stage == "run" for attempt, _ in lives), "all are there before any agent has ended"
        sandboxes.agents_may_end.set()
        results = [await life for _, life in lives]
    assert [(result.outcome, result.reward) for result in results] == [("completed", 1.0)] * 3
    assert all("stop" in handle.log for handle in sandboxes.handles.values())


async def test_without_prewarm_workers_a_clean_runtime_starts_when_the_agent_has_ended(
    tmp_path: Path, sandboxes: Sandboxes
) -> None:
    async with node_parts(tmp_path, sizes=SIZES.model_copy(update={"prewarm_workers": 0})) as parts:
        attempt, life = begun(parts, "s1", **GRADED_CLEAN)
        await until(lambda: attempt.stage == "run")
        await asyncio.sleep(0)
        assert sandboxes.num_graders() == 0
        sandboxes.agents_may_end.set()
        assert (await life).reward == 1.0
    assert sandboxes.num_graders() == 1


async def test_a_clean_runtime_of_a_session_that_we_failed_goes_before_anything_else(
    tmp_path: Path, sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_parts(tmp_path, sizes=SIZES) as parts, parts.pools.postrun:
        _, life = begun(parts, "s1", **GRADED_CLEAN)
        await until(lambda: "s1.1.grader" in sandboxes.handles)

        def judge(_harness: ShellHarness, _result: ExecResult) -> HarnessVerdict:
            raise EngineUnavailable("down")

        monkeypatch.setattr(ShellHarness, "judge", judge)
        sandboxes.agents_may_end.set()
        await until(lambda: "stop" in sandboxes.handles["s1.1.grader"].log)
        assert not life.done(), "POSTRUN has no worker for it yet"
        life.cancel()
        await asyncio.wait({life})
    assert "stop" in sandboxes.handles["s1.1.agent"].log


async def test_a_clean_runtime_that_does_not_start_at_once_costs_no_agent_its_work(
    tmp_path: Path, sandboxes: Sandboxes
) -> None:
    sandboxes.failing_starts = ["s1.1.grader"]
    async with node_parts(tmp_path, sizes=SIZES) as parts:
        _, life = begun(parts, "s1", **GRADED_CLEAN)
        sandboxes.agents_may_end.set()
        result = await life
    assert (result.outcome, result.reward) == ("completed", 1.0)
    assert sandboxes.started == ["s1.1.agent", "s1.1.grader", "s1.1.grader.again"]


async def test_a_clean_runtime_that_never_starts_is_told_as_the_runtimes_fault(
    tmp_path: Path, sandboxes: Sandboxes
) -> None:
    sandboxes.failing_starts = ["s1.1.grader", "s1.1.grader.again"]
    async with node_parts(tmp_path, sizes=SIZES) as parts:
        _, life = begun(parts, "s1", **GRADED_CLEAN)
        sandboxes.agents_may_end.set()
        result = await life
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.message) == ("runtime", "no room")


async def test_a_kill_that_hangs_is_told_with_where_it_hangs(tmp_path: Path, sandboxes: Sandboxes) -> None:
    sandboxes.kills_end.clear()
    watchdog = Watchdog(margin_s=0.05)
    async with node_parts(tmp_path, sizes=SIZES) as parts:
        attempt, life = begun(parts, "s1", timeout_seconds=0.1)

        def is_told() -> bool:
            watchdog.look([attempt])
            return bool(watchdog.stuck)

        await until(is_told)
        (stuck,) = watchdog.stuck
        assert (stuck.session_id, stuck.stage) == ("s1", "run")
        frames = [line.rpartition(" ")[2] for line in stuck.waits_at["session.s1"]]
        assert "HarnessRun._executed" in frames
        assert "Held.kill" in frames
        sandboxes.kills_end.set()
        sandboxes.agents_may_end.set()
        result = await life
        watchdog.look([attempt])
    assert result.outcome == "agent_timeout"
    assert watchdog.stuck == []


async def test_a_session_that_waits_for_its_turn_is_never_told_as_stuck(tmp_path: Path, sandboxes: Sandboxes) -> None:
    one_runs = SIZES.model_copy(update={"run_slots": 1, "init_workers": 2})
    async with node_parts(tmp_path, sizes=one_runs) as parts:
        lives = [begun(parts, f"s{number}", init_timeout_seconds=0.01) for number in range(2)]
        await until(lambda: {attempt.stage for attempt, _ in lives} == {"run", "ready"})
        (waiting,) = [attempt for attempt, _ in lives if attempt.stage == "ready"]
        assert waiting.overdue_s() is None
        sandboxes.agents_may_end.set()
        await asyncio.gather(*(life for _, life in lives))
        assert [attempt.overdue_s() for attempt, _ in lives] == [None, None]


async def test_nothing_of_an_agent_that_ran_out_of_time_lives_when_it_is_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = uuid.uuid4().hex
    alive: list[dict[int, str]] = []

    class Looks:
        async def evaluate(self, context: EvaluationContext) -> Reward:
            assert context.outcome == "agent_timeout"
            alive.append(processes_with(mark))
            return Reward(reward=0.5)

    monkeypatch.setattr(plugins, "make_evaluator", lambda strategy, config: Looks())
    command = "(setsid sleep 600 &) ; nohup sh -c 'sleep 600; true' & trap '' TERM; echo begun; sleep 600; sleep 600"
    agent = {"harness": "shell", "settings": {"command": command}, "env": {"MARK": mark}}
    async with node_parts(tmp_path) as parts, asyncio.timeout(60):
        attempt = Attempt(lease_of(agent=agent, timeout_seconds=1.5), parts)
        life = asyncio.create_task(attempt.live())
        await until(lambda: len(processes_with(mark)) >= 4)
        result = await life
    assert (result.outcome, result.reward) == ("agent_timeout", 0.5)
    assert result.artifacts["harness.stdout"] == b"begun\n"
    assert alive == [{}]


@pytest.mark.parametrize(
    ("error", "boundary", "code"),
    [(StoreError("the disk is gone"), "store", "store_error"), (ValueError("no tree"), "node", "internal_error")],
)
async def test_a_session_whose_calls_cannot_be_read_or_built_ends_as_our_fault(
    tmp_path: Path, sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch, error: Exception, boundary: str, code: str
) -> None:
    async def unreadable(self: Journal, key: object) -> list[Completion]:
        raise error

    monkeypatch.setattr(Journal, "read", unreadable)
    sandboxes.agents_may_end.set()
    async with node_parts(tmp_path, sizes=SIZES) as parts:
        _, life = begun(parts, "s1")
        result = await life
    assert result.outcome == "infra_error"
    assert (result.failure.boundary, result.failure.code, result.reward) == (boundary, code, None)
