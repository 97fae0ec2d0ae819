"""Remembers graded files for the controls of the same task's other sessions.

If a grader fails on files that it has graded before, the grader is broken. If it still grades them, the session on
which it failed has broken its own grading.
"""

from __future__ import annotations

import hashlib

from pydantic import BaseModel

from gangline.domain.contracts import EvaluationContext

MAX_BYTES = 2 << 20
"""Larger sessions are not remembered."""


class GradedBefore:
    """The memory of one grader of one task, while the node keeps it."""

    def __init__(self, context: EvaluationContext, grader: BaseModel) -> None:
        """grader: its configuration, which distinguishes the graders of a task."""
        self._memory = context.graded_before
        facts = f"{context.task_digest}\n{type(grader).__qualname__}\n{grader.model_dump_json()}"
        self._key = hashlib.sha256(facts.encode()).digest()

    def __bool__(self) -> bool:
        return self._key in self._memory

    def get(self) -> bytes | None:
        return self._memory.get(self._key)

    def keep(self, data: bytes) -> None:
        if len(data) <= MAX_BYTES:
            self._memory[self._key] = data

    def forget(self) -> None:
        self._memory.pop(self._key, None)
