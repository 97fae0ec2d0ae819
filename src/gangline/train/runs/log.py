"""A run's own records: one line of JSON per step, and one per evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import msgspec

from gangline.machine.durable import append, write_whole
from gangline.machine.private import make_private_folder
from gangline.train.runs.records import CheckpointRecord, EvaluationRecord, StepRecord

R = TypeVar("R", bound="StepRecord | EvaluationRecord | CheckpointRecord")


class RunLog:
    """`metrics.jsonl`, `evaluations.jsonl` and `checkpoints.jsonl` in the run's folder."""

    def __init__(self, folder: Path, *, last_step: int = 0) -> None:
        """last_step: step of the checkpoint. Records of later steps are removed, since those steps are repeated.
        Records of checkpoints stay: another run may have started from one.
        """
        make_private_folder(folder)
        self._metrics, self._evaluations = folder / "metrics.jsonl", folder / "evaluations.jsonl"
        self._checkpoints = folder / "checkpoints.jsonl"
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

    def write_checkpoint(self, record: CheckpointRecord) -> None:
        """Durable on return."""
        append(self._checkpoints, msgspec.json.encode(record) + b"\n")


class GrowingRecords(Generic[R]):
    """The records of a file to which a trainer appends. Records already read are not read again."""

    def __init__(self, path: Path, kind: type[R]) -> None:
        self._path = path
        self._kind = kind
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._records: list[R] = []
        self._last_line = b""
        self._end = 0

    def read(self) -> list[R]:
        """All records, without an incomplete last line. Empty if there is no file.

        Raises: OSError, msgspec.MsgspecError.
        """
        try:
            with self._path.open("rb") as file:
                self._read_on(file)
        except FileNotFoundError:
            self._begin_anew()
        return self._records.copy()

    def _read_on(self, file: BinaryIO) -> None:
        """A trainer that resumes from a checkpoint rewrites the file. Then the last line has moved, and everything is
        read again.
        """
        file.seek(self._end - len(self._last_line))
        if file.read(len(self._last_line)) != self._last_line:
            self._begin_anew()
            file.seek(0)
        *lines, _cut_off = file.read().split(b"\n")
        self._records += [msgspec.json.decode(line, type=self._kind) for line in lines]
        if lines:
            self._end += sum(map(len, lines)) + len(lines)
            self._last_line = lines[-1] + b"\n"


def read_records(path: Path) -> list[StepRecord]:
    """Records of a `metrics.jsonl`, without an incomplete last line."""
    return GrowingRecords(path, StepRecord).read()


def read_evaluations(path: Path) -> list[EvaluationRecord]:
    """Records of an `evaluations.jsonl`, without an incomplete last line."""
    return GrowingRecords(path, EvaluationRecord).read()


def _keep(path: Path, records: Sequence[StepRecord | EvaluationRecord]) -> None:
    """Reduce a file, if it exists, to these records."""
    if path.exists():
        write_whole(path, b"".join(msgspec.json.encode(record) + b"\n" for record in records))
