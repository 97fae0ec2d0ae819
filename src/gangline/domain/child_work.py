"""Work on text that an agent wrote, in a child process with time and memory limits.

The work is a module with two functions on JSON values: `prepare(job)` for the part that the agent cannot influence, and
`work(prepared)` for the rest. Only `work` is held to the limits of processor time and memory: a failure of `prepare`,
or too little wall-clock time, is ours. An optional third function, `warm()`, does work in advance that every job needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Limits(NamedTuple):
    """Limits of one child."""

    cpu_s: int
    """Processor time of `work`, in whole seconds."""
    memory_bytes: int
    """Address space that `work` may use beyond the prepared process."""
    timeout_s: float
    """Wall-clock time of the whole job; long, since a loaded machine is not the agent's fault."""


class OverLimit(Exception):
    """`work` exceeded a limit or crashed, because of its input."""


class ChildWork(Protocol):
    """Runs work in child processes without the caller's environment."""

    async def __call__(self, module: str, job: Any, limits: Limits) -> Any:
        """Returns `module.work(module.prepare(job))`.

        Raises: OverLimit; EvaluatorError when `prepare` fails or wall-clock time runs out.
        """
        ...
