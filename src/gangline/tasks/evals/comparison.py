"""Two evaluations task by task, for the terminal, for a file and for the page."""

from __future__ import annotations

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.tasks.evals.report import Report, Slice, TaskLine
from gangline.tasks.evals.statistics import Difference, difference_of


class TaskChange(msgspec.Struct, frozen=True, kw_only=True):
    """A task with a mean reward in both evaluations."""

    task: str
    gain: float
    """Its mean reward in the second less that in the first."""
    before: TaskLine | None
    """In the first; None if its report was written by a version that did not list sessions."""
    after: TaskLine | None


class EvaluationComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The second evaluation against the first."""

    first: str
    second: str
    """Their names."""
    difference: Difference
    wholes: tuple[Slice, Slice]
    """The figures of each, over all its tasks."""
    tasks: tuple[TaskChange, ...]
    """The largest loss first."""
    apart: tuple[str, ...]
    """Tasks that have no mean in one of them, and so are in no difference."""


def compare_reports(first: Report, second: Report) -> EvaluationComparison:
    """Raises: InvalidRequest if no task has a mean in both."""
    difference = difference_of(first.tasks, second.tasks)
    if difference is None:
        raise InvalidRequest(f"{first.name} and {second.name} have no task in common that counts in both.")
    before, after = ({line.task: line for line in one.lines} for one in (first, second))
    changes = [
        TaskChange(task=task, gain=second.tasks[task] - mean, before=before.get(task), after=after.get(task))
        for task, mean in first.tasks.items()
        if task in second.tasks
    ]
    shared = {change.task for change in changes}
    return EvaluationComparison(
        first=first.name,
        second=second.name,
        difference=difference,
        wholes=(first.whole, second.whole),
        tasks=tuple(sorted(changes, key=lambda change: (change.gain, change.task))),
        apart=tuple(sorted({*first.tasks, *second.tasks, *before, *after} - shared)),
    )
