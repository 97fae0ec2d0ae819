"""`gangline harness`: the agent programs that there are adapters for, and how they are installed."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from gangline.cli.output import JsonOption, console, notes, print_json

__all__ = ["register"]

harness = typer.Typer(no_args_is_help=True, help="List and install the agent programs that there are adapters for.")

NamesArgument = Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of harnesses.")]


@harness.command("list")
def list_(as_json: JsonOption = False) -> None:
    """Show every harness: its program, the version that it was made for, the one that is installed."""
    from gangline.plugins import names

    lines = [_line(name) for name in names("harness")]
    if as_json:
        print_json(lines)
        return
    table = Table("harness", "program", "version", "installed", "takes", box=None)
    for line in lines:
        program = line["package"] or "any"
        table.add_row(
            line["harness"], program, line["version"] or "", line["installed"] or "", ", ".join(line["takes"])
        )
    console().print(table)


def _line(name: str) -> dict[str, Any]:
    from gangline.domain.contracts import Taker
    from gangline.harnesses.installation import installed_version, program_of
    from gangline.plugins import load
    from gangline.settings import Settings

    program, adapter = program_of(name), load("harness", name)
    return {
        "harness": name,
        "source": None if program is None else program.source,
        "package": None if program is None else program.package,
        "version": None if program is None else program.version,
        "installed": None if program is None else installed_version(program, Settings.from_environ().tools_dir),
        "takes": sorted(adapter.takes) if isinstance(adapter, Taker) else [],
    }


@harness.command()
def install(
    names: NamesArgument,
    version: Annotated[
        str | None, typer.Option(help="Another version than the one that the harness was made for.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Install agent programs into GANGLINE_TOOLS, where every sandbox sees them; once, not for each session."""
    from gangline.domain.errors import InvalidRequest
    from gangline.harnesses import installation
    from gangline.settings import Settings

    if version is not None and len(names) > 1:
        raise InvalidRequest("--version is of one program: name one harness.")
    tools = Settings.from_environ().tools_dir
    programs = [installation.find_program(name) for name in names]
    notes().print(f"Installing {', '.join(program.package for program in programs)} into {tools}", markup=False)
    installation.install([(program, version) for program in programs], tools)
    installed = {program.harness: installation.installed_version(program, tools) for program in programs}
    if as_json:
        print_json({"tools": str(tools), "installed": installed})
    else:
        for name, found in installed.items():
            console().print(f"{name} {found}", markup=False)


def register(app: typer.Typer) -> None:
    app.add_typer(harness, name="harness")
