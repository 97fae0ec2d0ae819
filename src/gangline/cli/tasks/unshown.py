"""What `gangline submit` says of models that are not shown their tools: by their engines, and by recorded sessions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gangline.domain.errors import GanglineError

if TYPE_CHECKING:
    from gangline.client.server import ServerClient
    from gangline.domain.task import TaskRequest
    from gangline.domain.views import TaskView

__all__ = ["lines_of_engines", "lines_of_sessions"]

_MOST_SESSIONS = 8
"""Results that are fetched to look at."""


async def lines_of_engines(client: ServerClient, tasks: Sequence[TaskRequest]) -> list[str]:
    """Before sessions run: where no engine renders tools, and an agent is known to have some."""
    from gangline.domain.unshown import UNSHOWN_GUIDE

    status = await client.status()
    policy = [one for node in status.nodes for one in node.backends if one.get("role") is None]
    if not policy or any(_renders_tools(one) is not False for one in policy):
        return []
    told = {task.agent.harness: _consequence(task) for task in tasks if _has_tools(task)}
    return [
        f"the chat template of {policy[0].get('model')} does not render tools, and harness {harness} has some: "
        f"{consequence}. See {UNSHOWN_GUIDE}"
        for harness, consequence in told.items()
    ]


def _renders_tools(backend: dict[str, Any]) -> Any:
    template: dict[str, Any] = backend.get("template") or {}
    return template.get("renders_tools")


def _consequence(task: TaskRequest) -> str:
    return "the model will not see them" if task.agent.allow_unrendered_tools else "its sessions will be refused"


def _has_tools(task: TaskRequest) -> bool:
    from gangline.domain.contracts import depends_on_tools
    from gangline.plugins import make_harness

    try:
        harness = make_harness(task.agent.harness, task.agent.settings)
    except GanglineError:  # a plug-in that only the nodes have
        return False
    return depends_on_tools(harness, task)


async def lines_of_sessions(client: ServerClient, tasks: Sequence[TaskView]) -> list[str]:
    """After they ran: the first session of each task that has a result."""
    from gangline.domain.unshown import unshown_lines

    told: dict[str, str] = {}
    firsts = [next((one for one in task.sessions if one.result_attempt is not None), None) for task in tasks]
    for session in [one for one in firsts if one is not None][:_MOST_SESSIONS]:
        with suppress(GanglineError):  # it was removed meanwhile: the tasks have ended all the same
            for line in unshown_lines((await client.session_result(session.session_id)).completions):
                told.setdefault(line, session.session_id)
    return [f"{session_id}: {line}" for line, session_id in told.items()]
