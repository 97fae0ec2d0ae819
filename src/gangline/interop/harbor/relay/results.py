"""Makes a session's result of a rollout: the calls that the node recorded, with the reward that Harbor gave. Pure.

Laws
- The reward is Harbor's own, or there is none: never a 0 that Harbor did not give.
- What our engine or node broke has no reward, whatever Harbor's verifier made of it; its numbers are in the details.
- No failure is retryable: Harbor has decided on another attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gangline.domain.completion import Completion
from gangline.domain.contracts import Reward
from gangline.domain.errors import Failure, GanglineError
from gangline.domain.lifecycle import STOPPED_BY_LIMIT, UNGRADED, Outcome
from gangline.domain.session import HarnessExit, Lease, SessionResult
from gangline.domain.task import BuilderSpec
from gangline.domain.trajectory import Trajectory
from gangline.interop.harbor.relay.api import HarborRollout
from gangline.rows.chains import built
from gangline.rows.rewards import apply_reward
from gangline.settings import plugins

_TIMEOUT = "AgentTimeoutError"

Recorded = SessionResult | Failure | None
"""What a node recorded of a rollout, with every call; why it lost that; None if the rollout made no call."""


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
