"""Results on their way to the server: on the disk before the first try, gone from it only when the server has them.

A node that dies between finishing a session and reporting it reports it after its restart. A server that is down, or
whose disk is full, is asked again until it answers. A result that comes too late (its lease was lost) stays
in `refused/`. So does one that the server does not take, such as one that is too large: the server hears of an attempt
that failed for that reason, since a session of which it hears nothing would be leased again.
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
        """Returns when the server has stored the result, or has said that it wants it no more.

        Raises only what nobody expects, such as an error for the result of an attempt that failed so.
        """
        try:
            await self._deliver(result)
        except BaseException as error:
            if not is_fault(error):
                raise
            await self._deliver(_undelivered(result, error))

    async def _deliver(self, result: SessionResult) -> None:
        """Raises: what its encoding does; GanglineError when the server does not take it."""
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
        """Attempts whose finished results an earlier life of this node did not deliver."""
        return [self._key(path) for path in sorted(self._folder.glob("*.msgpack"))]

    async def deliver_leftover(self, key: AttemptKey) -> None:
        path = self._path(key)
        data = await asyncio.to_thread(path.read_bytes)
        result = decode_msgpack(data, SessionResult)
        try:
            await self._post(result, data, path)  # first: its lease runs out
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
            except (Unauthorized, ForeignRequest) as error:  # that is not about the result
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
        except (StoreError, OSError) as error:  # then the node's next life delivers it again, which changes nothing
            log.error("result.not_forgotten file=%s message=%s", path, error)


def _undelivered(result: SessionResult, error: BaseException) -> SessionResult:
    """The attempt is not tried again, for it would most likely leave such a result again."""
    found = failure_of(error, result.session_id)
    log.error("result.not_delivered session=%s attempt=%d message=%s", result.session_id, result.attempt, found.message)
    message = f"the attempt ended as {result.outcome}, but its result could not be delivered: {found.message}"
    failure = Failure(boundary="node", code="result_not_delivered", message=message, retryable=False)
    return unfinished(result, result.node_id, failure, held_out=result.held_out)


def _set_aside(path: Path) -> None:
    """A late result belongs to no session any more, but its tokens are not thrown away: the newest are kept.

    The last one is kept however large it is: one that is too large for the server lies nowhere else.
    """
    refused = path.parent / "refused"
    make_private_folder(refused)
    before = refused / path.name
    if before.exists() and path.exists() and before.stat().st_size > path.stat().st_size:
        path.unlink()  # it only says that the one before could not be delivered
    elif path.exists():
        path.replace(before)
    left_bytes = _MAX_REFUSED_BYTES
    with _PRUNING:
        for place, kept in enumerate(sorted(refused.iterdir(), key=lambda one: one.stat().st_mtime_ns, reverse=True)):
            left_bytes -= kept.stat().st_size
            if left_bytes < 0 and place:
                kept.unlink()


def _saved(path: Path, result: SessionResult) -> bytes:
    """The result's MessagePack, on the disk if there is room."""
    data = encode_msgpack(result)
    try:
        write_whole(path, data)
    except OSError as error:  # the server may still have room for it; the journal has the completions
        log.error("result.not_saved_locally session=%s message=%s", result.session_id, error)
    return data
