"""`gangline down`: stop the service that `gangline up` started on a data folder."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.terminal.output import DataOption, JsonOption, console, notes, print_json
from gangline.domain.errors import InvalidRequest, NodeError, ServerUnavailable
from gangline.settings.machine import Settings
from gangline.wire.client.running import holder, read_server


def down(
    data: DataOption = None,
    now: Annotated[bool, typer.Option("--now", help="End running sessions at once instead of cleanly.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for its end.")] = 90.0,
    as_json: JsonOption = False,
) -> None:
    """Stop the service of a data folder, and wait until all of its processes have ended.

    Its sessions return to the queue and continue with the next `gangline up`. Exit code 3 if no service is running.
    """
    folder = (data or Settings.from_environ().data_dir).absolute()
    started_at_s = time.monotonic()
    pid = _stop(folder, now, timeout)
    wall_s = time.monotonic() - started_at_s
    if as_json:
        print_json({"data": str(folder), "pid": pid, "wall_s": wall_s})
    else:
        console().print(f"Stopped the service of {folder} (pid {pid}) in {wall_s:.1f} s.", markup=False, soft_wrap=True)


def _stop(folder: Path, now: bool, timeout_s: float) -> int:
    """Returns the process id of the service. Raises: ServerUnavailable, InvalidRequest, NodeError."""
    if (pid := holder(folder)) is None:
        raise ServerUnavailable(f"no `gangline up` is running on {folder}.{_alone(folder)}")
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise InvalidRequest(f"process {pid} holds {folder} but is not visible here: run this where it runs.") from None
    try:
        if holder(folder) != pid:
            return pid  # it ended by itself, and its pid may already be reused
        _signal(process, pid, now)
        notes().print(f"Waiting for process {pid} to stop its node, server and engine.")
        if not select.select([process], [], [], timeout_s)[0]:
            hint = "" if now else " `gangline down --now` ends it at once."
            raise NodeError(f"process {pid} has not ended after {timeout_s:g} s.{hint}")
    finally:
        os.close(process)
    return pid


def _signal(process: int, pid: int, now: bool) -> None:
    """`up` stops cleanly at the first signal and at once at the second. Raises: InvalidRequest."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT) if now else (signal.SIGTERM,):
            signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return
    except PermissionError:
        raise InvalidRequest(f"process {pid} belongs to another user: stop it as that user or as root.") from None


def _alone(folder: Path) -> str:
    server = read_server(folder)
    return "" if server is None else f" A `gangline server` runs there by itself, with pid {server.pid}: end that."


def register(app: typer.Typer) -> None:
    app.command()(down)
