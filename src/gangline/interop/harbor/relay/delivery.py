"""Delivers an ended group: submits its task, leases its sessions, and reports their results as a node does.

So rows, groups, callbacks and the page are those of any task. A group whose delivery was interrupted is delivered on:
its id, and so its task, is the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from gangline.domain.errors import Conflict, Failure, LeaseLost, NotFound, ServerUnavailable
from gangline.domain.session import Lease
from gangline.domain.task import TaskRequest
from gangline.domain.views import TaskView
from gangline.interop.harbor.part import GROUPS, LABEL
from gangline.interop.harbor.relay.api import HarborRollout
from gangline.interop.harbor.relay.groups import task_id_of
from gangline.interop.harbor.relay.results import Recorded, session_result
from gangline.interop.harbor.relay.rollouts import RolloutBook
from gangline.wire.client.server import ServerClient

log = logging.getLogger("gangline.harbor")

_MAX_ATTEMPTS = 100
"""A lease that expires during the delivery costs an attempt, and none was a run of the agent."""
_LOST_AFTER_S = 600.0
"""A node that restarts has its records again; until then the server knows nothing of them."""


class GroupDelivery:
    """reward_name: the number that is the reward, if Harbor has several."""

    def __init__(
        self,
        client: ServerClient,
        book: RolloutBook,
        template: TaskRequest,
        reward_name: str,
        *,
        pause_s: float = 1.0,
        lost_after_s: float = _LOST_AFTER_S,
    ) -> None:
        self._client = client
        self._book = book
        self._template = template
        self._reward_name = reward_name
        self._pause_s = pause_s
        self._lost_after_s = lost_after_s
        self._missing_since: dict[str, float] = {}
        """Rollout -> when its records were first looked for in vain, by the monotonic clock."""

    async def deliver(self, group: Sequence[HarborRollout]) -> TaskView:
        """The ended task of a group. group: with locks and results. Idempotent.

        Raises: errors of the server.
        """
        task_id = task_id_of(group)
        body = msgspec.json.encode(self._task(task_id, group))
        while True:
            leases = await self._client.request_json("POST", GROUPS, list[Lease], body=body)
            for lease in leases:
                await self._report(lease, group[lease.sample_index])
            task = await self._client.task(task_id)
            if task.ended:
                return task
            if not leases:
                await asyncio.sleep(self._pause_s)

    def _task(self, task_id: str, group: Sequence[HarborRollout]) -> dict[str, Any]:
        first = group[0]
        agent = {"agent": first.agent.name, "version": first.agent.version, "model": first.model.name}
        about = {"job_id": first.job_id, "task": msgspec.to_builtins(first.task), **agent}
        about |= {"rollouts": [{"rollout_id": rollout.id, "trial": rollout.name} for rollout in group]}
        return self._template.model_dump(mode="json", exclude_unset=True) | {
            "task_id": task_id,
            "instruction": f"Harbor's task {first.task.name}",
            "num_samples": len(group),
            "enough_sessions": None,
            "max_attempts": _MAX_ATTEMPTS,
            "runtime": {"backend": "process", "node_labels": [LABEL]},
            "agent": {"harness": "harbor", "settings": {name: value for name, value in agent.items() if value}},
            "evaluator": {"strategy": "harbor"},
            "metadata": {**self._template.metadata, "harbor": about},
        }

    async def _report(self, lease: Lease, rollout: HarborRollout) -> None:
        recorded = await self._recorded(rollout)
        result = await asyncio.to_thread(
            session_result, lease, rollout, recorded, self._template.builder, self._reward_name
        )
        try:
            await self._client.post_result(result)
        except LeaseLost as error:  # it took too long, and is leased again
            log.warning("harbor.lease_lost session=%s message=%s", lease.session_id, error)

    async def _recorded(self, rollout: HarborRollout) -> Recorded:
        """What the node has of it. Raises: ServerUnavailable while its node may still come back."""
        known = self._book.find(rollout.id)
        if known is None or known.session is None:
            return None
        try:
            return await self._client.finalize(known.session.session_id, completions=True)
        except (NotFound, Conflict) as error:
            since = self._missing_since.setdefault(rollout.id, time.monotonic())
            if isinstance(error, NotFound) and time.monotonic() - since < self._lost_after_s:
                message = f"no node has the records of rollout {rollout.id} yet: {error.message}"
                raise ServerUnavailable(message) from error
            message = f"the node has lost the records of this rollout: {error.message}"
            return Failure(boundary="node", code="session_lost", message=message, retryable=False)
