"""Reports why a command waits for sessions, each reason once, as soon as it is known."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Protocol

from gangline.cli.terminal.views import node_state
from gangline.domain.errors import GanglineError
from gangline.domain.views import ServiceStatus

_LOOK_S = 4.0


class _Service(Protocol):
    async def status(self) -> ServiceStatus: ...


def reasons_to_wait(status: ServiceStatus) -> Iterator[str]:
    """Empty if no session is open."""
    num_queued = status.sessions.get("queued", 0)
    if not num_queued + status.sessions.get("leased", 0):
        return
    if not status.nodes and not status.tenant:
        yield f"No node has joined: start one with `gangline node`. Queued sessions: {num_queued}."
    for why, number in status.unplaced.items():
        yield f"No node can run queued sessions ({number}): {why}."
    for node in status.nodes:
        if not (state := node_state(node)).startswith("up"):
            yield f"Node {node.node_id}: {state}."


@contextlib.asynccontextmanager
async def waits_told(service: _Service, say: Callable[[str], None], *, look_s: float = _LOOK_S) -> AsyncGenerator[None]:
    """Reports within the block. say: called with one sentence for each new reason."""
    telling = asyncio.create_task(_tell(service, say, look_s))
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell(service: _Service, say: Callable[[str], None], look_s: float) -> None:
    printed = set[str]()
    while True:
        await asyncio.sleep(look_s)
        try:
            found = set(reasons_to_wait(await service.status()))
        except GanglineError as error:
            found = {f"The server gives no status: {error.message}"}
        for line in sorted(found - printed):
            say(line)
        printed = found
