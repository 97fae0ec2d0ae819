"""`gangline`: the one command. Adds up the command modules and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import typer

from gangline import __version__
from gangline.cli.terminal.exits import Exit, report
from gangline.domain.errors import GanglineError

__all__ = ["build_app", "load"]

_COMMAND_MODULES = (
    "learning.demo",
    "starting.init",
    "service.up",
    "service.down",
    "tasks.submit",
    "tasks.task_files",
    "tasks.preset",
    "service.status",
    "tasks.listing",
    "tasks.watch",
    "results.page",
    "results.show",
    "results.agent_logs",
    "results.audit",
    "results.drift",
    "results.export",
    "evals.evaluate",
    "evals.compare",
    "evals.regrade",
    "vetting.vet",
    "datasets.data",
    "learning.train",
    "learning.runs",
    "machine.doctor",
    "machine.config",
    "machine.harness",
    "machine.image",
    "service.actions",
    "service.gate",
    "service.drain",
    "service.backend",
    "service.engine",
    "service.server",
    "service.node",
    "service.cluster",
)
"""In the order in which `--help` shows them."""
_ELSEWHERE = {
    "eval": "evals.evaluate",
    "cancel": "service.status",
    "list": "tasks.listing",
    "logs": "results.agent_logs",
    "tasks": "tasks.task_files",
    "open": "results.page",
}
"""Commands that are in a module of another name."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gangline {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Turns any agent program into a reinforcement-learning environment.

    Start with `gangline doctor`, then `gangline demo`, or `gangline init` for an agent of your own.
    """


def build_app(command: str | None = None) -> typer.Typer:
    """The app with all commands; with the module of `command` alone where it is one: loading the others takes half of
    a short command's time."""
    app = typer.Typer(
        name="gangline",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    named = {module.rpartition(".")[2]: module for module in _COMMAND_MODULES} | _ELSEWHERE
    for name in (named[command],) if command in named else _COMMAND_MODULES:
        importlib.import_module(f"gangline.cli.{name}").register(app)
    return app


def load(arguments: Sequence[str]) -> Callable[[], None]:
    """The command that `arguments` ask for, loaded but not begun. Calling it raises SystemExit with a code of
    `exits.Exit`, always."""
    command = arguments[0] if arguments else _completed_command()
    return partial(_run, build_app(command), list(arguments))


def _completed_command() -> str | None:
    """The command whose options a shell completes: the second word in Typer's variables, once a third begins."""
    words = (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or "").split()
    return words[1] if "_GANGLINE_COMPLETE" in os.environ and len(words) > 2 else None


def _run(app: typer.Typer, arguments: list[str]) -> None:
    try:
        app(args=arguments, prog_name="gangline")
    except GanglineError as error:
        if "--debug" in arguments:
            raise
        sys.exit(report(error, as_json="--json" in arguments))
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
