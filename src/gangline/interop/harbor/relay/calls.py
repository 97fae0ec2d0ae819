"""Answers one of an agent's calls: by its session on a node, piece by piece as it is sampled.

A node that does not answer, because it restarts, is asked again with the same idempotency key, as long as nothing was
sent on. An answer is read to its end even if nobody listens any more, so that the node keeps it for the agent's repeat.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from io import BytesIO

import aiohttp
from yarl import URL

from gangline.domain.errors import GanglineError, ServerUnavailable
from gangline.interop.harbor.relay.connection import RelayLink
from gangline.interop.harbor.relay.protocol import (
    MAX_HEADERS,
    MAX_MESSAGE_CHARS,
    AnswerEnd,
    AnswerFailed,
    AnswerPiece,
    AnswerStart,
    RelayedCall,
)
from gangline.interop.harbor.relay.rollouts import AskedCall, RelayedRollout, RolloutBook, SessionAddress

log = logging.getLogger("gangline.harbor")

_APART_S = 0.02
"""Pause between two pieces: the relay gives up a call with 256 unread ones, and a burst comes faster than it reads."""
_KEY = "idempotency-key"
_HOP = frozenset({"content-length", "transfer-encoding", "connection", "keep-alive", "date", "server"})


class CallAnswers:
    """sessions: finds a rollout's session, and opens it at its first call; raises GanglineError.

    http: without credentials; closed by its owner. patience_s: how long a node may be away.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        book: RolloutBook,
        sessions: Callable[[str], Awaitable[tuple[RelayedRollout, SessionAddress]]],
        *,
        patience_s: float = 300.0,
        pause_s: float = 0.5,
        apart_s: float = _APART_S,
    ) -> None:
        self._http = http
        self._book = book
        self._sessions = sessions
        self._patience_s = patience_s
        self._pause_s = pause_s
        self._apart_s = apart_s

    async def answer(self, call: RelayedCall, link: RelayLink) -> None:
        """Raises nothing but cancellation, with which the call is given up."""
        try:
            rollout, address = await self._sessions(call.rollout_id)
            await self._answered(call, rollout, address, link)
        except GanglineError as error:
            log.warning("harbor.call_failed rollout=%s code=%s message=%s", call.rollout_id, error.code, error.message)
            await self._fail(call, link, error.code, error.message)
        except Exception as error:  # the boundary: other calls go on
            log.exception("harbor.call_crashed rollout=%s", call.rollout_id)
            await self._fail(call, link, "internal_error", f"{type(error).__name__}: {error}")

    async def _answered(
        self, call: RelayedCall, rollout: RelayedRollout, address: SessionAddress, link: RelayLink
    ) -> None:
        """Raises: ServerUnavailable, StoreError."""
        own_key = next((value for name, value in call.headers if name.lower() == _KEY), None)
        one = rollout.ask(call.digest, link, own_key=own_key, new_key=f"harbor-{call.request_id}")
        was_heard = False
        try:
            await self._book.save(rollout)
            one.sent_ns = await self._forward(call, _headers(call, address, one.asked), address, link)
            was_heard = await link.is_heard()
        finally:
            rollout.close(one, was_heard=was_heard)
        await self._book.save(rollout)

    async def _forward(
        self, call: RelayedCall, headers: list[tuple[str, str]], address: SessionAddress, link: RelayLink
    ) -> int:
        """Returns when the end was sent, 0 if it was not.

        Raises: ServerUnavailable if the node does not answer, or breaks off.
        """
        url, deadline = URL(address.url + call.target, encoded=True), time.monotonic() + self._patience_s
        while True:
            has_begun = False
            try:
                async with self._http.request(
                    call.method, url, data=BytesIO(call.body) if call.body else None, headers=headers,
                    allow_redirects=False,
                ) as reply:  # fmt: skip
                    has_begun = True
                    return await self._pass_on(call.request_id, reply, link)
            except (aiohttp.ClientError, TimeoutError) as error:
                why = str(error) or type(error).__name__
                if has_begun:
                    raise ServerUnavailable(f"the node at {address.url} broke off its answer ({why}).") from error
                if time.monotonic() > deadline:
                    raise ServerUnavailable(f"the node at {address.url} does not answer ({why}).") from error
            await asyncio.sleep(self._pause_s)

    async def _pass_on(self, request_id: str, reply: aiohttp.ClientResponse, link: RelayLink) -> int:
        """Read the whole answer, and send it on while the relay takes it. Returns when the end was sent."""
        named = [(name.lower(), value) for name, value in reply.headers.items()]
        kept = [(name, value) for name, value in named if name not in _HOP]
        await link.send(AnswerStart(request_id=request_id, status=reply.status, headers=kept[:MAX_HEADERS]))
        while piece := await reply.content.readany():
            if await link.send(AnswerPiece(request_id=request_id, body=piece)) and not reply.content.at_eof():
                await asyncio.sleep(self._apart_s)
        return await link.send(AnswerEnd(request_id=request_id))

    async def _fail(self, call: RelayedCall, link: RelayLink, code: str, message: str) -> None:
        await link.send(AnswerFailed(request_id=call.request_id, code=code, message=message[:MAX_MESSAGE_CHARS]))


def _headers(call: RelayedCall, address: SessionAddress, asked: AskedCall) -> list[tuple[str, str]]:
    """The agent's, with the session's key for every dialect: an agent of Google's may name the relay's in its query."""
    ours = {"authorization": f"Bearer {address.api_key}", "x-goog-api-key": address.api_key, _KEY: asked.key}
    theirs = [(name, value) for name, value in call.headers if name.lower() not in (*ours, "expect")]
    return [*theirs, *ours.items()]
