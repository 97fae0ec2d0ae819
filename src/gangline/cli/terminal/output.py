"""Shared by all commands: `--json`, output of documents, running coroutines."""

from __future__ import annotations

import asyncio
import logging
import shlex
import signal
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console

from gangline.cli.terminal.exits import Exit
from gangline.domain.errors import InvalidRequest
from gangline.machine.telemetry.logs import LineFormatter, LogFormat
from gangline.settings.machine import Settings

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
        help="URL of the server. Default: GANGLINE_SERVER, else the service of the data folder. "
        "Its token comes from GANGLINE_TOKEN, else from there.",
        show_default=False,
    ),
]


LogFormatOption = Annotated[
    str | None,
    typer.Option(
        "--log-format",
        help="text, or json with one object per line. Default: GANGLINE_LOG_FORMAT, else text.",
        show_default=False,
    ),
]


def console() -> Console:
    """Console for the command's result: stdout. The terminal wraps lines, so that they can be copied whole."""
    return Console(highlight=False, soft_wrap=True)


def notes() -> Console:
    """Console for progress and hints: stderr."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """One line without control characters: text from agents and engines must not move the terminal's cursor."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def printable_lines(text: str) -> str:
    """The lines of `text` without control characters; a tab becomes spaces."""
    lines = (line.expandtabs(4) for line in text.splitlines())
    return "\n".join("".join(char if char.isprintable() else "?" for char in line) for line in lines)


def open_command(part: str, data: Path | None = None, server: str | None = None) -> str:
    """The command that opens a part of the page. data, server: the options that were given."""
    options = [("--data", data), ("--server", server)]
    given = "".join(f" {name} {shlex.quote(str(value))}" for name, value in options if value is not None)
    return f"gangline open {shlex.quote(part)}{given}"


def print_json(document: Any) -> None:
    """One JSON document as one line on stdout, at once."""
    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    sys.stdout.flush()


def read_log_format(given: str | None) -> LogFormat:
    """The format of `--log-format`, else of the settings. Raises: InvalidRequest."""
    wanted = given or Settings.from_environ().log_format
    if wanted == "text" or wanted == "json":
        return wanted
    raise InvalidRequest(f"the log format must be text or json, got {wanted!r}.")


def log_to_stderr(log_format: str | None = None, level: int = logging.INFO) -> None:
    """Log lines with UTC times on stderr, for the serving commands. Raises: InvalidRequest."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(read_log_format(log_format)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine. Ctrl-C and SIGTERM end it cleanly, with the shell's exit codes for them."""
    try:
        return asyncio.run(_until_terminated(coroutine))
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
    except asyncio.CancelledError:
        raise typer.Exit(Exit.TERMINATED) from None


async def _until_terminated(coroutine: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    assert task is not None
    # Only the main thread receives signals, and on Windows none of these comes.
    if threading.current_thread() is threading.main_thread() and sys.platform != "win32":
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await coroutine
