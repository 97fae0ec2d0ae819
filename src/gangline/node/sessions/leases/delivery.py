"""Delivers results to the server. A result is on disk before the first try and removed only when the server has it.

A node that dies between finishing and reporting a session reports it after its restart. Delivery is retried while the
server is down or its disk is full. A result that arrives too late (its lease was lost) is kept in `refused/`. So is a
result that the server rejects, for instance because it is too large. In that case the attempt is reported as failed for
that reason, since a session without any report would be leased again.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from threading import Lock

from gangline.domain.errors import Failure, ForeignRequest, GanglineError, LeaseLost, NotFound, StoreError, Unauthorized
from gangline.domain.session import SessionResult
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.machine.durable import remove_unfinished, write_whole
from gangline.machine.event_loop import is_fault
from gangline.machine.private import make_private_folder
from gangline.node.sessions.failures import failure_of, unfinished
from gangline.node.sessions.leases.hooks import Hooks
from gangline.node.sessions.leases.rollout_server import ResultTaker
from gangline.store.journal.log import AttemptKey, Journal

log = logging.getLogger("gangline.node")

_LONGEST_WAIT_S = 10.0
_MAX_REFUSED_BYTES = 256 << 20
_PRUNING = Lock()


class Delivery:
    def __init__(self, folder: Path, server: ResultTaker, journal: Journal, hooks: Hooks | None = None) -> None:
        make_private_folder(folder)
        remove_unfinished(folder)
        self._hooks = hooks
        self._folder = folder
        self._server = server
        self._journal = journal

    async def deliver(self, result: SessionResult) -> None:
        """Return when the server has stored the result or no longer wants it.

        On an unexpected error, delivers the result of an attempt that failed with that error. Raises only if that fails
        too.
        """
        try:
            await self._deliver(result)
        except BaseException as error:
            if not is_fault(error):
                raise
            await self._deliver(_undelivered(result, error))

    async def _deliver(self, result: SessionResult) -> None:
        """Raises: encoding errors; GanglineError when the server does not accept the result."""
        path = self._path(self._of(result))
        data = await asyncio.to_thread(_saved, path, result)
        await self._run_hooks(result)
        await self._post(result, data, path)

    async def _run_hooks(self, result: SessionResult) -> None:
        if self._hooks is not None:
            await self._hooks.run(result)

    def _path(self, key: AttemptKey) -> Path:
        return self._folder / f"{key.session_id}.{key.attempt}.msgpack"

    @staticmethod
    def _of(result: SessionResult) -> AttemptKey:
        return AttemptKey(result.session_id, result.attempt)

    def leftover(self) -> list[AttemptKey]:
        """Attempts with finished results that were not delivered before the node's restart."""
        return [self._key(path) for path in sorted(self._folder.glob("*.msgpack"))]

    async def deliver_leftover(self, key: AttemptKey) -> None:
        path = self._path(key)
        data = await asyncio.to_thread(path.read_bytes)
        result = decode_msgpack(data, SessionResult)
        try:
            await self._post(result, data, path)  # before the hooks: its lease runs out
        except GanglineError as error:
            await self._deliver(_undelivered(result, error))
        await self._run_hooks(result)

    @staticmethod
    def _key(path: Path) -> AttemptKey:
        session_id, attempt = path.stem.rsplit(".", 1)
        return AttemptKey(session_id, int(attempt))

    async def _post(self, result: SessionResult, data: bytes, path: Path) -> None:
        wait_s = 0.2
        while True:
            try:
                await self._server.post_result(result, data)
                log.info("result.delivered session=%s attempt=%d", result.session_id, result.attempt)
                break
            except (LeaseLost, NotFound) as error:
                log.warning("result.refused session=%s attempt=%d message=%s", result.session_id, result.attempt, error)
                await asyncio.to_thread(_set_aside, path)
                break
            except (Unauthorized, ForeignRequest) as error:  # not about the result
                log.error("result.kept file=%s message=%s", path, error)
                return
            except GanglineError as error:
                if not error.retryable:
                    await asyncio.to_thread(_set_aside, path)
                    raise
                log.warning("result.retried session=%s in_s=%.1f message=%s", result.session_id, wait_s, error)
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, _LONGEST_WAIT_S)
        try:
            await self._journal.close_attempt(self._of(result))
            await asyncio.to_thread(path.unlink, missing_ok=True)
        except (StoreError, OSError) as error:  # it is delivered again after a restart, which has no effect
            log.error("result.not_forgotten file=%s message=%s", path, error)


def _undelivered(result: SessionResult, error: BaseException) -> SessionResult:
    """Returns the result to report instead. The attempt is not retried: it would most likely leave such a result
    again."""
    found = failure_of(error, result.session_id)
    log.error("result.not_delivered session=%s attempt=%d message=%s", result.session_id, result.attempt, found.message)
    message = f"the attempt ended as {result.outcome}, but its result could not be delivered: {found.message}"
    failure = Failure(boundary="node", code="result_not_delivered", message=message, retryable=False)
    return unfinished(result, result.node_id, failure, held_out=result.held_out)


def _set_aside(path: Path) -> None:
    """Keep a refused result: its session is over, but its tokens are still useful. Only the newest are kept.

    The last one is kept whatever its size: a result that is too large for the server exists nowhere else.
    """
    refused = path.parent / "refused"
    make_private_folder(refused)
    before = refused / path.name
    if before.exists() and path.exists() and before.stat().st_size > path.stat().st_size:
        path.unlink()  # this one only reports that the earlier one could not be delivered
    elif path.exists():
        path.replace(before)
    left_bytes = _MAX_REFUSED_BYTES
    with _PRUNING:
        for place, kept in enumerate(sorted(refused.iterdir(), key=lambda one: one.stat().st_mtime_ns, reverse=True)):
            left_bytes -= kept.stat().st_size
            if left_bytes < 0 and place:
                kept.unlink()


def _saved(path: Path, result: SessionResult) -> bytes:
    """Returns the result's MessagePack, and saves it on disk if there is room."""
    data = encode_msgpack(result)
    try:
        write_whole(path, data)
    except OSError as error:  # the server may still have room; the journal has the completions
        log.error("result.not_saved_locally session=%s message=%s", result.session_id, error)
    return data
