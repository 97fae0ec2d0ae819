"""Stores results reported by nodes on disk and in the database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gangline.domain.errors import Conflict
from gangline.domain.session import SessionResult
from gangline.domain.tokens import decode_msgpack
from gangline.domain.views import ResultReceipt
from gangline.store.results.files import Results

_NUM_THREADS = 4
"""One waits for the database; the others decode and write files."""


class Reports:
    """Stores results in its own threads: hundreds of them may wait for the single writer, and must not delay other
    work. Must be closed.
    """

    def __init__(
        self,
        results: Results,
        count: Callable[[SessionResult, Callable[[], object], int], ResultReceipt],
        on_stored: Callable[[SessionResult], None] | None,
    ) -> None:
        """count: records a result of this many bytes in the database and calls the function that keeps its files;
        blocks. on_stored: called with each accepted result, in its thread.
        """
        self._results = results
        self._count = count
        self._on_stored = on_stored
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="store-reports")

    async def take(self, session_id: str, data: bytes) -> ResultReceipt:
        """Store a node's result (MessagePack of a SessionResult), then record it.

        Raises: msgspec.ValidationError, Conflict, NotFound, LeaseLost, StoreError, DiskFull.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._taken, session_id, data)

    def _taken(self, session_id: str, data: bytes) -> ResultReceipt:
        # On one thread, so that a disconnecting caller leaves nothing half-done.
        result = decode_msgpack(data, SessionResult)
        if result.session_id != session_id:
            raise Conflict(f"the result is of session {result.session_id!r}, it was sent to {session_id!r}.")
        staged = self._results.stage(result, data)
        try:
            receipt = self._count(result, staged.keep, len(data))
        finally:
            staged.discard()
        if self._on_stored is not None:
            self._on_stored(result)
        return receipt

    def close(self) -> None:
        """Blocks until no result is being stored. Later ones are refused."""
        self._threads.shutdown()
