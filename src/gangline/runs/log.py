"""A run's own records: a line of JSON per step, and one per evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from gangline.durable import append, write_whole
from gangline.private import make_private_folder
from gangline.runs.records import EvaluationRecord, StepRecord

__all__ = [
    "RunLog",
    "read_evaluations",
    "read_records",
]

R = TypeVar("R", bound="StepRecord | EvaluationRecord")


class RunLog:
    """`metrics.jsonl` and `evaluations.jsonl` in the run's folder."""

    def __init__(self, folder: Path, *, last_step: int = 0) -> None:
        """last_step: step of the checkpoint; records of later steps are removed, since those steps are repeated."""
        make_private_folder(folder)
        self._metrics, self._evaluations = folder / "metrics.jsonl", folder / "evaluations.jsonl"
        _keep(self._metrics, [record for record in read_records(self._metrics) if record.step <= last_step])
        evaluations = [record for record in read_evaluations(self._evaluations) if record.step <= last_step]
        _keep(self._evaluations, evaluations)
        self.evaluated_steps = {record.step for record in evaluations}

    def write(self, record: StepRecord) -> None:
        """Durable on return."""
        append(self._metrics, msgspec.json.encode(record) + b"\n")

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Durable on return."""
        append(self._evaluations, msgspec.json.encode(record) + b"\n")
        self.evaluated_steps.add(record.step)


def read_records(path: Path) -> list[StepRecord]:
    """Records of a `metrics.jsonl`; an incomplete last line is left out."""
    return _read(path, StepRecord)


def read_evaluations(path: Path) -> list[EvaluationRecord]:
    """Records of an `evaluations.jsonl`; an incomplete last line is left out."""
    return _read(path, EvaluationRecord)


def _read(path: Path, kind: type[R]) -> list[R]:
    if not path.exists():
        return []
    *lines, _cut_off = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=kind) for line in lines]


def _keep(path: Path, records: Sequence[StepRecord | EvaluationRecord]) -> None:
    """Reduce a file, where it exists, to these records."""
    if path.exists():
        write_whole(path, b"".join(msgspec.json.encode(record) + b"\n" for record in records))
