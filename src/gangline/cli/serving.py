"""How `gangline engine`, `server` and `node` run: one line of JSON on stdout when ready, logs on stderr, a clean end.

- SIGTERM and SIGINT cancel the service, which cleans up; after `GRACE_S` the process ends anyway.
- Under a supervisor (`--parent PID`) the kernel sends SIGTERM when that process dies, however it died.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from gangline.cli.output import log_to_stderr, print_json

__all__ = ["GRACE_S", "HostOption", "ParentOption", "PublicUrlOption", "Service", "serve"]

GRACE_S = 20.0
"""How long a service may take to clean up after SIGTERM."""

Service = Callable[[Callable[[str], None]], Awaitable[None]]
"""Given `on_ready(url)`, serves until it is cancelled."""

HostOption = Annotated[str, typer.Option("--host", help="Address to listen on.")]
PublicUrlOption = Annotated[
    str | None,
    typer.Option(
        "--public-url",
        help="URL by which others reach it. Default: its address; the machine's name where that is every address.",
        show_default=False,
    ),
]
ParentOption = Annotated[
    int | None, typer.Option("--parent", hidden=True, help="End when the process with this id is gone.")
]

_PR_SET_PDEATHSIG = 1


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies; a parent that died before the asking counts too."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _end_after_grace() -> None:
    timer = threading.Timer(GRACE_S, os._exit, args=(1,))
    timer.daemon = True
    timer.start()


async def _until_signalled(service: Service, on_ready: Callable[[str], None], parent: int | None) -> None:
    task = asyncio.ensure_future(service(on_ready))
    loop = asyncio.get_running_loop()
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            _end_after_grace()
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if parent is not None:
        _die_with(parent)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def serve(service: Service, *, kind: str, parent: int | None, log_format: str | None = None) -> None:
    """Run a service until it is told to end. Prints `{kind: url, "pid": ...}` when it is ready."""
    log_to_stderr(log_format)

    def on_ready(url: str) -> None:
        print_json({f"{kind}_url": url, "pid": os.getpid()})

    asyncio.run(_until_signalled(service, on_ready, parent))
