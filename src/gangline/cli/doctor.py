"""`gangline doctor`: what this machine has, what it lacks, and the line that mends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Table

from gangline.cli.exits import Exit
from gangline.cli.output import DataOption, JsonOption, console, print_json
from gangline.settings import Settings

if TYPE_CHECKING:
    from gangline.cli.checks import Check

__all__ = ["register"]

_MARKS = {"ok": "[green]ok[/]", "optional": "[yellow]optional[/]", "missing": "[bold red]missing[/]"}


def _print(checks: list[Check]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("", "state", "found, and what to do"):
        table.add_column(title, overflow="fold")
    for check in checks:
        advice = f"\n[bold]->[/] {escape(check.advice)}" if check.advice else ""
        table.add_row(check.name, _MARKS[check.state], escape(check.found) + advice)
    console().print(table)


def doctor(data: DataOption = None, as_json: JsonOption = False) -> None:
    """Try what a first run needs: sandbox, limits, engine, model, tools, ports, disk, clock.

    Exit code 1 when something needed is missing; each line says what to do.
    """
    from gangline.cli.checks import CHECKS

    settings = Settings.from_environ()
    if data is not None:
        settings = settings.model_copy(update={"data_dir": data})
    checks = [check(settings) for check in CHECKS]
    missing = [check.name for check in checks if check.state == "missing"]
    if as_json:
        print_json({"ok": not missing, "checks": checks})
    else:
        _print(checks)
        console().print(f"[red]Missing: {', '.join(missing)}.[/]" if missing else "[green]Ready: gangline demo[/]")
    if missing:
        raise typer.Exit(Exit.FAILED)


def register(app: typer.Typer) -> None:
    app.command()(doctor)
