"""The record that a fork's session repeats, fetched from the server."""

from __future__ import annotations

from collections.abc import Sequence

from gangline import plugins
from gangline.domain.completion import Completion
from gangline.domain.contracts import VariesBetweenRuns
from gangline.domain.errors import InvalidRequest, NodeError
from gangline.domain.task import TaskRequest
from gangline.forks.calls import why_not_forkable
from gangline.forks.tolerance import Tolerance
from gangline.gateway.replay.forms import Forms
from gangline.gateway.replay.replay import Replay
from gangline.gateway.sessions.parts import NodeParts
from gangline.gateway.truth.volatile import VolatileText

__all__ = ["replay_of"]


async def replay_of(task: TaskRequest, parts: NodeParts, completions: Sequence[Completion] = ()) -> Replay | None:
    """None where the task is no fork. `completions`: those that an earlier life of the node recorded.

    Raises: NotFound, ServerUnavailable, InvalidRequest when the parent cannot be forked there.
    """
    fork = task.fork
    if fork is None:
        return None
    if parts.recorded is None:
        raise NodeError("a fork's record is at the server, and this node has none.")
    parent = await parts.recorded(fork.session_id, fork.attempt)
    harness = plugins.make_harness(task.agent.harness, task.agent.settings)
    tolerance = Tolerance(harness.varying_text if isinstance(harness, VariesBetweenRuns) else ())
    if (why := why_not_forkable(parent.completions, fork.turn, tolerance)) is not None:
        raise InvalidRequest(f"session {fork.session_id} is not forkable, because {why}.")
    replay = Replay(parent.completions, fork.turn, Forms(VolatileText(task.capture.volatile_system_text), tolerance))
    replay.restore(completions)
    return replay
