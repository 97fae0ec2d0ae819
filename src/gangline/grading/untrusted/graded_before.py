"""What a grader gave a reward, remembered for the controls of its task's other sessions.

A grader that fails on it as well is broken now, whoever is graded. One that grades it works: the session that it fails
on has spoiled its grading.
"""

from __future__ import annotations

import hashlib

from pydantic import BaseModel

from gangline.domain.contracts import EvaluationContext

__all__ = ["MAX_BYTES", "GradedBefore"]

MAX_BYTES = 2 << 20
"""More is not remembered of a session."""


class GradedBefore:
    """The memory of one grader of one task, as long as the node keeps it."""

    def __init__(self, context: EvaluationContext, grader: BaseModel) -> None:
        """grader: its configuration, which distinguishes the graders of a task."""
        self._memory = context.graded_before
        told = f"{context.task_digest}\n{type(grader).__qualname__}\n{grader.model_dump_json()}"
        self._key = hashlib.sha256(told.encode()).digest()

    def __bool__(self) -> bool:
        return self._key in self._memory

    def get(self) -> bytes | None:
        return self._memory.get(self._key)

    def keep(self, data: bytes) -> None:
        if len(data) <= MAX_BYTES:
            self._memory[self._key] = data

    def forget(self) -> None:
        self._memory.pop(self._key, None)
