"""The jobs of this process, from INIT to POSTRUN: the evaluator finds them here.

A job belongs to its harness, which lives as long as its attempt, and is gone with it. It has objects of the handler's
own, so it cannot outlive the node's process: a session that a restarted node adopts has none, and is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from gangline.domain.errors import NodeError
from gangline.domain.plain import plain
from gangline.interop.handlers.contract import AgentHandler, JobDetails

__all__ = ["Job", "as_json", "job_of", "keep_job"]


@dataclass(eq=False)
class Job:
    handler_name: str
    handler: AgentHandler
    details: JobDetails


_JOBS: WeakValueDictionary[str, Job] = WeakValueDictionary()


def keep_job(session_id: str, job: Job) -> None:
    """Make the job known for as long as its owner has it."""
    _JOBS[session_id] = job


def job_of(session_id: str) -> Job:
    """Raises: NodeError when no attempt of this process has the job."""
    job = _JOBS.get(session_id)
    if job is None:
        raise NodeError("the handler's job is gone: its session was begun before the node was restarted.")
    return job


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    """A handler's result as plain data."""
    return plain(result)
