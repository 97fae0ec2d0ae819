"""`gangline export`: rows of a task or session as one file, or its conversations as a folder of ATIF documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, print_json

if TYPE_CHECKING:
    from gangline.domain.session import SessionResult

__all__ = ["register"]


class RowFormat(StrEnum):
    parquet = "parquet"
    jsonl = "jsonl"
    msgpack = "msgpack"
    atif = "atif"
    csv = "csv"


class _Counted:
    """Results as they pass to the writer, counted; of one session at a time."""

    def __init__(self, results: Iterable[SessionResult], *, whole_prompts: bool) -> None:
        self._results = results
        self._whole_prompts = whole_prompts
        self.num_rows = self.num_sessions = 0

    def __iter__(self) -> Iterator[SessionResult]:
        for result in self._results:
            self.num_sessions += 1
            self.num_rows += 0 if result.trajectory is None else len(result.trajectory.traces)
            yield _written_out(result) if self._whole_prompts else result


def _written_out(result: SessionResult) -> SessionResult:
    from msgspec.structs import replace

    from gangline.trajectories.shared_prefixes import with_whole_prompts

    if result.trajectory is None:
        return result
    traces = tuple(with_whole_prompts(result.trajectory.traces))
    return replace(result, trajectory=replace(result.trajectory, traces=traces))


def export(
    name: Annotated[str, typer.Argument(metavar="TASK|SESSION")],
    out: Annotated[Path, typer.Option("--out", help="Folder for NAME.FORMAT; created if missing.")] = Path(),
    row_format: Annotated[
        RowFormat,
        typer.Option(
            "--format",
            help="atif: a folder with one document for each session, for Harbor's tools. csv: one line for each "
            "session, with its reward, tokens, seconds and resources.",
        ),
    ] = RowFormat.parquet,
    whole_prompts: Annotated[
        bool, typer.Option("--whole-prompts", help="Write full prompts for rows that share them (builder `tree`).")
    ] = False,
    agent: Annotated[
        str | None, typer.Option("--agent", help="Name of the agent program, for atif. Default: the task's harness.")
    ] = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the rows of a task's ended sessions: ids, masks, log-probs, versions, rewards, certificates."""
    from gangline.cli.results.records import find_results, harness_of, open_records

    records = open_records(data, server)
    results = _Counted(find_results(records, name), whole_prompts=whole_prompts)
    if row_format is RowFormat.atif:
        from gangline.trajectories.atif.export import write_atif

        @cache
        def agent_of(task_id: str) -> str | None:
            return agent or harness_of(records, task_id)

        path = out / f"{name}.atif"
        what, num = (
            "documents",
            write_atif(results, path, agent_of=agent_of),
        )
    elif row_format is RowFormat.csv:
        from gangline.cli.results.sessions_table import write_sessions_csv

        path = out / f"{name}.csv"
        what, num = "lines", write_sessions_csv(results, path)
    else:
        from gangline.trajectories.export import export_rows

        path = export_rows(results, out, name=name, format=row_format.value)
        what, num = "rows", results.num_rows
    if as_json:
        counts = {f"num_{what}": num, "num_sessions": results.num_sessions}
        print_json({"path": str(path), "format": row_format.value, **counts})
    else:
        console().print(f"{path}: {num} {what} of {results.num_sessions} sessions", markup=False)


def register(app: typer.Typer) -> None:
    app.command("export")(export)
