"""A rollout server for tests: real, on loopback, with its own folder, and a node that does as it is told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gangline.domain.errors import Failure
from gangline.domain.session import Heartbeat, HeartbeatReply, Lease, SessionResult
from gangline.domain.task import TaskRequest
from gangline.wire.client.server import ServerClient

NODE_URL = "http://node.test"


def any_plugin(_task: TaskRequest) -> None:
    """Accept tasks without looking for their plug-ins."""


def request(task_id: str | None = "t", *, num_samples: int = 2, **changes: Any) -> TaskRequest:
    fields = {"instruction": "do it", "agent": {"harness": "shell"}, **changes}
    return TaskRequest.model_validate({"task_id": task_id, "num_samples": num_samples, **fields})


def result(lease: Lease, node_id: str = "n1", **changes: Any) -> SessionResult:
    fields: dict[str, Any] = {"outcome": "completed", "reward": 1.0, **changes}
    return SessionResult(
        session_id=lease.session_id,
        task_id=lease.task_id,
        node_id=node_id,
        attempt=lease.attempt,
        fence=lease.fence,
        **fields,
    )


def engine_down() -> dict[str, Any]:
    failure = Failure(boundary="engine", code="engine_unavailable", message="down", retryable=True)
    return {"outcome": "infra_error", "failure": failure, "reward": None}


def beat(leases: Iterable[Lease], node_id: str = "n1", stage: Any = "run") -> Heartbeat:
    held = {lease.session_id: (lease.fence, stage) for lease in leases}
    return Heartbeat(node_id=node_id, url=NODE_URL, sessions=held, capacity=8)


class FakeNode:
    """Leases, beats and reports over HTTP."""

    def __init__(self, client: ServerClient, node_id: str = "n1") -> None:
        self.client = client
        self.node_id = node_id

    async def lease(self, max_sessions: int = 8, wait_s: float = 0.0) -> list[Lease]:
        return await self.client.lease(self.node_id, url=NODE_URL, max_sessions=max_sessions, wait_s=wait_s)

    async def beat(self, leases: Iterable[Lease], stage: Any = "run") -> HeartbeatReply:
        return await self.client.heartbeat(beat(leases, self.node_id, stage))

    async def finish(self, leases: Iterable[Lease], **changes: Any) -> None:
        for lease in leases:
            await self.client.post_result(result(lease, self.node_id, **changes))
