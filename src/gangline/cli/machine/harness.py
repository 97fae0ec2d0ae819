"""`gangline harness`: lists, installs and checks the agent programs that have adapters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import JsonOption, console, notes, print_json, printable
from gangline.cli.terminal.tables import Column, FactTable, numbers, prose
from gangline.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from gangline.cli.machine.harness_check import CheckReport

harness = typer.Typer(no_args_is_help=True, help="List, install and check agent programs.")

NamesArgument = Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of harnesses.")]


@harness.command("list")
def list_(as_json: JsonOption = False) -> None:
    """Show every harness with its program, the supported version and the installed version."""
    from gangline.settings.plugins import refusals, usable

    lines = [_line(name) for name in usable("harness")]
    for message in refusals():
        notes().print(f"refused: {message}", markup=False)
    if as_json:
        print_json(lines)
        return
    table = FactTable("harness", Column("program", 1), "version", "installed", prose("takes", 2))
    for line in lines:
        program = line["package"] or "any"
        table.add_row(
            line["harness"], program, line["version"] or "", line["installed"] or "", ", ".join(line["takes"])
        )
    console().print(table)


def _line(name: str) -> dict[str, Any]:
    from gangline.agents.harnesses.installation import installed_version, program_of
    from gangline.domain.contracts import DependsOnTools, SupportsCapabilities
    from gangline.settings.machine import Settings
    from gangline.settings.plugins import load

    program, adapter = program_of(name), load("harness", name)
    return {
        "harness": name,
        "source": None if program is None else program.source,
        "package": None if program is None else program.package,
        "version": None if program is None else program.version,
        "installed": None if program is None else installed_version(program, Settings.from_environ().tools_dir),
        "needs_tools": isinstance(adapter, DependsOnTools) and adapter.needs_tools,
        "takes": sorted(adapter.takes) if isinstance(adapter, SupportsCapabilities) else [],
    }


@harness.command()
def install(
    names: NamesArgument,
    version: Annotated[
        str | None, typer.Option(help="Version to install. Default: the supported one.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Install agent programs into GANGLINE_TOOLS. Install once; every sandbox can use them."""
    from gangline.agents.harnesses import installation
    from gangline.settings.machine import Settings

    if version is not None and len(names) > 1:
        raise InvalidRequest("--version is of one program: name one harness.")
    tools = Settings.from_environ().tools_dir
    programs = [installation.find_program(name) for name in names]
    notes().print(f"Installing {', '.join(program.package for program in programs)} into {tools}", markup=False)
    with _elapsed():
        installation.install([(program, version) for program in programs], tools)
    installed = {program.harness: installation.installed_version(program, tools) for program in programs}
    if as_json:
        print_json({"tools": str(tools), "installed": installed})
    else:
        for name, found in installed.items():
            console().print(f"{name} {found}", markup=False)


@harness.command()
def check(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Without one: all whose program is installed.")
    ] = None,
    settings: Annotated[
        str | None, typer.Option(help="`agent.settings` as JSON, when one harness is named.", show_default=False)
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="Tokenizer of the scripted engine: tiny, a folder, or a name.")
    ] = "tiny",
    tier: Annotated[Literal["auto", "observe"], typer.Option(help="Capture tier: auto or observe.")] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds each program may run.")] = 300.0,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder in which to keep the recording.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run agent programs in the sandbox against a scripted model, and report their actions.

    The script requests three tool calls, one of which writes a file. Exit code 1 if a program did not carry them out.
    """
    from gangline.cli.machine.harness_check import CheckPlan, check_harnesses

    harnesses = _chosen(names or _installed(), settings)
    with tempfile.TemporaryDirectory(prefix="gangline-check-") as folder:
        plan = CheckPlan(
            harnesses=tuple(harnesses.items()),
            data_dir=(data or Path(folder)).absolute(),
            tokenizer=tokenizer,
            tier=tier,
            timeout_s=timeout,
        )
        try:
            reports = check_harnesses(plan)
        except asyncio.CancelledError:
            raise typer.Exit(Exit.INTERRUPTED) from None
    if as_json:
        print_json(reports)
    else:
        _print(reports)
    if not all(report.ok for report in reports):
        raise typer.Exit(Exit.FAILED)


@contextlib.contextmanager
def _elapsed() -> Generator[None]:
    """Show the elapsed time on a terminal: an installation may take minutes without output."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    out = notes()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=out, disable=not out.is_terminal, transient=True) as progress:
        progress.add_task("npm and pip are at work", total=None)
        yield


def _installed() -> list[str]:
    from gangline.settings.plugins import usable

    return [line["harness"] for line in map(_line, usable("harness")) if line["installed"]]


def _chosen(names: list[str], settings: str | None) -> dict[str, dict[str, Any]]:
    """Name -> settings. Raises: InvalidRequest, UnknownPlugin."""
    from gangline.settings.plugins import make_harness

    if settings is not None and len(names) != 1:
        raise InvalidRequest("--settings is of one harness: name it.")
    try:
        given: dict[str, Any] = {} if settings is None else json.loads(settings)
    except ValueError as error:
        raise InvalidRequest(f"--settings is not JSON: {error}") from error
    for name in names:
        make_harness(name, given)
    return dict.fromkeys(names, given)


def _print(reports: list[CheckReport]) -> None:
    table = FactTable(
        *("harness", Column("version", 3), prose("dialect", 4), "turns#", prose("chains", 2), "first/exact/diverged"),
        *("side calls#", numbers("wall", 5), numbers("model", 6), ""),
    )
    for report in reports:
        table.add_row(
            *(
                report.harness,
                report.version or "",
                ", ".join(report.dialects),
                str(report.num_turns),
                ", ".join(report.chains),
            ),
            "/".join(str(report.contexts.get(context, 0)) for context in ("first", "exact", "diverged")),
            *(str(report.num_side_calls), f"{report.wall_s:.1f} s", f"{report.model_s:.1f} s"),
            Text("ok", "green") if report.ok else Text("failed", "bold red"),
        )
    console().print(table)
    if reports:
        console().print(f"template: {', '.join(reports[0].template_told)}", markup=False)
    for lack in dict.fromkeys(lack for report in reports for lack in report.template_lacks):
        console().print(f"template: {lack}", style="yellow", markup=False)
    for report in reports:
        unlike = {name: number for name, number in report.renderings.items() if name == "not_as_rendered"}
        for cause, number in (report.causes | report.fallbacks | unlike).items():
            console().print(f"{report.harness}: {number} x {printable(cause)}", markup=False)
        for problem in report.problems:
            console().print(f"{report.harness}: {printable(problem)}", markup=False)


def register(app: typer.Typer) -> None:
    app.add_typer(harness, name="harness")
