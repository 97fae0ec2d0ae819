"""What the reference trainer works with, in memory: engines, a service, and a learner that only counts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gangline.domain.errors import EngineUnavailable
from gangline.domain.node_views import GateState
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.views import Submitted
from gangline.train.learning.samples import Sample
from gangline.train.runs.records import StepRecord, UpdateProfile
from support.training.samples import session, trace
from support.training.service import GOOD, FakeService

PROFILE = UpdateProfile(
    version=1,
    transfer_s=0.2,
    pause_s=0.0,
    drain_s=0.1,
    load_s=0.2,
    resume_s=0.0,
    total_s=0.5,
    num_engines=1,
    num_nodes=1,
    num_bytes=8,
)


def gate_state(*, is_drained: bool = False) -> GateState:
    """The answer of a gate that nothing waits at; `is_drained`: it is closed."""
    return GateState(
        is_paused=is_drained,
        mode="drain" if is_drained else None,
        version=None,
        lease_left_s=600.0 if is_drained else None,
        num_waiting=0,
        num_in_flight=0,
        is_drained=is_drained,
        num_expired_leases=0,
    )


class Killed(Exception):
    """Stands for a kill -9: nothing of the trainer's own cleaning up is looked at."""


class Engines:
    """Where weights go, and from where sessions get their versions."""

    def __init__(self, version: int | None = None) -> None:
        self.version = version
        self.pushed: list[tuple[int, str]] = []
        self.num_down = 0
        self.lost = asyncio.Event()
        self.mended = asyncio.Event()

    async def latest_version(self) -> int | None:
        return self.version

    async def push(self, save: Callable[[Path], None], version: int) -> UpdateProfile:
        if self.num_down:
            self.num_down -= 1
            raise EngineUnavailable("the engine does not answer.")
        assert self.version is None or version >= self.version
        self.version = version
        folder = Path(f"/nowhere/{version}")
        save(folder)
        self.pushed.append((version, folder.name))
        return PROFILE

    async def ensure(self, version: int, save: Callable[[Path], None]) -> UpdateProfile | None:
        if not self.lost.is_set():
            return None
        self.lost.clear()
        self.mended.set()
        return PROFILE


class Service(FakeService):
    """Ends every task at once, or when told to; sessions carry the engines' version of the moment they ended."""

    def __init__(
        self,
        engines: Engines,
        rewards: Callable[[int], tuple[float | None, ...]] = lambda _: GOOD,
        *,
        turns: Sequence[Sequence[int]] = ((10, 11, 2),),
    ) -> None:
        super().__init__()
        self._turns = turns
        self._engines = engines
        self._rewards_of = rewards
        self._results: dict[str, list[SessionResult]] = {}

    async def submit(self, task: TaskRequest | Mapping[str, Any]) -> Submitted:
        assert not isinstance(task, TaskRequest)
        task_id = str(task["task_id"])
        self.rewards.setdefault(task_id, self._rewards_of(int(task_id.rpartition("-")[2].partition(".")[0])))
        return await super().submit(task)

    async def result(self, task_id: str) -> list[SessionResult]:
        if task_id not in self._results:  # what was stored once stays as it is
            version = self._engines.version or 0
            self._results[task_id] = [
                session(
                    f"{task_id}.{index}",
                    reward,
                    trace(turns=self._turns, versions=[version] * len(self._turns)),
                    task_id=task_id,
                )
                for index, reward in enumerate(self.rewards[task_id])
            ]
        return self._results[task_id]


class Learner:
    """Knows which tasks its weights have seen, and how often. kill_at: how many it may have seen, where `kill_in` is
    called.
    """

    def __init__(self, kill_at: int | None = None, kill_in: str = "step") -> None:
        self.seen: Counter[str] = Counter()
        self.lags: list[list[int]] = []
        self.advantages: list[float] = []
        self._kill_at, self._kill_in = kill_at, kill_in

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        self.seen.update({sample.session_id.rpartition(".")[0] for sample in samples})
        self.advantages += [float(sample.advantages[0]) for sample in samples]
        self._may_be_killed("step")
        return {"loss": 0.0}

    def reward_penalties(self, samples: Sequence[Sample]) -> dict[str, float]:
        """The first session of each group loses a half."""
        return {sample.session_id: 0.5 for sample in samples if sample.session_id.endswith(".0")}

    def abandon(self) -> None: ...

    def _may_be_killed(self, where: str) -> None:
        if where == self._kill_in and self._kill_at is not None and sum(self.seen.values()) >= self._kill_at:
            raise Killed

    def save_weights(self, folder: Path) -> None:
        assert not folder.exists()
        self._may_be_killed("save_weights")

    def save_state(self, folder: Path) -> None:
        self._may_be_killed("save_state")
        (folder / "seen.json").write_text(json.dumps(self.seen))

    def load_state(self, folder: Path) -> None:
        self.seen = Counter(dict[str, int](json.loads((folder / "seen.json").read_text())))


def step_record() -> StepRecord:
    """A record of the first step."""
    return StepRecord(
        step=1,
        version=0,
        wall_s=1.0,
        reward_mean=0.25,
        reward_deviation=0.5,
        collected_reward_mean=None,
        num_groups=2,
        num_one_reward=0,
        num_sessions=4,
        num_trained_tokens=8,
        left_out={},
        lag={0: 6, 1: 2},
        num_not_admitted=0,
        num_invalid=0,
        num_stale=0,
        waited_s=0.1,
        trained_s=0.2,
        checkpoint_s=0.0,
        update=PROFILE,
        learner={"loss": 0.1},
    )
