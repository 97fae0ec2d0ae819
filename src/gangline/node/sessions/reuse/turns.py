"""Sends records of model calls to the server while their sessions run: see `CaptureSpec.durable`.

Laws
- A record is sent once it is in the node's own journal, in the journal's order. No call waits for it.
- While the server does not answer, records wait in memory and are sent later.
- Records of a session whose lease is lost are no longer sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from gangline.domain.completion import Completion
from gangline.domain.errors import GanglineError
from gangline.domain.session import KeptTurns, Turns
from gangline.domain.tokens import encode_msgpack
from gangline.domain.views import TurnsReceipt
from gangline.store.journal.entries import Appended, AttemptKey

Listener = Callable[[Sequence[Completion], bytes], None]
"""Called with the completions of a call and their entry in the journal."""

log = logging.getLogger("gangline.node")

_GATHER_S = 0.2
"""Seconds during which records of many sessions are gathered into one request."""
_RETRY_S = 1.0
_MAX_SESSIONS = 64
_MAX_BYTES = 16 << 20
"""Largest request, unless a single call is larger, such as one with images or routed experts."""


class TurnKeeper(Protocol):
    """The server as a client reaches it. All methods also raise connection errors."""

    async def post_turns(self, node_id: str, turns: Sequence[Turns]) -> TurnsReceipt:
        """Durable on return. Raises: DiskFull."""
        ...

    async def kept_turns(self, session_id: str, fence: int) -> KeptTurns:
        """Returns the records of the earlier lease with the most records. `fence`: of the current lease."""
        ...

    async def begin_anew(self, node_id: str, *, session_id: str, fence: int) -> None:
        """Delete the records of earlier leases. Raises: LeaseLost."""
        ...


class _Followed:
    """One lease."""

    def __init__(self, fence: int) -> None:
        self.fence = fence
        self.num_sent = 0
        self.waiting: list[bytes] = []
        """Entries of the journal."""


class TurnSender:
    """Run `run` until cancelled."""

    def __init__(self, node_id: str, server: TurnKeeper, listeners: list[Listener] | None = None) -> None:
        """listeners: the journal's; this object is one of them while it follows an attempt."""
        self._node_id = node_id
        self._server = server
        self._followed: dict[AttemptKey, _Followed] = {}
        self._wake = asyncio.Event()
        self._listeners: list[Listener] = [] if listeners is None else listeners

    def follow(self, key: AttemptKey, fence: int, completions: Sequence[Completion] = ()) -> None:
        """Send this attempt's records from now on, and `completions`, which were recorded before a restart of the
        node."""
        if not self._followed:
            self._listeners.append(self.kept)
        self._followed[key] = _Followed(fence)
        for completion in completions:
            self.kept([completion], encode_msgpack(Appended.of([completion])))

    def leave(self, key: AttemptKey) -> None:
        """Stop following an attempt: its result contains its records. Idempotent."""
        if self._followed.pop(key, None) is not None and not self._followed:
            self._listeners.remove(self.kept)

    def kept(self, completions: Sequence[Completion], entry: bytes) -> None:
        """Queue a journalled call for sending. entry: its entry in the journal."""
        followed = self._followed.get(AttemptKey(completions[0].session_id, completions[0].attempt))
        if followed is not None:
            followed.waiting.append(entry)
            self._wake.set()

    async def latest(self, session_id: str, fence: int) -> KeptTurns:
        """Returns the server's records of a session's earlier leases. Raises: ServerUnavailable, StoreError."""
        return await self._server.kept_turns(session_id, fence)

    async def begin_anew(self, session_id: str, fence: int) -> None:
        """Have the server delete them. Raises: LeaseLost, ServerUnavailable, StoreError."""
        await self._server.begin_anew(self._node_id, session_id=session_id, fence=fence)

    async def run(self) -> None:
        is_behind = False
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(_GATHER_S)
            try:
                await self._send_all()
                is_behind = False
            except GanglineError as error:
                if not is_behind:
                    log.warning("turns.not_sent message=%s: they are sent when the server answers", error)
                is_behind = True
                self._wake.set()
                await asyncio.sleep(_RETRY_S)

    async def _send_all(self) -> None:
        """Raises: connection errors, as GanglineError."""
        while batch := list(islice(self._next(), _MAX_SESSIONS)):
            receipt = await self._server.post_turns(self._node_id, [turns for _, turns in batch])
            for key, turns in batch:
                if turns.session_id in receipt.lost:
                    self.leave(key)
                elif (followed := self._followed.get(key)) is not None and followed.fence == turns.fence:
                    del followed.waiting[: len(turns.calls)]
                    followed.num_sent += len(turns.calls)

    def _next(self) -> Iterator[tuple[AttemptKey, Turns]]:
        left_bytes = _MAX_BYTES
        for key, one in list(self._followed.items()):
            some: list[msgspec.Raw] = []
            for entry in one.waiting:
                if len(entry) > left_bytes < _MAX_BYTES:
                    break
                left_bytes -= len(entry)
                some.append(msgspec.Raw(entry))
            if some:
                yield key, Turns(session_id=key.session_id, fence=one.fence, first=one.num_sent, calls=tuple(some))
