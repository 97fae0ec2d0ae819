"""A rollout service and the gate of a node in memory, as NeMo RL's collector meets them."""

from __future__ import annotations

from gangline.domain.errors import ServerUnavailable
from gangline.domain.node_views import GateMode, GateState
from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trace
from support.training.fakes import gate_state
from support.training.samples import session, trace
from support.training.service import FakeService

__all__ = ["Gate", "Rollouts"]


class Rollouts(FakeService):
    """Groups whose tokens are all of the version that nodes had when their task ended."""

    def __init__(self, gate: Gate, **rewards: tuple[float | None, ...]) -> None:
        super().__init__(**rewards)
        self._gate = gate
        self.traces: dict[str, Trace] = {}
        """Of tasks whose sessions have another one."""

    async def result(self, task_id: str) -> list[SessionResult]:
        one = self.traces.get(task_id, trace(versions=[self._gate.version]))
        return [session(f"{task_id}-s{number}", reward, one) for number, reward in enumerate(self.rewards[task_id])]


class Gate:
    def __init__(self) -> None:
        self.said = list[str]()
        self.version = 0
        self.answers = True

    async def pause(self, mode: GateMode = "drain", lease_s: float = 600.0) -> GateState:
        if not self.answers:
            raise ServerUnavailable("the node does not answer.")
        self.said.append(f"pause {mode} {lease_s:g}")
        return gate_state(is_drained=True)

    async def resume(self) -> GateState:
        self.said.append("resume")
        return gate_state()

    async def set_version(self, version: int) -> GateState:
        self.said.append(f"version {version}")
        self.version = version
        return gate_state()
