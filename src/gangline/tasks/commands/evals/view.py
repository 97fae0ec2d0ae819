"""How a report and a comparison look: tables in the terminal, and the same as Markdown or HTML."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gangline.cli.terminal.tables import FactTable, numbers

if TYPE_CHECKING:
    from gangline.tasks.evals.report import Report, Slice
    from gangline.tasks.evals.statistics import Difference, Estimate

__all__ = ["comparison_lines", "report_tables", "write_html", "write_markdown"]

_SHOWN_TASKS = 10
_PAGE_WIDTH = 120

Row = tuple[str, ...]
Rows = tuple[str, Row, list[Row]]
"""Title, header, lines."""


def report_tables(report: Report) -> list[Rows]:
    """The figures over all sessions, by each key, outcomes and failures."""
    found = [("evaluation " + report.name, *_figures(report, [report.whole]))]
    found += [(f"by {key}", *_figures(report, slices)) for key, slices in report.by.items()]
    whole = report.whole
    counts = [("outcome", one, str(number)) for one, number in sorted(whole.outcomes.items())]
    counts += [("failure", one, str(number)) for one, number in sorted(whole.failures.items())]
    return [*found, ("sessions", ("", "", "sessions"), counts)]


def _figures(report: Report, slices: Sequence[Slice]) -> tuple[Row, list[Row]]:
    ks = sorted({k for one in slices for k in one.pass_at})
    several = [k for k in ks if k > 1]
    header = [
        *("", "tasks", "sessions", "counted", "reward", "passed"),
        *(f"pass@{k}" for k in several),
        *(f"pass^{k}" for k in several),
        *("turns", "tokens", "seconds"),
    ]
    has_cost = any(one.cost is not None for one in slices)
    rows = [
        (
            *(one.name, str(one.num_tasks), str(one.num_sessions), str(one.num_counted)),
            *(_estimate(one.reward), _estimate(one.passed)),
            *(_estimate(one.pass_at.get(k)) for k in several),
            *(_estimate(one.pass_hat.get(k)) for k in several),
            *(_number(one.turns), _number(one.sampled_tokens), _number(one.seconds)),
            *((_number(one.cost),) if has_cost else ()),
        )
        for one in slices
    ]
    return (*header, *(("cost",) if has_cost else ())), rows


def _estimate(value: Estimate | None) -> str:
    if value is None:
        return "-"
    error = "" if value.standard_error is None else f" ± {value.standard_error:.3f}"
    return f"{value.mean:.3f}{error}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def comparison_lines(first: str, second: str, difference: Difference) -> Iterator[str]:
    error = "" if difference.standard_error is None else f" ± {difference.standard_error:.3f}"
    yield (
        f"{second} minus {first}: {difference.mean:+.3f}{error} over {difference.num_tasks} tasks, 95 % interval "
        f"{difference.low:+.3f} to {difference.high:+.3f}"
    )
    if not difference.is_visible:
        yield "No difference can be seen: the interval holds 0."
    for name, tasks in (("better", difference.better), ("worse", difference.worse)):
        shown = ", ".join(tasks[:_SHOWN_TASKS])
        more = f" and {len(tasks) - _SHOWN_TASKS} more" if len(tasks) > _SHOWN_TASKS else ""
        yield f"{len(tasks)} tasks {name}" + (f": {shown}{more}" if tasks else "")


def as_table(rows: Rows) -> FactTable:
    title, (first, *others), lines = rows
    table = FactTable(first, *map(numbers, others), title=title)
    for line in lines:
        table.add_row(*line)
    return table


def write_markdown(path: Path, tables: Sequence[Rows]) -> None:
    lines: list[str] = []
    for title, header, rows in tables:
        lines += [f"## {title}", "", _line(header), _line(tuple("---" for _ in header)), *map(_line, rows), ""]
    path.write_text("\n".join(lines))


def _line(cells: Row) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_html(path: Path, tables: Sequence[Rows]) -> None:
    """As Rich renders the tables, in one file without scripts."""
    page = Console(record=True, width=_PAGE_WIDTH, file=io.StringIO())
    for rows in tables:
        page.print(as_table(rows), "")
    page.save_html(str(path))
