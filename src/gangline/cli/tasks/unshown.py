"""Warnings about models that are not shown their tools, before sessions run and from recorded sessions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from gangline.domain.errors import GanglineError

if TYPE_CHECKING:
    from gangline.domain.task import TaskRequest
    from gangline.domain.views import TaskView
    from gangline.wire.client.server import ServerClient

_IMAGES = re.compile(r"\.(?:png|jpe?g|gif|webp)\b|image_url|data:image/", re.IGNORECASE)
"""Words that suggest that a task has images."""
_MOST_SESSIONS = 8
"""Number of results to fetch and check."""


async def lines_of_engines(client: ServerClient, tasks: Sequence[TaskRequest]) -> list[str]:
    """Before sessions run: warnings for agents with tools when the engines' templates do not render them."""
    from gangline.domain.unshown import why_hidden
    from gangline.settings.plugins import has_tools

    backends = [backend for node in (await client.status()).nodes for backend in node.backends]
    reasons = (why_hidden(backends, task.agent) for task in tasks if has_tools(task))
    return list(dict.fromkeys(line for line in reasons if line is not None))


async def lines_of_templates(client: ServerClient, tasks: Sequence[TaskRequest], *, to_train: bool) -> list[str]:
    """Before sessions run: features that tasks need and the engines' templates lack. With `to_train`, also other
    gaps."""
    from msgspec import convert

    from gangline.domain.node_views import TemplateFacts
    from gangline.domain.template_findings import lacks_of_tasks

    status = await client.status()
    policy = [backend for node in status.nodes for backend in node.backends if backend.get("role") is None]
    facts = [convert(one.get("template") or {}, TemplateFacts) for one in policy]
    lacking = [f"{one.get('model')}: {lack}" for one in policy for lack in one.get("template_lacks", ())]
    brings_images = any(_IMAGES.search(task.model_dump_json()) for task in tasks)
    if brings_images and policy and not any(one.get("sees_images") for one in policy):
        lacking.append(
            "calls with images would not be trained on: no engine has the model's image processor. Give the model's "
            "folder as `processor` of the engine."
        )
    return [*lacks_of_tasks(facts, tasks), *(dict.fromkeys(lacking) if to_train else ())]


async def lines_of_sessions(client: ServerClient, tasks: Sequence[TaskView]) -> list[str]:
    """After sessions ran: warnings from the first session with a result of each task."""
    from gangline.domain.unshown import unshown_lines

    first_sessions: dict[str, str] = {}
    firsts = [next((one for one in task.sessions if one.result_attempt is not None), None) for task in tasks]
    for session in [first for first in firsts if first is not None][:_MOST_SESSIONS]:
        with suppress(GanglineError):  # removed meanwhile; the tasks have ended anyway
            for line in unshown_lines((await client.session_result(session.session_id)).completions):
                first_sessions.setdefault(line, session.session_id)
    return [f"{session_id}: {line}" for line, session_id in first_sessions.items()]
