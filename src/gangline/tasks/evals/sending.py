"""Sends the growing report of an evaluation to its service, so that the page shows it while it runs and afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

from gangline.domain.errors import GanglineError
from gangline.tasks.evals.report import Report

_PAUSE_S = 2.0
_RESTS = 20.0
"""Pause after a report, by the time that it took: a large one is sent less often."""


class ReportReceiver(Protocol):
    """A service, such as `gangline.wire.client.server.ServerClient`."""

    async def request(self, method: str, path: str, *, body: bytes | None = None) -> bytes: ...


@contextlib.asynccontextmanager
async def report_sent(
    service: ReportReceiver, make: Callable[[], Report], say: Callable[[str], None], *, pause_s: float = _PAUSE_S
) -> AsyncGenerator[None]:
    """Sends within the block, and the last report at its end. A service that refuses reports never ends an evaluation.

    make: the report so far. say: receives the reason if the last report could not be sent.
    """
    ended = asyncio.Event()
    sending = asyncio.create_task(_send_changes(service, make, pause_s, ended))
    try:
        yield
    finally:
        ended.set()  # not cancelled: the server may write a report whose sender has left, after the last one
        await asyncio.wait({sending})
    try:
        await _send(service, msgspec.json.encode(make()))
    except GanglineError as error:
        say(f"The page lacks the last figures of this evaluation: {error.message}")


async def _send_changes(
    service: ReportReceiver, make: Callable[[], Report], pause_s: float, ended: asyncio.Event
) -> None:
    sent = b""
    while not ended.is_set():
        began_at = time.monotonic()
        body = msgspec.json.encode(make())
        if body != sent:
            with contextlib.suppress(GanglineError):  # such as a service that restarts: it is sent again
                await _send(service, body)
                sent = body
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(pause_s, _RESTS * (time.monotonic() - began_at))):
                await ended.wait()


async def _send(service: ReportReceiver, body: bytes) -> None:
    await service.request("POST", "/v1/evaluations", body=body)
