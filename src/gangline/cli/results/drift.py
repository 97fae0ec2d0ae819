"""`gangline drift`: counts calls that did not continue exactly the tokens sampled before, by place and cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, print_json

if TYPE_CHECKING:
    from gangline.cli.results.records import Records
    from gangline.cli.terminal.tables import FactTable
    from gangline.domain.session import SessionResult
    from gangline.rows.drift import Break, CallDrift, DriftReport

By = Literal["session", "task", "harness", "model", "dialect"]
_SHOWN_BREAKS = 10


def drift(
    name: Annotated[str | None, typer.Argument(metavar="[TASK|SESSION]", help="Without one: all tasks.")] = None,
    by: Annotated[By, typer.Option(help="Group the counts by this property of the session.")] = "task",
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count the calls whose context differs from the tokens sampled before, by cause."""
    from gangline.cli.results.records import open_records

    records = open_records(data, server)
    document = drift_document(records, name, by)
    if as_json:
        print_json(document)
    else:
        _print(document, by)


def drift_document(records: Records, name: str | None, by: By) -> dict[str, Any]:
    """Keys: total (`DriftReport`), by (the kind of groups), groups (name -> `DriftReport`).

    Raises: NotFound without recorded calls; BuilderError.
    """
    from gangline.domain.errors import NotFound
    from gangline.rows.drift import drift_by, drift_report

    calls = list(_keyed_calls(_results(records, name), _harness_finder(records), by))
    if not calls:
        raise NotFound("there is nothing to report on: no session has a recorded model call.")
    return {"total": drift_report(call for _, call in calls), "by": by, "groups": drift_by(calls)}


def _results(records: Records, name: str | None) -> Iterator[SessionResult]:
    from gangline.cli.results.records import find_results

    if name is not None:
        yield from find_results(records, name)
        return
    for task_id in records.task_ids():
        yield from records.task(task_id) or ()


def _harness_finder(records: Records) -> Callable[[str], str]:
    from gangline.cli.results.records import harness_of

    known: dict[str, str] = {}

    def find(task_id: str) -> str:
        if task_id not in known:
            known[task_id] = harness_of(records, task_id) or "unknown"
        return known[task_id]

    return find


def _keyed_calls(
    results: Iterable[SessionResult], harness: Callable[[str], str], by: By
) -> Iterator[tuple[str, CallDrift]]:
    from gangline.rows.drift import call_drifts

    for result in results:
        of_session = {"session": result.session_id, "task": result.task_id}
        if by == "harness":
            of_session["harness"] = harness(result.task_id)
        for call in call_drifts(result.completions):
            yield {**of_session, "model": call.model, "dialect": call.dialect}[by], call


def _print(document: dict[str, Any], by: By) -> None:
    total: DriftReport = document["total"]
    out = console()
    out.print(_groups_table(document["groups"], by))
    out.print()
    for title, found in (
        ("causes", total.causes),
        ("observed instead of stitched", total.fallbacks),
        ("stitched", {name.replace("_", " "): num for name, num in total.renderings.items()}),
        ("stitched unlike the template", total.unlike_renderings),
        ("tool calls read", {name: num for name, num in total.parses.items() if name != "ok"}),
        ("not trainable", total.untrainable),
    ):
        for reason, number in found.items():
            out.print(f"{title}: {number} x {reason}", markup=False)
    for break_ in total.breaks[:_SHOWN_BREAKS]:
        out.print(_break_line(break_), style="dim", markup=False)
    if len(total.breaks) > _SHOWN_BREAKS:
        out.print(f"... and {len(total.breaks) - _SHOWN_BREAKS} more; --json lists all", style="dim")


def _groups_table(groups: dict[str, DriftReport], by: By) -> FactTable:
    from gangline.cli.terminal.tables import FactTable, numbers, prose

    table = FactTable(
        *(
            by,
            numbers("sessions", 3),
            "calls#",
            numbers("first", 4),
            "exact#",
            "diverged#",
        ),
        *(numbers(title, 2) for title in ("changed", "exact share", "stitched", "repeated ids")),
        prose("main cause", 1),
    )
    for name, report in groups.items():
        contexts = [str(report.contexts.get(context, 0)) for context in ("first", "exact", "diverged")]
        table.add_row(
            name,
            *(str(report.num_sessions), str(report.num_completions), *contexts, str(report.num_changed)),
            "" if report.exact_share is None else f"{report.exact_share:.1%}",
            f"{report.prompt_sources.get('stitched', 0) / report.num_completions:.0%}",
            str(report.num_repeated_tokens),
            next(iter(report.causes), ""),
        )
    return table


def _break_line(one: Break) -> str:
    where = "" if one.first_divergence is None else f" at id {one.first_divergence} of {one.num_parent_ids}"
    why = "" if one.fallback is None else f" ({one.fallback})"
    return f"{one.session_id} {one.completion_id}: {one.kind}{where}: {one.cause}{why}"


def register(app: typer.Typer) -> None:
    app.command("drift")(drift)
