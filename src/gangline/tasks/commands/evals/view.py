"""How a report and a comparison look: tables in the terminal, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gangline.cli.terminal.tables import Column, FactTable, numbers, prose

if TYPE_CHECKING:
    from gangline.tasks.evals.comparison import EvaluationComparison
    from gangline.tasks.evals.report import Report, Slice, TaskLine
    from gangline.tasks.evals.statistics import Estimate

_SHOWN_TASKS = 10

Row = tuple[str, ...]
Rows = tuple[str, Sequence[str | Column], list[Row]]
"""Title, columns as `FactTable` takes them, lines."""


def figures(report: Report) -> list[Rows]:
    """The figures over all sessions and by each key, then outcomes and failures."""
    found = [("evaluation " + report.name, *_figures("", [report.whole]))]
    found += [(f"by {key}", *_figures(key, slices)) for key, slices in report.by.items()]
    whole = report.whole
    counts = [("outcome", one, str(number)) for one, number in sorted(whole.outcomes.items())]
    counts += [("failure", one, str(number)) for one, number in sorted(whole.failures.items())]
    return [*found, ("sessions", ("", "what", "sessions#"), counts)]


def _figures(key: str, slices: Sequence[Slice]) -> tuple[list[str | Column], list[Row]]:
    ks = sorted({k for one in slices for k in one.pass_at})
    several = [k for k in ks if k > 1]
    header = [
        *(key, numbers("tasks", 2), numbers("sessions", 3), "counted#", "reward#", "passed#"),
        *(f"pass@{k}#" for k in several),
        *(f"pass^{k}#" for k in several),
        *(numbers("turns", 6), numbers("tokens", 5), numbers("seconds", 4)),
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
    return [*header, *((numbers("cost", 1),) if has_cost else ())], rows


def _estimate(value: Estimate | None) -> str:
    if value is None:
        return "-"
    if value.interval is not None:
        low, high = value.interval
        return f"{value.mean:.3f} ({low:.3f} to {high:.3f})"
    error = "" if value.standard_error is None else f" ± {value.standard_error:.3f}"
    return f"{value.mean:.3f}{error}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def tasks_rows(lines: Sequence[TaskLine]) -> Rows:
    """A line for each task: its rewards, how its sessions ended, and its worst session."""
    columns = ("task", prose("rewards"), prose("outcomes"), Column("worst session", 1))
    rows = [(line.task, _rewards(line), outcomes_of(line), line.worst.session_id) for line in lines]
    return "tasks, the worst first", columns, rows


def _rewards(line: TaskLine | None) -> str:
    return " ".join(reward_text(sample.reward) for sample in line.samples) if line is not None else "-"


def reward_text(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3g}"


def outcomes_of(line: TaskLine) -> str:
    """`3 completed, 1 infra_error (node: disk_full)`."""
    return ", ".join(f"{number} {what}" for what, number in line.outcomes.items())


def comparison_lines(first: str, second: str, comparison: EvaluationComparison) -> Iterator[str]:
    difference = comparison.difference
    error = "" if difference.standard_error is None else f" ± {difference.standard_error:.3f}"
    yield (
        f"{second} minus {first}: {difference.mean:+.3f}{error} over {difference.num_tasks} tasks, 95 % interval "
        f"{difference.low:+.3f} to {difference.high:+.3f}"
    )
    if not difference.is_visible:
        yield "No difference can be seen: the interval holds 0."
    for name, tasks in (("worse", difference.worse), ("better", difference.better)):
        more = f"; the {_SHOWN_TASKS} that differ most are below" if len(tasks) > _SHOWN_TASKS else ""
        yield f"{len(tasks)} tasks {name}{more}"
    if comparison.apart:
        yield f"{len(comparison.apart)} tasks count in one of them only, and are in no figure above"


def comparison_table(comparison: EvaluationComparison) -> FactTable:
    """The tasks that differ, with the rewards of their sessions side by side: losses first, then gains."""
    table = FactTable("task", prose(comparison.first), prose(comparison.second), "difference#")
    losses = [change for change in comparison.tasks if change.gain < 0][:_SHOWN_TASKS]
    gains = [change for change in comparison.tasks if change.gain > 0][-_SHOWN_TASKS:]
    for one in (*losses, *gains):
        table.add_row(one.task, _rewards(one.before), _rewards(one.after), f"{one.gain:+.3f}")
    return table


def comparison_figures(comparison: EvaluationComparison) -> Rows:
    """The figures of both, a line for each."""
    names = (comparison.first, comparison.second)
    named = [msgspec.structs.replace(one, name=name) for one, name in zip(comparison.wholes, names, strict=True)]
    return "figures", *_figures("evaluation", named)


def as_table(rows: Rows) -> FactTable:
    title, columns, lines = rows
    table = FactTable(*columns, title=title)
    for line in lines:
        table.add_row(*line)
    return table


def write_markdown(path: Path, tables: Sequence[Rows]) -> None:
    lines: list[str] = []
    for title, columns, rows in tables:
        header = tuple(column.removesuffix("#") if isinstance(column, str) else column.title for column in columns)
        lines += [f"## {title}", "", _line(header), _line(tuple("---" for _ in header)), *map(_line, rows), ""]
    path.write_text("\n".join(lines))


def _line(cells: Row) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
