"""Session results as files: `{task}/{session}/attempt-{n}.msgpack`.

A result is either whole or absent: it is written aside and synced (`stage`), then renamed into place (`keep`), so that
the slow part happens before the transaction that announces it, and the rename inside. Failed attempts are kept.
Other places for results (`artifacts.py`) do the same as `ResultStore` does: the Protocol `Results`. Those that nodes
report come through `Reports`, to disk and database.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from gangline.domain.errors import Conflict, NotFound, StoreError
from gangline.domain.ids import validated_id
from gangline.domain.session import SessionResult
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.domain.views import ResultReceipt
from gangline.machine.durable import disk_full_error, make_folder, sync, write_new

_NUM_THREADS = 4
"""One waits for the database; the others decode and write files."""

_INCOMING = ".incoming"  # no id begins with a dot
_ABANDONED_S = 24 * 3600.0
_ATTEMPT = re.compile(r"attempt-(\d+)\.msgpack")


class Staged(Protocol):
    """A result that does not count yet. Call `keep` or `discard`; both are idempotent."""

    def keep(self) -> object:
        """Make it the result of its attempt. Durable on return."""
        ...

    def discard(self) -> None: ...


class Results(Protocol):
    """A store of results. Methods block. Raises (all): DiskFull, StoreError; InvalidRequest if an id is invalid."""

    def prepare(self) -> None:
        """Prepare the folder for writing, and remove files that a crash left incomplete."""
        ...

    def stage(self, result: SessionResult, data: bytes | None = None) -> Staged:
        """Write a result, durable on return. data: its MessagePack, if the caller has it already."""
        ...

    def read_bytes(self, task_id: str, session_id: str, attempt: int) -> bytes:
        """The MessagePack of one attempt's result. Raises: NotFound."""
        ...

    def read(self, task_id: str, session_id: str, attempt: int) -> SessionResult:
        """Raises: NotFound."""
        ...

    def locate(self, task_id: str, session_id: str, attempt: int) -> tuple[str, int]:
        """(URL, bytes) of one attempt's result. Raises: NotFound."""
        ...

    def remove(self, task_id: str) -> None:
        """Delete all results of a task, if there are any."""
        ...


class StagedResult:
    """Bytes on disk that are not a result yet. Call `keep` or `discard`; both are idempotent."""

    def __init__(self, staged: Path, final: Path) -> None:
        self._staged = staged
        self._kept = False
        self.path = final

    def keep(self) -> Path:
        """Make it the result of its attempt. Durable on return."""
        if self._kept:
            return self.path
        try:
            make_folder(self.path.parent)
            self._staged.replace(self.path)
            sync(self.path.parent)
        except OSError as error:
            raise _explained(error) from error
        self._kept = True
        return self.path

    def discard(self) -> None:
        self._staged.unlink(missing_ok=True)


class ResultStore:
    """Results under one folder. Ids are validated before they are used in a path.

    write: writes a new file durably; raises OSError. shared: whether other servers write to the folder too. Raises (all
    methods): DiskFull, StoreError.
    """

    def __init__(self, folder: Path, *, write: Callable[[Path, bytes], None] = write_new, shared: bool = False) -> None:
        self._folder = folder
        self._write = write
        self._shared = shared

    def prepare(self) -> None:
        """Create the folder and remove files that a crash left incomplete. In a shared folder only old files are
        removed.
        """
        before = time.time() - _ABANDONED_S if self._shared else float("inf")
        try:
            make_folder(self._folder / _INCOMING)
            for leftover in (self._folder / _INCOMING).iterdir():
                if leftover.stat().st_mtime < before:
                    leftover.unlink(missing_ok=True)
        except OSError as error:
            raise _explained(error) from error

    def stage(self, result: SessionResult, data: bytes | None = None) -> StagedResult:
        """Write to a temporary file and sync. data: the result's MessagePack, if the caller has it already."""
        final = self.path(result.task_id, result.session_id, result.attempt)
        staged = self._folder / _INCOMING / secrets.token_hex(8)
        try:
            make_folder(staged.parent)
            self._write(staged, encode_msgpack(result) if data is None else data)
        except OSError as error:
            staged.unlink(missing_ok=True)
            raise _explained(error) from error
        return StagedResult(staged, final)

    def save(self, result: SessionResult) -> Path:
        return self.stage(result).keep()

    def read_bytes(self, task_id: str, session_id: str, attempt: int) -> bytes:
        """The MessagePack of one attempt's result. Raises: NotFound."""
        try:
            return self.path(task_id, session_id, attempt).read_bytes()
        except FileNotFoundError as error:
            raise _no_result(session_id, attempt) from error

    def read(self, task_id: str, session_id: str, attempt: int) -> SessionResult:
        """Raises: NotFound."""
        return decode_msgpack(self.read_bytes(task_id, session_id, attempt), SessionResult)

    def locate(self, task_id: str, session_id: str, attempt: int) -> tuple[str, int]:
        """(URL, bytes) of one attempt's result. Raises: NotFound."""
        path = self.path(task_id, session_id, attempt)
        try:
            return path.absolute().as_uri(), path.stat().st_size
        except FileNotFoundError as error:
            raise _no_result(session_id, attempt) from error

    def remove(self, task_id: str) -> None:
        """Delete all results of a task, if there are any."""
        try:
            shutil.rmtree(self._folder / validated_id(task_id, "task_id"))
        except FileNotFoundError:
            return
        except OSError as error:
            raise _explained(error) from error

    def attempts(self, task_id: str, session_id: str) -> list[int]:
        """Attempts with a stored result, ascending."""
        folder = self.path(task_id, session_id, 1).parent
        if not folder.is_dir():
            return []
        found = (_ATTEMPT.fullmatch(path.name) for path in folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, task_id: str, session_id: str, attempt: int) -> Path:
        """Raises: InvalidRequest if an id is invalid."""
        task, session = validated_id(task_id, "task_id"), validated_id(session_id, "session_id")
        return self._folder / task / session / f"attempt-{int(attempt)}.msgpack"


def _no_result(session_id: str, attempt: int) -> NotFound:
    return NotFound(f"session {session_id} has no result of attempt {attempt}.")


def _explained(error: OSError) -> StoreError:
    return disk_full_error(error, "the results") or StoreError(f"a result could not be stored: {error}")


class Reports:
    """Stores results in its own threads: hundreds of them may wait for the single writer, and must not delay other
    work. Must be closed.
    """

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
        """Store a node's result (MessagePack of a SessionResult), then record it.

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
        """Blocks until no result is being stored. Later ones are refused."""
        self._threads.shutdown()
