"""The jobs of this process, from INIT to POSTRUN: the harness leaves them here for the evaluator.

A job is found by its sandbox's handle and is gone with it. It has objects of the handler's own, so it cannot outlive
the node's process: a session that a restarted node adopts has none, and is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from gangline.domain.contracts import RuntimeHandle
from gangline.domain.errors import NodeError
from gangline.handlers.contract import AgentHandler, JobDetails

__all__ = ["Job", "as_json", "job_of", "keep_job"]


@dataclass(eq=False)
class Job:
    handler_name: str
    handler: AgentHandler
    details: JobDetails


_JOBS: WeakKeyDictionary[RuntimeHandle, Job] = WeakKeyDictionary()


def keep_job(runtime: RuntimeHandle, job: Job) -> None:
    _JOBS[runtime] = job


def job_of(runtime: RuntimeHandle) -> Job:
    """Raises: NodeError when this process began no job in the sandbox."""
    try:
        return _JOBS[runtime]
    except KeyError:
        raise NodeError("the handler's job is gone: its session was begun before the node was restarted.") from None


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    """A handler's result with objects that have no form in JSON written as their `repr`."""
    return msgspec.to_builtins(result, enc_hook=repr, str_keys=True)
