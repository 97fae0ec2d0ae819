"""Fetches from the server the records that an attempt repeats: a fork's parent's, or the session's from an earlier
lease that was lost with its node."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gangline.domain.completion import Completion
from gangline.domain.contracts import VariesBetweenRuns
from gangline.domain.errors import Failure, GanglineError, InvalidRequest, NodeError, ResumeDiverged
from gangline.domain.node_views import BackendView
from gangline.domain.session import Lease
from gangline.domain.task import ForkSpec, TaskRequest
from gangline.node.capture.meaning import VolatileText
from gangline.node.replay.forms import Forms
from gangline.node.replay.replay import Replay
from gangline.node.sessions.parts import NodeParts
from gangline.rows.forks.calls import RecordedCall, recorded_calls, why_not_forkable
from gangline.rows.forks.tolerance import Tolerance
from gangline.settings import plugins
from gangline.settings.evidence import asked_kinds

log = logging.getLogger("gangline.node")


async def replay_of(
    lease: Lease, task: TaskRequest, parts: NodeParts, completions: Sequence[Completion] = ()
) -> Replay | None:
    """Returns None if nothing is repeated. `completions`: recorded before a restart of the node.

    Raises: NotFound, ServerUnavailable, InvalidRequest when a fork's parent cannot be forked there.
    """
    if task.fork is not None:
        replay = await _of_parent(task.fork, task, parts)
    elif task.is_durable and lease.fence > 1 and parts.turns is not None:
        replay = await _of_lost_lease(lease, task, parts)
    else:
        return None
    if replay is not None:
        replay.restore(completions)
    return replay


async def _of_parent(fork: ForkSpec, task: TaskRequest, parts: NodeParts) -> Replay:
    if parts.recorded is None:
        raise NodeError("a fork's record is at the server, and this node has none.")
    parent = await parts.recorded(fork.session_id, fork.attempt)
    forms = _forms(task)
    if (why := why_not_forkable(parent.completions, fork.turn, forms.tolerance)) is not None:
        raise InvalidRequest(f"session {fork.session_id} is not forkable, because {why}.")
    if fork.engine is not None:
        for kind in asked_kinds(task.capture):
            if kind.of_context:
                raise InvalidRequest(
                    f"role {fork.engine!r} cannot go on behind the fork with {kind.setting}, because the "
                    f"record's {kind.title} are those of another model. Leave out the engine."
                )
        _check_engine(fork.engine, recorded_calls(parent.completions)[: fork.turn], parts.backends.views())
    return Replay(parent.completions, fork.turn, forms, edit=fork.edit, engine=fork.engine)


def _check_engine(role: str, calls: Sequence[RecordedCall], views: Sequence[BackendView]) -> None:
    """Raises: InvalidRequest when the recorded ids could not be a context of the role's engines."""
    # The engines of one role have one tokenizer and one template.
    view = next((view for view in views if view.role == role), None)
    if view is None:
        known = ", ".join(sorted({view.role for view in views if view.role is not None})) or "none"
        raise InvalidRequest(f"no engine answers for role {role!r} on this node. Roles with engines: {known}.")
    for call in calls:
        theirs, own = call.first.certificate, view.template
        pairs = (
            ("tokenizer", theirs.tokenizer_digest, own.tokenizer_digest),
            ("chat template", theirs.template_digest, own.template_digest),
        )
        for name, recorded, found in pairs:
            if not recorded or not found:
                who = f"the engine of call {call.turn}" if not recorded else f"engine {view.url} of role {role!r}"
                raise InvalidRequest(f"{who} does not show its {name}, so nobody knows whether the ids are its own.")
            if recorded != found:
                raise InvalidRequest(
                    f"engine {view.url} of role {role!r} has another {name} than the engine of call {call.turn}: the "
                    "recorded ids are not a context of its model. Fork with an engine that has the same."
                )


async def _of_lost_lease(lease: Lease, task: TaskRequest, parts: NodeParts) -> Replay | None:
    """Returns None if it has no records, or none that can be repeated."""
    assert parts.turns is not None
    kept = await parts.turns.latest(lease.session_id, lease.fence)
    turn, forms = len(recorded_calls(kept.completions)), _forms(task)
    while turn and (why := why_not_forkable(kept.completions, turn, forms.tolerance)) is not None:
        log.warning("session.not_resumed session=%s turn=%d why=%s", lease.session_id, turn, why)
        turn -= 1
    if turn == 0:
        return None
    log.info("session.resumed session=%s attempt=%d turn=%d", lease.session_id, lease.attempt, turn)
    return Replay(_up_to(kept.completions, turn), turn, forms, resumed=True)


async def begins_anew(failure: Failure, lease: Lease, parts: NodeParts) -> bool:
    """Whether the session failed because its agent's requests differ from those on the lost node. The records are then
    deleted, and its next lease samples everything."""
    if failure.code != ResumeDiverged.code or parts.turns is None:
        return False
    try:
        await parts.turns.begin_anew(lease.session_id, lease.fence)
    except GanglineError as error:
        log.warning("session.not_begun_anew session=%s message=%s", lease.session_id, error)
        return False
    return True


def _up_to(completions: Sequence[Completion], turn: int) -> list[Completion]:
    """Drop records of calls after `turn`: they are sampled again."""
    calls = recorded_calls(completions)[:turn]
    wanted = {choice.completion_id for call in calls for choice in call.choices}
    return [completion for completion in completions if completion.completion_id in wanted]


def _forms(task: TaskRequest) -> Forms:
    harness = plugins.make_harness(task.agent.harness, task.agent.settings)
    tolerance = Tolerance(harness.varying_text if isinstance(harness, VariesBetweenRuns) else ())
    return Forms(VolatileText(task.capture.volatile_system_text), tolerance)
