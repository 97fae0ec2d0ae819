"""Work on text that an agent wrote, in a child process with limits of time and memory.

The work is a module with two functions of JSON values: `prepare(job)` for the part that the agent has no influence on,
and `work(prepared)` for the rest. Only `work` is held to the limits of processor time and memory: a failure of
`prepare`, or too little wall-clock time, is ours. A third function, `warm()`, may do beforehand what every job needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Limits(NamedTuple):
    """Limits of one child."""

    cpu_s: int
    """Processor time of `work`, in whole seconds."""
    memory_bytes: int
    """Address space that `work` may take beyond the prepared process."""
    timeout_s: float
    """Wall-clock time of everything; long, as a loaded machine is not the agent's fault."""


class OverLimit(Exception):
    """`work` took more than it may, or crashed: the doing of its input."""


class ChildWork(Protocol):
    """Runs work in child processes that have none of the caller's environment."""

    async def __call__(self, module: str, job: Any, limits: Limits) -> Any:
        """The result of `module.work(module.prepare(job))`.

        Raises: OverLimit; EvaluatorError when `prepare` fails, or wall-clock time runs out.
        """
        ...
