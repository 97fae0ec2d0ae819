"""`gangline doctor`: this machine's capabilities, its gaps, and the command that closes each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, print_json
from gangline.settings.machine import Settings

if TYPE_CHECKING:
    from gangline.cli.machine.checks import Check

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


def _not_needed(check: Check) -> Check:
    """With an engine of one's own."""
    return msgspec.structs.replace(check, state="optional") if _only_built_in(check) else check


def _only_built_in(check: Check) -> bool:
    return check.state == "missing" and check.name in ("embedded engine", "model", "openai SDK")


def doctor(
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help="URL of an engine to check; repeatable.", show_default=False),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            "--python",
            metavar="VENV",
            help="Python environment of agents, as of gangline submit, to examine in a sandbox.",
            show_default=False,
        ),
    ] = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine's sandbox, limits, engines, model, tools, agents' Python, ports, disk, data and service.

    Exit code 1 if a requirement is missing or broken; each line names the remedy. With engines of your own, the
    requirements of the built-in one are optional.
    """
    from gangline.cli.machine.checks import CHECKS
    from gangline.cli.machine.checks_agent import check_agent_python
    from gangline.cli.machine.checks_folders import check_data_folder
    from gangline.cli.machine.checks_service import SERVICE_CHECKS, check_engine

    settings = Settings.from_environ()
    if data is not None:
        settings = settings.model_copy(update={"data_dir": data})
    if server is not None:
        settings = settings.model_copy(update={"server_url": server})
    checks = [check(settings) for check in (*CHECKS, check_data_folder, *SERVICE_CHECKS)]
    checks.append(check_agent_python(python))
    if engine:
        checks = [_not_needed(check) for check in checks] + [check_engine(url) for url in engine]
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
