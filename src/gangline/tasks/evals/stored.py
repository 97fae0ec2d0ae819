"""Reports of evaluations that a server stores for its page, one file each: `FOLDER/EVALUATION_ID.json`.

`gangline eval` sends the whole report after each task, so a file is never behind for long, and never mixed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from gangline.domain.errors import NotFound, StoreError
from gangline.domain.ids import validated_id
from gangline.machine.durable import write_whole
from gangline.machine.private import make_private_folder
from gangline.tasks.evals.report import Report, Slice


class EvaluationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation in a list: a report without its tasks."""

    evaluation_id: str
    name: str
    num_samples: int
    num_left: int
    """Tasks that have not ended."""
    whole: Slice
    updated_at: float = 0.0
    """Unix time at which the server received its newest report."""


_Identity = tuple[str, int, int, int]
"""A file's name, inode, time of writing (ns) and bytes."""


class StoredReports:
    """Every method blocks. folder: None stores nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: dict[_Identity, EvaluationSummary | None] = {}

    def summaries(self) -> tuple[EvaluationSummary, ...]:
        """The latest first. Files that another version wrote are left out. Only changed files are read."""
        found: dict[_Identity, EvaluationSummary | None] = {}
        for path in () if self._folder is None else self._folder.glob("[!.]*.json"):
            with contextlib.suppress(OSError):
                now = path.stat()
                key = (path.name, now.st_ino, now.st_mtime_ns, now.st_size)
                found[key] = self._known[key] if key in self._known else _summary(path, now.st_mtime)
        self._known = found
        return tuple(sorted(filter(None, found.values()), key=lambda one: one.updated_at, reverse=True))

    def read(self, evaluation_id: str) -> Report:
        """Raises: NotFound."""
        try:
            return msgspec.json.decode(self._path(evaluation_id).read_bytes(), type=Report)
        except (msgspec.MsgspecError, OSError):
            raise NotFound(
                f"this server has no evaluation {evaluation_id!r}; GET /v1/evaluations lists those that it has."
            ) from None

    def write(self, report: Report) -> None:
        """Raises: NotFound without a folder, InvalidRequest, StoreError."""
        path = self._path(report.evaluation_id)
        try:
            make_private_folder(path.parent)
            write_whole(path, msgspec.json.encode(report))
        except OSError as error:
            raise StoreError(f"the report of {report.evaluation_id} cannot be stored: {error.strerror}.") from error

    def _path(self, evaluation_id: str) -> Path:
        if self._folder is None:
            raise NotFound("this server has no data folder, and stores no evaluations.")
        return self._folder / f"{validated_id(evaluation_id, 'the id of an evaluation')}.json"


def _summary(path: Path, updated_at: float) -> EvaluationSummary | None:
    """Raises: OSError."""
    try:
        summary = msgspec.json.decode(path.read_bytes(), type=EvaluationSummary)
    except msgspec.MsgspecError:
        return None
    return msgspec.structs.replace(summary, updated_at=updated_at)
