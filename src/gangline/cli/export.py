"""`gangline export`: rows of a task or session as one file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.output import DataOption, JsonOption, ServerOption, console, print_json

if TYPE_CHECKING:
    from gangline.domain.session import SessionResult

__all__ = ["register"]


class RowFormat(StrEnum):
    parquet = "parquet"
    jsonl = "jsonl"
    msgpack = "msgpack"


class _Counted:
    """Results as they pass to the writer, counted."""

    def __init__(self, results: Iterable[SessionResult]) -> None:
        self._results = results
        self.num_rows = self.num_sessions = 0

    def __iter__(self) -> Iterator[SessionResult]:
        for result in self._results:
            self.num_sessions += 1
            self.num_rows += 0 if result.trajectory is None else len(result.trajectory.traces)
            yield result


def export(
    name: Annotated[str, typer.Argument(metavar="TASK|SESSION")],
    out: Annotated[Path, typer.Option("--out", help="Folder for NAME.FORMAT; made if missing.")] = Path(),
    row_format: Annotated[RowFormat, typer.Option("--format")] = RowFormat.parquet,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the rows of a task's ended sessions: ids, masks, log-probs, versions, rewards, certificates."""
    from gangline.cli.records import find_results, open_records
    from gangline.trajectories.export import export_rows

    results = _Counted(find_results(open_records(data, server), name))
    path = export_rows(results, out, name=name, format=row_format.value)
    if as_json:
        counts = {"num_rows": results.num_rows, "num_sessions": results.num_sessions}
        print_json({"path": str(path), "format": row_format.value, **counts})
    else:
        console().print(f"{path}: {results.num_rows} rows of {results.num_sessions} sessions", markup=False)


def register(app: typer.Typer) -> None:
    app.command("export")(export)
