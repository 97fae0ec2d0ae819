"""Delivers an ended group: submits its task, leases its sessions, and reports their results as a node does.

So rows, groups, callbacks and the page are those of any task. A group whose delivery was interrupted is delivered on:
its id, and so its task, is the same.

A session's result has the calls that the node recorded, with the reward that Harbor gave.

Laws
- The reward is Harbor's own, or there is none: never a 0 that Harbor did not give.
- What our engine or node broke has no reward, whatever Harbor's verifier made of it; its numbers are in the details.
- No failure is retryable: Harbor has decided on another attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from gangline.domain.completion import Completion
from gangline.domain.contracts import Reward
from gangline.domain.errors import Conflict, Failure, GanglineError, LeaseLost, NotFound, ServerUnavailable
from gangline.domain.lifecycle import STOPPED_BY_LIMIT, UNGRADED, Outcome
from gangline.domain.session import HarnessExit, Lease, SessionResult
from gangline.domain.task import BuilderSpec, TaskRequest
from gangline.domain.trajectory import Trajectory
from gangline.domain.views import TaskView
from gangline.interop.harbor.part import GROUPS, LABEL
from gangline.interop.harbor.relay.api import HarborRollout
from gangline.interop.harbor.relay.groups import task_id_of
from gangline.interop.harbor.relay.rollouts import RolloutBook
from gangline.rows.chains import built
from gangline.rows.rewards import apply_reward
from gangline.settings import plugins
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


_TIMEOUT = "AgentTimeoutError"

Recorded = SessionResult | Failure | None
"""A node's record of a rollout, with every call; why it lost that; None if the rollout made no call."""


def session_result(
    lease: Lease, rollout: HarborRollout, recorded: Recorded, builder: BuilderSpec, reward_name: str
) -> SessionResult:
    """The result of a leased session."""
    outcome, failure = outcome_of(rollout, recorded)
    reward = None if outcome in UNGRADED else reward_of(rollout, reward_name)
    completions = tuple(
        msgspec.structs.replace(completion, session_id=lease.session_id, attempt=lease.attempt)
        for completion in (recorded.completions if isinstance(recorded, SessionResult) else ())
    )
    trajectory = None
    try:
        trajectory = _built(lease, builder, completions)
    except GanglineError as error:
        outcome, failure, reward = "infra_error", error.failure(), None
    if trajectory is not None and reward is not None:
        trajectory = apply_reward(trajectory, Reward(reward=reward))
    return SessionResult(
        session_id=lease.session_id,
        task_id=lease.task_id,
        node_id=recorded.node_id if isinstance(recorded, SessionResult) else "harbor",
        attempt=lease.attempt,
        fence=lease.fence,
        outcome=outcome,
        failure=None if failure is None else msgspec.structs.replace(failure, retryable=False),
        reward=reward,
        reward_details=_details(rollout),
        harness_exit=HarnessExit(exit_code=0 if outcome == "completed" else None),
        trajectory=trajectory,
        completions=completions,
        held_out=bool(lease.task.get("held_out")),
    )


def _built(lease: Lease, spec: BuilderSpec, completions: Sequence[Completion]) -> Trajectory:
    """Raises: BuilderError."""
    session_id, task_id = lease.session_id, lease.task_id
    if not completions:
        return Trajectory(session_id=session_id, task_id=task_id, builder=spec.strategy, traces=(), num_completions=0)
    builder = plugins.make_builder(spec.strategy, spec.config)
    return built(builder, completions, session_id=session_id, task_id=task_id)


def reward_of(rollout: HarborRollout, name: str) -> float | None:
    """Harbor's reward of this name, or its only one. None without one, and where Harbor counts none."""
    rewards = rollout.rewards or {}
    if name in rewards:
        return rewards[name]
    return next(iter(rewards.values())) if len(rewards) == 1 else None


def outcome_of(rollout: HarborRollout, recorded: Recorded) -> tuple[Outcome, Failure | None]:
    """Harbor's word on the run, unless our node knows that a limit or a fault of ours ended it."""
    if rollout.state == "cancelled":
        return "cancelled", None
    if isinstance(recorded, Failure):
        return "infra_error", recorded
    if recorded is not None and recorded.outcome in (*UNGRADED, *STOPPED_BY_LIMIT):
        return recorded.outcome, recorded.failure
    if rollout.error_type is not None and rollout.error_type != _TIMEOUT:
        return _failed(rollout, rollout.error_type)
    if recorded is None:
        return "no_model_call", Failure(
            boundary="harness", code="no_model_call", message="Harbor's agent made no model call.", retryable=False
        )
    return ("completed" if rollout.error_type is None else "agent_timeout"), None


def _failed(rollout: HarborRollout, error: str) -> tuple[Outcome, Failure]:
    """An error that Harbor grades is the agent's; any other is Harbor's or its sandbox's."""
    has_reward = any(reward is not None for reward in (rollout.rewards or {}).values())
    message = f"Harbor reports {error}: {rollout.error_message[:2000]}"
    if has_reward:
        return "agent_error", Failure(boundary="harness", code="harness_failed", message=message, retryable=False)
    return "infra_error", Failure(boundary="runtime", code="harbor_failed", message=message, retryable=False)


def _details(rollout: HarborRollout) -> dict[str, Any]:
    return {
        "harbor": {
            "rollout_id": rollout.id,
            "job_id": rollout.job_id,
            "trial": rollout.name,
            "rewards": rollout.rewards,
            "error_type": rollout.error_type,
        }
    }
