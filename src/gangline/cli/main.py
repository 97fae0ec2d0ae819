"""`gangline`: the command line, built from the table in `commands`. Turns errors into one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import typer

from gangline import __version__
from gangline.cli.commands import COMMANDS, LazyCommands, import_command, is_installed
from gangline.cli.terminal.exits import Exit, report
from gangline.domain.errors import GanglineError


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gangline {__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Turns any agent program into a reinforcement-learning environment.

    Start with `gangline doctor`, then `gangline demo`, or `gangline init` for an agent of your own. `gangline` alone
    says what to do next in this folder.
    """
    if context.invoked_subcommand is None:
        from gangline.cli.starting.next_steps import print_next_steps

        print_next_steps(is_installed)


def build_app() -> typer.Typer:
    """The app with all commands of the table, each still unloaded."""
    app = typer.Typer(
        name="gangline",
        cls=LazyCommands,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    return app


def load(arguments: Sequence[str]) -> Callable[[], None]:
    """Load the command for `arguments` without running it. Calling the result always raises SystemExit with a code of
    `exits.Exit`."""
    command = next((word for word in arguments if not word.startswith("-")), None)
    if command in COMMANDS and is_installed(command):
        import_command(command)
    return partial(_run, build_app(), list(arguments))


def _run(app: typer.Typer, arguments: list[str]) -> None:
    if sys.platform == "win32":  # a pipe there takes the letters of one country, unless told
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(encoding="utf-8")
    try:
        app(args=arguments, prog_name="gangline")
    except GanglineError as error:
        if "--debug" in arguments:
            raise
        sys.exit(report(error, as_json="--json" in arguments))
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
