"""`gangline vet`: audits tasks, and stores the verdict with them.

Also formats an audit for the terminal, as JSON and as an HTML page.
"""

from __future__ import annotations

import asyncio
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gangline.cli.options.settings import UP
from gangline.cli.service.through import with_own, with_running
from gangline.cli.service.up import plan_of
from gangline.cli.tasks.files import by_name, read_tasks, validated
from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import (
    DataOption,
    JsonOption,
    ServerOption,
    console,
    notes,
    print_json,
    printable,
    run,
)
from gangline.domain.errors import ServerUnavailable
from gangline.settings.machine import Settings
from gangline.settings.service import resolve
from gangline.wire.client.running import find_service

if TYPE_CHECKING:
    from gangline.tasks.vetting.run import TaskRecord, VettingRun
    from gangline.tasks.vetting.subject import Subject
    from gangline.wire.client.running import Service
    from gangline.wire.client.server import ServerClient

_NO_AGENT = {"harness": "shell", "settings": {"command": "true"}, "allow_no_model_call": True}
"""Default agent of a task."""

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
    """One line for each task that is not sound, followed by its reasons, and a summary."""
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
    tasks = "".join(_task(record) for record in sorted(records, key=lambda one: order[one.verdict]))
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


def vet(
    source: Annotated[str, typer.Argument(metavar="FILE|-", help="Tasks, as for `gangline submit`.")],
    name: Annotated[str | None, typer.Option("--name", help="Name of the audit. Default: the file's.")] = None,
    held_out: Annotated[
        Path | None, typer.Option("--held-out", help="Tasks that these must share nothing with.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the tasks with their verdicts there, as JSON lines.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report as an HTML page.")] = None,
    runs: Annotated[int, typer.Option("--runs", min=2, help="Sessions of each reference solution.")] = 5,
    in_flight: Annotated[int, typer.Option("--in-flight", min=1, help="Tasks at a time.")] = 4,
    again: Annotated[bool, typer.Option("--again", help="Forget earlier results of the audit.")] = False,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Audit tasks: are their rewards to be believed?

    Runs each task's reference solution, an agent that does nothing, scripted cheats and mutants of the solution in
    clean sandboxes of the running service, or of a service started for the audit; no model is called. A task's solution
    is in its field `solution`. A restarted run continues where it stopped. Results are in DATA/vetting/NAME. The exit
    code is 1 unless every task is sound.
    """
    subjects = _subjects(source)
    data_dir = (data or Settings.from_environ().data_dir).absolute()
    folder = data_dir / "vetting" / (name or _name_of(source))
    command = _VettingCommand(subjects, folder, held_out, num_runs=runs, num_in_flight=in_flight, again=again)
    try:
        audits = command.audited(_running(data, server), data_dir)
    except typer.Exit:
        notes().print("Stopped. Start it again to continue.")
        raise
    _write(audits, subjects, out or folder / "tasks.jsonl", html)
    _show(audits, out or folder / "tasks.jsonl", as_json=as_json)
    if audits.failures or any(record.verdict != "sound" for record in audits.records):
        raise typer.Exit(Exit.FAILED)


class _VettingCommand:
    """Runs an audit through a service, with a progress bar."""

    def __init__(
        self,
        subjects: Sequence[Subject],
        folder: Path,
        held_out: Path | None,
        *,
        num_runs: int,
        num_in_flight: int,
        again: bool,
    ) -> None:
        self._subjects, self._folder, self._held_out = subjects, folder, held_out
        self._num_runs, self._num_in_flight, self._again = num_runs, num_in_flight, again

    def audited(self, service: Service | None, data_dir: Path) -> VettingRun:
        """service: a running one; None: start one. Raises: the service's errors, typer.Exit when ended by a signal."""
        if service is not None:
            return run(with_running(service, self._run))
        given = {"node.engines": (), "node.engines_later": True, "data_dir": data_dir}
        try:
            return asyncio.run(with_own(plan_of(resolve(given, defaults=UP.defaults)), self._run))
        except (asyncio.CancelledError, KeyboardInterrupt):  # the service, started here, handles the signals
            raise typer.Exit(Exit.INTERRUPTED) from None

    async def _run(self, client: ServerClient, _token: str | None) -> VettingRun:
        from gangline.tasks.vetting.held_out import against_held_out
        from gangline.tasks.vetting.run import VettingRun, forget

        if self._again:
            await asyncio.to_thread(forget, self._folder)
        shared = None if self._held_out is None else against_held_out(self._subjects, read_tasks(str(self._held_out)))
        progress = Progress(
            *(TextColumn("tasks"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[found]}")),
            TimeElapsedColumn(),
            console=notes(),
            transient=True,
        )
        bar = progress.add_task("", total=len(self._subjects), found="")
        num_defective = 0

        def count(record: TaskRecord | None) -> None:
            nonlocal num_defective
            num_defective += record is not None and record.verdict == "defective"
            progress.update(bar, advance=1, found=f"{num_defective} defective" if num_defective else "")

        audits = VettingRun(
            client,
            self._subjects,
            self._folder,
            num_in_flight=self._num_in_flight,
            num_runs=self._num_runs,
            shared=shared,
            on_task=count,
        )
        progress.update(bar, completed=len(audits.records))
        with progress:
            await audits.run()
        return audits


def _running(data: Path | None, server: str | None) -> Service | None:
    """The running service; None if there is none and none was named."""
    try:
        return find_service(data, server)
    except ServerUnavailable:
        if server is not None:
            raise
        return None


def _subjects(source: str) -> list[Subject]:
    """Raises: InvalidRequest, UnknownPlugin."""
    from gangline.tasks.vetting.subject import subject_of

    subjects: list[Subject] = []
    for named, given in by_name(read_tasks(source), source).items():
        task = {**given, "agent": {**_NO_AGENT, **given.get("agent", {})}}
        validated(task, f"{source}, {named}")
        subjects.append(subject_of(named, task))
    return subjects


def _name_of(source: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source).stem).strip("-.") or "tasks"


def _write(audits: VettingRun, subjects: Sequence[Subject], out: Path, html: Path | None) -> None:
    from gangline.tasks.vetting.run import vetted_task

    records = {record.name: record for record in audits.records}
    lines: list[dict[str, Any]] = [
        vetted_task(subject, records[subject.name]) if subject.name in records else subject.task for subject in subjects
    ]
    out.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    if html is not None:
        html.write_text(html_page(audits.records, audits.failures))


def _show(audits: VettingRun, out: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(as_document(audits.records, audits.failures) | {"tasks_file": str(out)})
        return
    for line in report_lines(audits.records, audits.failures):
        console().print(line, markup=False, soft_wrap=True)
    console().print(f"tasks with their verdicts: {out}", markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command()(vet)
