"""The jobs of this process, from INIT to POSTRUN, so that the evaluator can find them.

A job belongs to its harness and disappears with it when the attempt ends. It contains the handler's own objects, so it
cannot outlive the node's process: a session adopted by a restarted node has no job, and is retried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from gangline.domain.errors import NodeError
from gangline.domain.plain import plain
from gangline.interop.handlers.contract import AgentHandler, JobDetails


@dataclass(eq=False)
class Job:
    handler_name: str
    handler: AgentHandler
    details: JobDetails


_JOBS: WeakValueDictionary[str, Job] = WeakValueDictionary()


def keep_job(session_id: str, job: Job) -> None:
    """Register the job until its owner drops it."""
    _JOBS[session_id] = job


def job_of(session_id: str) -> Job:
    """Raises: NodeError if no attempt in this process has the job."""
    job = _JOBS.get(session_id)
    if job is None:
        raise NodeError("the handler's job is gone: its session was begun before the node was restarted.")
    return job


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    """A handler's result as plain data."""
    return plain(result)
