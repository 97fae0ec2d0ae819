"""Checks that tasks were found sound by an audit (`gangline vet`), for runs that require it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gangline.domain.errors import InvalidRequest
from gangline.domain.task import TaskRequest, vetted_digest

Vetted = Literal["any", "required"]
_MOST_SHOWN = 3


def require_vetted(tasks: Sequence[Mapping[str, Any]], named: str) -> None:
    """named: how the message calls the tasks. Raises: InvalidRequest if a task is not known to be sound."""
    judged = [(number, _why_not(task)) for number, task in enumerate(tasks, 1)]
    found = [(number, why) for number, why in judged if why is not None]
    if found:
        shown = ", ".join(f"{number} {why}" for number, why in found[:_MOST_SHOWN])
        more = f", and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
        raise InvalidRequest(
            f"vetted: required, and {len(found)} of {len(tasks)} {named} are not known to be sound ({shown}{more}). "
            "Run `gangline vet` on them, and train on the file that it writes."
        )


def _why_not(task: Mapping[str, Any]) -> str | None:
    request = TaskRequest.model_validate(task)
    if (verdict := request.vetting) is None:
        return "was not audited"
    if verdict.digest != vetted_digest(request):
        return "was changed after its audit"
    return None if verdict.verdict == "sound" else f"is {verdict.verdict}"
