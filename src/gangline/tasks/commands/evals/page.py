"""A report, or a comparison of two, as one HTML file that can be sent: tasks are sorted, filtered, lead to sessions.

It loads nothing. All text of tasks is escaped, and the only script that may run is `page.js`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from gangline.tasks.commands.evals.view import comparison_figures, comparison_lines, figures, outcomes_of, reward_text

if TYPE_CHECKING:
    from gangline.tasks.commands.evals.view import Rows
    from gangline.tasks.evals.comparison import EvaluationComparison, TaskChange
    from gangline.tasks.evals.report import Report, Sample, TaskLine

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()}'"
)
_LINKS = "Sessions are links to {}, for a browser that is signed in there."


def report_page(report: Report, server_url: str | None) -> str:
    """server_url: of the service that has the sessions; None where it ended with the evaluation, so that no session is
    a link."""
    heads = ("task", "reward", "sessions", "outcomes", "turns", "tokens", "seconds")
    rows = "".join(_task(line, report.bar, server_url) for line in report.lines)
    only = f"only tasks with a session below {report.bar:g}"
    return _page(f"Evaluation {report.name}", "".join(map(_table, figures(report))), heads, rows, only, server_url)


def comparison_page(comparison: EvaluationComparison, bar: float, server_url: str | None) -> str:
    """bar: minimum reward of a passed session. server_url: as for `report_page`."""
    first, second = comparison.first, comparison.second
    told = "".join(f"<p>{escape(line)}</p>" for line in comparison_lines(first, second, comparison))
    heads = ("task", *map(escape, (first, second)), "difference")
    rows = "".join(_change(change, bar, server_url) for change in comparison.tasks)
    title = f"{second} compared with {first}"
    return _page(
        title, told + _table(comparison_figures(comparison)), heads, rows, "only tasks that differ", server_url
    )


def _page(title: str, body: str, heads: Sequence[str], rows: str, only: str, server_url: str | None) -> str:
    """body, heads, rows: HTML. only: label of the box that hides rows with `data-passed`."""
    told = _LINKS.format(escape(server_url)) if server_url else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1>{body}<h2>Tasks</h2>"
        '<p><label>Find <input type="search" id="words"></label> '
        f'<label><input type="checkbox" id="open"> {only}</label> '
        f'<span id="shown" class="faint" role="status"></span></p><p class="faint">{told}</p>'
        f'<table id="tasks"><thead><tr>{"".join(f"<th><button>{head}</button>" for head in heads)}</thead>'
        f"<tbody>{rows}</tbody></table><script>{_SCRIPT}</script></html>\n"
    )


def _table(rows: Rows) -> str:
    title, columns, lines = rows
    heads = "".join(
        f"<th>{escape(column.removesuffix('#') if isinstance(column, str) else column.title)}" for column in columns
    )
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}' for cell in line)}" for line in lines)
    return f"<h2>{escape(title)}</h2><table><tr>{heads}{body}</table>"


def _task(line: TaskLine, bar: float, server_url: str | None) -> str:
    sessions = "".join(
        f"<li><code>{escape(sample.session_id)}</code> {reward_text(sample.reward)} {escape(sample.outcome)} "
        f"{escape(sample.cause)}"
        for sample in line.samples
    )
    more = f"<details><summary>{len(line.samples)} sessions</summary><ul>{sessions}</ul></details>"
    mean = "-" if line.mean is None else f"{line.mean:.3f}"
    return (
        f'<tr data-passed="{line.always_passes(bar):d}"><td>{escape(line.task)}'
        f'<td class="number" data-value="{_rank(line)}">{mean}{_chips(line, bar, server_url)}{more}'
        f'<td class="words">{escape(outcomes_of(line))}'
        + "".join(f'<td class="number">{one:.4g}' for one in (line.turns, line.sampled_tokens, line.seconds))
    )


def _change(change: TaskChange, bar: float, server_url: str | None) -> str:
    return (
        f'<tr data-passed="{change.gain == 0:d}"><td>{escape(change.task)}'
        f"{_chips(change.before, bar, server_url)}{_chips(change.after, bar, server_url)}"
        f'<td class="number">{change.gain:+.3f}'
    )


def _rank(line: TaskLine) -> str:
    """The number that the table is sorted by, as JavaScript reads it."""
    return "-Infinity" if line.mean is None else str(line.mean)


def _chips(line: TaskLine | None, bar: float, server_url: str | None) -> str:
    """A cell with the rewards of a task's sessions; empty for a report without sessions."""
    if line is None:
        return "<td>"
    return f'<td data-value="{_rank(line)}">{"".join(_chip(sample, bar, server_url) for sample in line.samples)}'


def _chip(one: Sample, bar: float, server_url: str | None) -> str:
    reward = one.reward
    kind = "uncounted" if reward is None else "all" if reward >= bar else "none" if reward <= 0 else "part"
    about = escape(f"{one.session_id}: {one.outcome} {one.cause}".strip())
    shown = f'class="reward {kind}" title="{about}">{reward_text(reward)}'
    if server_url is None:
        return f"<span {shown}</span>"
    return f'<a href="{escape(server_url)}/#/sessions/{quote(one.session_id, safe="")}" {shown}</a>'
