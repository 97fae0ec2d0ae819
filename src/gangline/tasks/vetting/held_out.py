"""Checks that training and held-out tasks share neither an id, nor an instruction with its grading.

Many tasks may have the same instruction, such as "make the tests pass", and differ by their graders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gangline.tasks.vetting.checks import PASSED, CheckResult
from gangline.tasks.vetting.subject import Subject


def against_held_out(subjects: Sequence[Subject], held_out: Sequence[Mapping[str, Any]]) -> dict[str, CheckResult]:
    """Name of a task -> the result of the check `held_out`."""
    ids = {str(task["task_id"]) for task in held_out if task.get("task_id")}
    contents = {_content(task): number for number, task in enumerate(held_out, 1)}
    return {subject.name: _result(subject, ids, contents) for subject in subjects}


def _result(subject: Subject, ids: set[str], contents: Mapping[bytes, int]) -> CheckResult:
    if (number := contents.get(_content(subject.task))) is not None:
        return CheckResult(status="failed", message=f"held-out task {number} has the same instruction and grading")
    if subject.task.get("task_id") in ids:
        return CheckResult(status="failed", message=f"a held-out task has the id {subject.task['task_id']}")
    return PASSED


def _content(task: Mapping[str, Any]) -> bytes:
    """Instructions and evaluators of all runs, ignoring case and white space in the instructions."""
    runs = [(_folded(one), one.get("evaluator")) for one in (task, *(task.get("steps") or ()))]
    return hashlib.sha256(msgspec.json.encode(runs, order="deterministic")).digest()


def _folded(run: Mapping[str, Any]) -> str:
    return " ".join(str(run.get("instruction", "")).casefold().split())
