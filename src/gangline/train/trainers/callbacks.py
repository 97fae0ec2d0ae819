"""Receives callbacks for a trainer: submits tasks with its own callback address and is called when they end.

`receiving` listens and yields a client that collectors use instead of `ServerClient`. A callback is accepted only with
a valid signature. The group's results are then fetched and stored in a folder before the callback is acknowledged.
Duplicate callbacks change nothing. A callback's content is never used as a result: results come only from the server. A
lost callback costs time but no group, because the server is also polled occasionally.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from gangline.domain.errors import GanglineError, InvalidRequest, LimitExceeded, ServerUnavailable, StoreError
from gangline.domain.ids import validated_id
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.domain.views import Submitted, TaskView
from gangline.machine.durable import remove_unfinished, write_whole
from gangline.machine.private import make_private_folder
from gangline.wire.client.server import ServerClient
from gangline.wire.http.listening import listening, read_body

_log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 16 * 1024**2
_PATH = "/callback/task_result"


class _Callback(msgspec.Struct):
    """The fields read from a callback's body."""

    task_id: str


class CallbackClient:
    """A `RolloutClient` that receives callbacks. Created by `receiving`."""

    def __init__(
        self, service: ServerClient, folder: Path, *, key: str | None, secret: str | None, recheck_s: float
    ) -> None:
        make_private_folder(folder)
        remove_unfinished(folder)
        self._service = service
        self._folder = folder
        self._key = key
        self._callback = {} if secret is None else {"callback_secret": secret}
        self._recheck_s = recheck_s
        self._arrived: dict[str, asyncio.Event] = {}
        self._storing: dict[str, asyncio.Task[None]] = {}

    @property
    def url(self) -> str:
        """The callback address of tasks."""
        return self._callback["callback_url"]

    def listens_at(self, url: str) -> None:
        """Set the callback address of tasks submitted from now on."""
        self._callback["callback_url"] = url

    # Methods for collectors.

    async def submit(self, task: TaskRequest | Mapping[str, Any]) -> Submitted:
        """Raises: as `ServerClient.submit`; Conflict if the task exists with another callback address."""
        if isinstance(task, TaskRequest):
            return await self._service.submit(task.model_copy(update=self._callback))
        return await self._service.submit({**task, **self._callback})

    async def wait(self, task_id: str) -> TaskView:
        """The task after it ended. Raises: NotFound."""
        arrived = self._arrived.setdefault(task_id, asyncio.Event())
        try:
            while not self._path(task_id).exists():
                # The callback may have been lost with the folder, or the trainer was away for longer than callbacks are
                # retried.
                with contextlib.suppress(ServerUnavailable, StoreError):
                    if (task := await self._service.task(task_id)).ended:
                        return task
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._recheck_s):
                        await arrived.wait()
            return await self._service.wait(task_id)
        finally:
            self._arrived.pop(task_id, None)

    async def result(self, task_id: str) -> list[SessionResult]:
        """The stored result, or the server's. Raises: as `ServerClient.result`."""
        path = self._path(task_id)
        if path.exists():
            return decode_msgpack(await asyncio.to_thread(path.read_bytes), list[SessionResult])
        return await self._service.result(task_id)

    async def cancel(self, task_id: str) -> TaskView:
        """Raises: NotFound."""
        return await self._service.cancel(task_id)

    def forget(self, task_id: str) -> None:
        """Remove a task's stored results. The server still has them."""
        self._path(task_id).unlink(missing_ok=True)

    # Handlers for the server's callbacks.

    async def take(self, request: web.Request) -> web.Response:
        """Handles a callback: 204 once its group is stored on disk, otherwise an error, after which the server
        retries.
        """
        try:
            body = await read_body(request, _MAX_BODY_BYTES)
            if not self._is_signed(body, request.headers.get("X-Gangline-Signature", "")):
                return web.Response(status=401, text="the signature is not of this body and key.")
            task_id = validated_id(msgspec.json.decode(body, type=_Callback).task_id, "task_id")
        except LimitExceeded as error:
            return web.Response(status=413, text=str(error))
        except (msgspec.MsgspecError, InvalidRequest) as error:
            return web.Response(status=400, text=f"this is not a callback: {error}")
        try:
            await self._store_once(task_id)
        except (GanglineError, OSError) as error:
            _log.warning("callback.not_stored task=%s error=%s", task_id, error)
            return web.Response(status=503, text=str(error))
        return web.Response(status=204)

    def _is_signed(self, body: bytes, given: str) -> bool:
        if self._key is None:
            return True
        expected = "sha256=" + hmac.new(self._key.encode(), body, hashlib.sha256).hexdigest()
        return hmac.compare_digest(expected.encode(), given.encode())

    async def _store_once(self, task_id: str) -> None:
        """A sender that gives up and retries joins the work in progress."""
        if self._path(task_id).exists():
            return
        work = self._storing.get(task_id)
        if work is None:
            work = self._storing[task_id] = asyncio.create_task(self._store(task_id))
            work.add_done_callback(lambda work: self._stored(task_id, work))
        await asyncio.shield(work)

    async def _store(self, task_id: str) -> None:
        results = await self._service.result(task_id)
        await asyncio.to_thread(write_whole, self._path(task_id), encode_msgpack(results))
        if task_id in self._arrived:
            self._arrived[task_id].set()

    def _stored(self, task_id: str, work: asyncio.Task[None]) -> None:
        self._storing.pop(task_id, None)
        if not work.cancelled():
            work.exception()  # the sender gets it, if it is still connected

    async def stop(self) -> None:
        """Finish pending writes; idempotent."""
        works = list(self._storing.values())
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    def _path(self, task_id: str) -> Path:
        return self._folder / f"{validated_id(task_id, 'task_id')}.msgpack"


@asynccontextmanager
async def receiving(
    service: ServerClient,
    folder: Path,
    *,
    key: str | None,
    secret: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    public_url: str | None = None,
    recheck_s: float = 300.0,
) -> AsyncGenerator[CallbackClient]:
    """Listen for callbacks inside the block.

    folder: where groups are kept until `forget`. key: the key that signs callbacks, either the control token or the
    server's secret named `secret`; None if the server has no token. port, public_url: set both to fixed values if tasks
    must be recognised after a restart, because the address is part of the task. recheck_s: seconds between queries
    about a task without a callback. Raises: PortUnavailable.
    """
    client = CallbackClient(service, folder, key=key, secret=secret, recheck_s=recheck_s)
    app = web.Application()
    app.router.add_post(_PATH, client.take)
    async with listening(app, shutdown_s=2.0, host=host, port=port) as (_, bound_port):
        client.listens_at((public_url or f"http://{host}:{bound_port}").rstrip("/") + _PATH)
        try:
            yield client
        finally:
            await client.stop()
