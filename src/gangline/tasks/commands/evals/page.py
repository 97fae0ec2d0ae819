"""An evaluation's report as one HTML file that can be sent: its tasks are sorted, filtered, and lead to sessions.

It loads nothing. All text of tasks is escaped, and the only script that may run is the one below.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote

from gangline.tasks.commands.evals.view import figures, outcomes_of, reward_text

if TYPE_CHECKING:
    from gangline.tasks.commands.evals.view import Rows
    from gangline.tasks.evals.report import Report, Sample, TaskLine

_STYLE = """
:root { color-scheme: light dark; --faint: light-dark(#6a6f76, #9aa0a8); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top; white-space: nowrap; }
td.words { white-space: normal; min-width: 12rem; } .number { text-align: right; }
#tasks tr { border-top: 1px solid light-dark(#dde, #334); }
th button { all: unset; cursor: pointer; font-weight: bold; }
th button:focus-visible { outline: 2px solid; } .faint { color: var(--faint); }
.reward { display: inline-block; min-width: 2rem; text-align: center; border-radius: .3rem; padding: 0 .3rem;
  margin: 0 .2rem .2rem 0; color: #1b1f24; text-decoration: none; background: #f3e3ad; }
.all { background: #b9e5c5; } .none { background: #f4c2c7; } .uncounted { background: #d5d8dd; }
code { font-size: .9em; } ul { margin: .2rem 0; padding-left: 1rem; }
input[type=search] { font: inherit; width: 20rem; }
"""
_SCRIPT = """
const body = document.querySelector("#tasks tbody"), rows = [...body.rows];
const words = document.querySelector("#words"), open = document.querySelector("#open");
function show() {
  const wanted = words.value.toLowerCase().split(/\\s+/);
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !wanted.every((word) => text.includes(word)) || (open.checked && row.dataset.passed === "1");
  }
  document.querySelector("#shown").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} tasks`;
}
words.oninput = open.onchange = show;
const value = (row, at) => row.cells[at].dataset.value ?? row.cells[at].textContent;
const order = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
document.querySelectorAll("#tasks th").forEach((head, at) => {
  head.firstChild.onclick = () => {
    const way = head.ariaSort === "ascending" ? -1 : 1;
    document.querySelectorAll("#tasks th").forEach((one) => one.removeAttribute("aria-sort"));
    head.ariaSort = way > 0 ? "ascending" : "descending";
    rows.sort((a, b) => way * order(value(a, at), value(b, at)));
    body.append(...rows);
  };
});
show();
"""
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()}'"
)


def report_page(report: Report, server_url: str | None) -> str:
    """server_url: of the service that has the sessions; None where it ended with the evaluation, so that no session is
    a link."""
    heads = ("task", "reward", "sessions", "outcomes", "turns", "tokens", "seconds")
    title = escape(f"Evaluation {report.name}")
    told = f"Sessions are links to {escape(server_url)}, for a browser that is signed in there." if server_url else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{title}</h1>{''.join(map(_table, figures(report)))}<h2>Tasks</h2>"
        '<p><label>Find <input type="search" id="words"></label> '
        f'<label><input type="checkbox" id="open"> only tasks with a session below {report.bar:g}</label> '
        f'<span id="shown" class="faint" role="status"></span></p><p class="faint">{told}</p>'
        f'<table id="tasks"><thead><tr>{"".join(f"<th><button>{head}</button>" for head in heads)}</thead>'
        f"<tbody>{''.join(_task(line, report.bar, server_url) for line in report.lines)}</tbody></table>"
        f"<script>{_SCRIPT}</script></html>\n"
    )


def _table(rows: Rows) -> str:
    title, columns, lines = rows
    heads = "".join(
        f"<th>{escape(column.removesuffix('#') if isinstance(column, str) else column.title)}" for column in columns
    )
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}' for cell in line)}" for line in lines)
    return f"<h2>{escape(title)}</h2><table><tr>{heads}{body}</table>"


def _task(line: TaskLine, bar: float, server_url: str | None) -> str:
    chips = "".join(_chip(sample, bar, server_url) for sample in line.samples)
    sessions = "".join(
        f"<li><code>{escape(sample.session_id)}</code> {reward_text(sample.reward)} {escape(sample.outcome)} "
        f"{escape(sample.cause)}"
        for sample in line.samples
    )
    mean = "-" if line.mean is None else f"{line.mean:.3f}"
    rank = "-Infinity" if line.mean is None else line.mean
    return (
        f'<tr data-passed="{line.always_passes(bar):d}"><td>{escape(line.task)}'
        f'<td class="number" data-value="{rank}">{mean}'
        f'<td data-value="{rank}">{chips}<details><summary>{len(line.samples)} sessions</summary><ul>{sessions}</ul>'
        f'</details><td class="words">{escape(outcomes_of(line))}'
        + _mean(sample.turns for sample in line.samples)
        + _mean(sample.sampled_tokens for sample in line.samples)
        + _mean(sample.seconds for sample in line.samples)
    )


def _chip(one: Sample, bar: float, server_url: str | None) -> str:
    reward = one.reward
    kind = "uncounted" if reward is None else "all" if reward >= bar else "none" if reward <= 0 else "part"
    about = escape(f"{one.session_id}: {one.outcome} {one.cause}".strip())
    shown = f'class="reward {kind}" title="{about}">{reward_text(reward)}'
    if server_url is None:
        return f"<span {shown}</span>"
    return f'<a href="{escape(server_url)}/#/sessions/{quote(one.session_id, safe="")}" {shown}</a>'


def _mean(values: Iterable[float]) -> str:
    found = list(values)
    return f'<td class="number">{sum(found) / len(found):.4g}'
