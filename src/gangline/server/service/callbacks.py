"""Delivers callbacks: entries of the outbox are posted until their receiver acknowledges with 2xx, or they expire."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from gangline.domain.errors import GanglineError, NotFound, StoreError
from gangline.server.service.core import CALLBACKS, EVENTS
from gangline.server.service.notifier import Notifier
from gangline.server.service.receivers import tenants_connector
from gangline.settings.machine import read_task_secret
from gangline.store.sql.outbox import Callback, Outbox, next_try_at

log = logging.getLogger("gangline.server")

_IDLE_S = 60.0
_AT_ONCE = 16


def signature(token: str, body: bytes) -> str:
    """Value of `X-Gangline-Signature`: HMAC-SHA256 of the exact body, under the task's secret or the control token."""
    return "sha256=" + hmac.new(token.encode(), body, hashlib.sha256).hexdigest()


class CallbackSender:
    """Sends callbacks.

    public_url: the server's address for receivers, used in `result_url`. forms: value of a task's `callback_form` ->
    function that makes the bodies from task id and callback URL. base_s, max_s: pause after the first failure, doubled
    after each, and its upper bound.
    """

    def __init__(
        self,
        outbox: Outbox,
        notifier: Notifier,
        *,
        public_url: str,
        forms: Mapping[str, Callable[[str, str], Awaitable[bytes]]],
        control_token: str | None,
        base_s: float = 1.0,
        max_s: float = 300.0,
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._outbox = outbox
        self._notifier = notifier
        self._public_url = public_url
        self._forms = forms
        self._token = control_token
        self._base_s = base_s
        self._max_s = max_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_the_way: set[int] = set()

    async def deliver_forever(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as http,
            aiohttp.ClientSession(
                timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), connector=tenants_connector()
            ) as guarded,
            asyncio.TaskGroup() as sending,
        ):
            with self._notifier.listen(CALLBACKS) as listener:
                while True:
                    await listener.wait(await self._send_due((http, guarded), sending))

    async def _send_due(self, clients: tuple[aiohttp.ClientSession, ...], sending: asyncio.TaskGroup) -> float:
        """Start sending due callbacks, in addition to those in flight. Returns the seconds until the next check.

        clients: of operators' callbacks, and of tenants'.
        """
        if len(self._on_the_way) >= _AT_ONCE:
            return _IDLE_S  # the next delivery wakes the sender
        database = self._outbox.database
        try:
            room, busy = _AT_ONCE - len(self._on_the_way), frozenset(self._on_the_way)
            for callback in await self._due(room, busy):
                self._on_the_way.add(callback.id)
                sending.create_task(self._deliver(clients[callback.bound], callback))
            next_at = await database.query(self._outbox.next_due_at, frozenset(self._on_the_way))
        except StoreError as error:
            log.error("callback.store_failed message=%s", error)
            return self._base_s
        return _IDLE_S if next_at is None else min(_IDLE_S, max(0.0, next_at - self._clock()))

    async def _due(self, room: int, busy: frozenset[int]) -> list[Callback]:
        database, now = self._outbox.database, self._clock()
        if not database.shared:
            return await database.query(self._outbox.due, now, room, busy)
        held_s = 2 * self._timeout_s
        return await database.run(lambda: self._outbox.take(now, room, busy, held_s=held_s))

    async def _deliver(self, http: aiohttp.ClientSession, callback: Callback) -> None:
        try:
            await self._settle(callback, await self._post(http, callback))
        except StoreError as error:  # not settled, so it is sent again; the receiver deduplicates by key
            log.error("callback.store_failed task=%s message=%s", callback.task_id, error)
            await asyncio.sleep(self._base_s)
        finally:
            self._on_the_way.discard(callback.id)
            self._notifier.notify(CALLBACKS)
            self._notifier.notify(EVENTS)

    async def _settle(self, callback: Callback, error: str | None) -> None:
        now = self._clock()
        if error is None:
            log.info("callback.delivered task=%s url=%s", callback.task_id, callback.url)
            await self._outbox.database.run(lambda: self._outbox.delivered(callback, now=now))
            return
        tries = callback.num_tries + 1
        next_at = next_try_at(tries, now=now, expires_at=callback.expires_at, base_s=self._base_s, max_s=self._max_s)
        log.warning(
            "callback.%s task=%s tries=%d url=%s error=%s",
            *("expired" if next_at is None else "failed", callback.task_id, tries, callback.url, error),
        )
        await self._outbox.database.run(lambda: self._outbox.failed(callback, now=now, next_at=next_at, error=error))

    async def _post(self, http: aiohttp.ClientSession, callback: Callback) -> str | None:
        """Returns the error, or None."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": callback.key}
        try:
            body = await self._body(callback)
            own = self._token if callback.secret is None and not callback.bound else None
            key = read_task_secret(callback.secret) if callback.secret else own
            if key:
                headers["X-Gangline-Signature"] = signature(key, body)
            async with http.post(callback.url, data=body, headers=headers, allow_redirects=False) as response:
                return None if 200 <= response.status < 300 else f"HTTP {response.status}"
        except (aiohttp.ClientError, TimeoutError, ValueError, GanglineError) as error:
            return f"{type(error).__name__}: {error}"

    async def _body(self, callback: Callback) -> bytes:
        """Raises: NotFound, StoreError if its form is unknown, or its results cannot be read."""
        kept = msgspec.json.decode(callback.body, type=dict[str, Any])
        if (form := kept.get("callback_form")) is not None:
            if form not in self._forms:
                raise NotFound(f"no part of this server makes callbacks in the form {form!r}.")
            return await self._forms[form](callback.task_id, callback.url)
        result_url = f"{self._public_url}/v1/tasks/{callback.task_id}/result"
        return msgspec.json.encode({**kept, "result_url": result_url})
