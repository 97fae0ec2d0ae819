"""What every command shares: `--json`, where documents go, how a coroutine is run."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console

from gangline.cli.exits import Exit

__all__ = ["DataOption", "JsonOption", "ServerOption", "console", "log_to_stderr", "notes", "print_json", "run"]

T = TypeVar("T")

JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON to stdout; notes and logs go to stderr.")]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", help="Data folder. Default: GANGLINE_DATA, else ./.gangline", show_default=False),
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        help="URL of the server. Default: GANGLINE_SERVER, else the `gangline up` of the data folder. "
        "Its token comes from GANGLINE_TOKEN.",
        show_default=False,
    ),
]


def console() -> Console:
    """For what the command was asked for: stdout."""
    return Console(highlight=False)


def notes() -> Console:
    """For progress and hints: stderr."""
    return Console(stderr=True, highlight=False)


def print_json(document: Any) -> None:
    """One JSON document as one line on stdout, at once."""
    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    sys.stdout.flush()


def log_to_stderr(level: int = logging.INFO) -> None:
    """For the commands that serve: log lines with UTC times on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; Ctrl-C ends the command with the shell's own code for it."""
    try:
        return asyncio.run(coroutine)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
