"""The supervisor behind `gangline up` and `gangline demo`: engine, server and nodes as children of one process.

- Order: all start at once; a node waits for the addresses of engine and server. Nodes end first, so that they can
  return their sessions, then server and engine one by one.
- A child that dies is restarted on the same port, with growing delays. A child that keeps dying ends the service. A
  drained node does not count as dead.
- Every exit stops every child: an error, a cancellation, `hurry` (at once). After a `kill -9` of this process the
  kernel signals the children (see `serving.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from itertools import groupby

from gangline.cli.processes.child import Child
from gangline.cli.processes.serving import GRACE_S
from gangline.domain.errors import GanglineError, NodeError

_log = logging.getLogger("gangline.up")

_WAITED_FOR = {
    "node": "it ends its sessions and gives them back",
    "server": "it answers what it has begun",
    "engine": "it frees its model",
}
_SAY_EVERY_S = 10.0
_LOOK_AT_LOGS_S = 60.0
_QUICK_LIFE_S = 20.0
_MAX_QUICK_DEATHS = 5
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0


class Supervisor:
    """Owns children. Children of one `start` start together, and end in reverse order."""

    def __init__(
        self, *, on_change: Callable[[], None] = lambda: None, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """`say`: called with messages for people while children start."""
        self._children: list[Child] = []
        self._hurry = asyncio.Event()
        self._on_change = on_change
        self._say = say

    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in self._children}

    async def start(self, *children: Child) -> None:
        """Start children together. Raises: the first error of any of them."""
        self.take(*children)
        async with _first_error(), asyncio.TaskGroup() as group:
            for child in children:
                group.create_task(self._start(child))

    async def _start(self, child: Child) -> None:
        starting = asyncio.ensure_future(child.start())
        try:
            while not (await asyncio.wait({starting}, timeout=_SAY_EVERY_S))[0]:
                if child.is_waiting:
                    continue
                last = child.log_tail().rpartition("\n")[2].strip()
                self._say(f"Still starting the {child.name}, {child.age_s():.0f} s. {child.log_path.name}: {last}")
        except asyncio.CancelledError:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            raise
        await starting
        self._say(f"The {child.name} is ready after {child.age_s():.1f} s.")

    def take(self, *children: Child) -> None:
        """Own children that are already started."""
        self._children += children

    async def keep(self) -> None:
        """Keep every child running until cancelled. Raises: NodeError when a child keeps dying."""
        async with _first_error(), asyncio.TaskGroup() as group:
            keeping = [group.create_task(self._keep(child)) for child in self._children]
            bounding = group.create_task(self._bound_logs())
            for one in keeping:
                await one
            bounding.cancel()

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_AT_LOGS_S)
            for child in self._children:
                try:
                    await asyncio.to_thread(child.bound_log)
                except OSError as error:  # a full disk has worse effects than a growing log
                    _log.warning("child.log_not_bounded log=%s message=%s", child.log_path, error)

    async def _keep(self, child: Child) -> None:
        quick_deaths = 0
        while True:
            how = await child.wait()
            if child.is_done:
                _log.info("child.done child=%s", child.name)
                return
            quick_deaths = quick_deaths + 1 if child.age_s() < _QUICK_LIFE_S else 1
            if quick_deaths >= _MAX_QUICK_DEATHS:
                raise NodeError(
                    f"giving up: the {child.name} {how}, {quick_deaths} times within {_QUICK_LIFE_S:.0f} s of a start. "
                    f"The end of {child.log_path}:\n{child.log_tail()}"
                )
            _log.warning("child.died child=%s pid=%d how=%s; starting it again", child.name, child.pid, how)
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (quick_deaths - 1), _LONGEST_PAUSE_S))
            try:
                await child.start()
            except GanglineError as error:
                _log.error("child.start_failed child=%s message=%s", child.name, error.message)
                continue
            _log.info("child.restarted child=%s pid=%d url=%s", child.name, child.pid, child.url)
            self._on_change()

    def hurry(self) -> None:
        """Kill running processes, at once or as soon as `stop` begins."""
        self._hurry.set()

    async def stop(self, say: Callable[[str], None] = lambda _: None) -> list[str]:
        """End every child, last started first, all nodes at once. Idempotent. Must not be cancelled half-way.

        say: called with a message for people while a child is awaited. Returns the names of children that had to be
        killed and could not clean up.
        """
        for _, some in groupby(reversed(self._children), lambda child: child.kind):
            await asyncio.gather(*(self._stop(child, say) for child in some))
        return [child.name for child in self._children if not child.ended_by_itself]

    async def _stop(self, child: Child, say: Callable[[str], None]) -> None:
        if child.is_running and not self._hurry.is_set():
            say(f"Waiting for the {child.name} ({_WAITED_FOR.get(child.kind, 'to end')}).")
        child.terminate()
        ended = asyncio.ensure_future(child.wait())
        hurried = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({ended, hurried}, timeout=GRACE_S + 2, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not ended.done():
            _log.warning("child.killed child=%s pid=%d: it did not end in time", child.name, child.pid)
            child.kill()
        await ended


@asynccontextmanager
async def _first_error() -> AsyncGenerator[None]:
    """Raises only the first error of a group: the other members were cancelled because of it."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
