"""How `gangline engine`, `server` and `node` run: one line of JSON on stdout when ready, logs on stderr, a clean end.

- SIGTERM, SIGINT and SIGHUP cancel the service, which cleans up. A second signal, or `GRACE_S` after the first, ends
  the process at once; its leftovers are removed then too.
- Under a supervisor (`--parent PID`) the kernel sends SIGUSR2 when that process dies for any reason. It may arrive
  several times, once for each thread of the supervisor that becomes the parent, so it never hurries the shutdown.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import log_to_stderr, print_json

log = logging.getLogger("gangline.serving")

GRACE_S = 20.0
"""Seconds that a service may take to clean up after SIGTERM."""

Service = Callable[[Callable[[str], None]], Awaitable[None]]
"""Receives `on_ready(url)`, and serves until it is cancelled."""

HostOption = Annotated[str, typer.Option("--host", help="Address to listen on.")]
AllowedHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        help="Additional host name under which clients reach the control routes, such as that of a reverse proxy; "
        "repeatable. The address itself, loopback and the host of --public-url are always allowed.",
        show_default=False,
    ),
]
ParentOption = Annotated[
    int | None, typer.Option("--parent", hidden=True, help="End when the process with this id is gone.")
]

WatchedOption = Annotated[
    int | None,
    typer.Option("--parent", metavar="PID", min=1, help="End when the process with this id ends, even by SIGKILL."),
]

_PR_SET_PDEATHSIG = 1
_PARENT_DIED = signal.SIGUSR2


def _die_with(parent: int) -> None:
    """Ask the kernel for a signal when the parent dies. Also covers a parent that died before this call."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, _PARENT_DIED)
    if os.getppid() != parent:
        os.kill(os.getpid(), _PARENT_DIED)


def _nothing() -> None:
    return None


class _Ending:
    """Ends a service: cleanly at the first signal, at once at the second, or when cleaning up takes too long.

    clean_up: removes the leftovers of a process that ends at once. Blocks; called on a thread.
    """

    def __init__(self, kind: str, service: asyncio.Future[None], clean_up: Callable[[], None]) -> None:
        self._kind = kind
        self._service = service
        self._clean_up = clean_up
        self._signals = 0

    def signalled(self, number: signal.Signals) -> None:
        if self._signals and number == _PARENT_DIED:
            return
        self._signals += 1
        if self._signals == 1:
            log.info(
                "service.stopping kind=%s signal=%s grace_s=%g; once more ends it at once",
                *(self._kind, "parent_died" if number == _PARENT_DIED else number.name, GRACE_S),
            )
            self._later(GRACE_S, Exit.FAILED)
            self._service.cancel()
        elif self._signals == 2:
            log.warning("service.hurried kind=%s signal=%s", self._kind, number.name)
            self._later(0.0, Exit.INTERRUPTED)

    def _later(self, after_s: float, code: Exit) -> None:
        timer = threading.Timer(after_s, self._end, args=(code,))
        timer.daemon = True
        timer.start()

    def _end(self, code: Exit) -> None:
        try:
            self._clean_up()
        finally:
            os._exit(code)


async def _until_signalled(
    service: Service, kind: str, on_ready: Callable[[str], None], parent: int | None, clean_up: Callable[[], None]
) -> None:
    task = asyncio.ensure_future(service(on_ready))
    ending = _Ending(kind, task, clean_up)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, _PARENT_DIED):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, ending.signalled, number)
    if parent is not None:
        _die_with(parent)
    with contextlib.suppress(asyncio.CancelledError):
        await task
        return
    log.info("service.stopped kind=%s", kind)


def serve(
    service: Service,
    *,
    kind: str,
    parent: int | None,
    log_format: str | None = None,
    is_open: bool = False,
    clean_up: Callable[[], None] = _nothing,
) -> None:
    """Run a service until it receives a signal. Prints `{kind: url, "pid": ...}` when it is ready.

    is_open: whether it requires no control token, which is logged at every start.
    clean_up: see `_Ending`.
    """
    log_to_stderr(log_format)
    if is_open:
        log.warning(
            "service.open kind=%s: it asks for no control token (--no-token): every program of this machine can run "
            "commands through it",
            kind,
        )

    def on_ready(url: str) -> None:
        print_json({f"{kind}_url": url, "pid": os.getpid()})

    asyncio.run(_until_signalled(service, kind, on_ready, parent, clean_up))
