"""How an audit looks: in the terminal, as JSON and as an HTML page."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec

from gangline.cli.terminal.output import printable

if TYPE_CHECKING:
    from gangline.tasks.vetting.run import TaskRecord

__all__ = ["as_document", "html_page", "report_lines"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top; }
.defective, .failed { color: #b00020; } .sound, .passed { color: #006d32; } .unproven, .not_checked { color: #7a5c00; }
code { font-size: .9em; overflow-wrap: anywhere; } details { margin: .4rem 0; }
"""


def as_document(records: Sequence[TaskRecord], failures: Mapping[str, str]) -> dict[str, Any]:
    return {
        "verdicts": dict(Counter(record.verdict for record in records)),
        "median_s": statistics.median(record.seconds for record in records) if records else None,
        "failed_checks": dict(_failed_checks(records)),
        "not_audited": dict(failures),
        "tasks": msgspec.to_builtins(list(records)),
    }


def report_lines(records: Sequence[TaskRecord], failures: Mapping[str, str]) -> Iterator[str]:
    """One line for each task that is not sound, with its reasons below, and a summary."""
    for record in records:
        if record.verdict == "sound":
            continue
        yield f"{record.verdict:<10} {printable(record.name)}"
        for name, check in record.checks.items():
            if check.status == "failed" or (record.verdict == "unproven" and check.message):
                where = f" ({check.sessions[0]})" if check.sessions else ""
                yield f"           {name}: {printable(check.message)}{where}"
    for name, why in failures.items():
        yield f"not audited {printable(name)}: {printable(why)}"
    counts = Counter(record.verdict for record in records)
    shown = ", ".join(f"{counts[name]} {name}" for name in ("sound", "unproven", "defective") if counts[name])
    median = f"; {statistics.median(record.seconds for record in records):.1f} s per task (median)" if records else ""
    yield f"{len(records)} tasks: {shown or 'none audited'}{median}"


def _failed_checks(records: Sequence[TaskRecord]) -> Counter[str]:
    return Counter(name for record in records for name, one in record.checks.items() if one.status == "failed")


def html_page(records: Sequence[TaskRecord], failures: Mapping[str, str]) -> str:
    """One file without scripts. All text of tasks is escaped."""
    *_, summary = report_lines(records, failures)
    checks = "".join(f"<tr><td>{escape(name)}<td>{number}" for name, number in _failed_checks(records).most_common())
    failed = "".join(f"<li>{escape(name)}: {escape(why)}" for name, why in failures.items())
    order = {"defective": 0, "unproven": 1, "sound": 2}
    tasks = "".join(_task(one) for one in sorted(records, key=lambda one: order[one.verdict]))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Audit of tasks</title><style>{_STYLE}</style>'
        f"<h1>Audit of tasks</h1><p>{escape(summary)}</p>"
        + (f"<table><tr><th>failed check<th>tasks{checks}</table>" if checks else "")
        + (f"<h2>Not audited</h2><ul>{failed}</ul>" if failed else "")
        + f"<h2>Tasks</h2>{tasks}</html>\n"
    )


def _task(record: TaskRecord) -> str:
    from gangline.tasks.vetting.checks import CHECKS

    rows = "".join(
        f'<tr title="{escape(CHECKS[name])}"><td>{escape(name)}<td class="{one.status}">{one.status.replace("_", " ")}'
        f"<td>{escape(one.message)}<td>{''.join(f'<code>{escape(session)}</code> ' for session in one.sessions[:3])}"
        for name, one in record.checks.items()
    )
    trials = "".join(
        f"<tr><td>{escape(one.trial)}<td>{escape(one.described())}<td><code>{escape(one.session_id)}</code>"
        for one in record.evidence
    )
    is_open = " open" if record.verdict == "defective" else ""
    return (
        f'<details{is_open}><summary><b class="{record.verdict}">{record.verdict}</b> {escape(record.name)} '
        f"({record.seconds:.1f} s)</summary><table>{rows}</table>"
        f"<details><summary>{len(record.evidence)} sessions</summary><table>{trials}</table></details></details>"
    )
