"""Results that nodes report, on their way to disk and database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from gangline.domain.errors import Conflict
from gangline.domain.session import SessionResult
from gangline.domain.tokens import decode_msgpack
from gangline.domain.views import ResultReceipt
from gangline.store.results.files import Results

__all__ = ["Reports"]

_NUM_THREADS = 4
"""One waits for the database; others decode, and write files."""


class Reports:
    """Stores results in threads of its own: hundreds of them may wait for the one writer, and nobody else's work is to
    stand behind these. To be closed."""

    def __init__(
        self,
        results: Results,
        count: Callable[[SessionResult, Callable[[], object], int], ResultReceipt],
        on_stored: Sequence[Callable[[SessionResult], None]] = (),
    ) -> None:
        """
        count: lets a result of so many bytes count, in the database, and calls what keeps its files; blocks.
        on_stored: each is called with every result that counts, in its thread. May grow.
        """
        self._results = results
        self._count = count
        self._on_stored = on_stored
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="store-reports")

    async def take(self, session_id: str, data: bytes) -> ResultReceipt:
        """Store a node's result (MessagePack of a SessionResult), then let it count.

        Raises: msgspec.ValidationError, Conflict, NotFound, LeaseLost, StoreError, DiskFull.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._taken, session_id, data)

    def _taken(self, session_id: str, data: bytes) -> ResultReceipt:
        # On one thread, so that a caller who leaves half-way leaves nothing half-done.
        result = decode_msgpack(data, SessionResult)
        if result.session_id != session_id:
            raise Conflict(f"the result is of session {result.session_id!r}, it was sent to {session_id!r}.")
        staged = self._results.stage(result, data)
        try:
            receipt = self._count(result, staged.keep, len(data))
        finally:
            staged.discard()
        for hear in self._on_stored:
            hear(result)
        return receipt

    def close(self) -> None:
        """Blocks until no result is being stored. Afterwards none is taken."""
        self._threads.shutdown()
