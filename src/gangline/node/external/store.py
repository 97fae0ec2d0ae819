"""The files of sessions that callers opened: a state for each (0600, no key in clear), and its result once
finalized."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Literal

import msgspec

from gangline.domain.errors import NotFound, StoreError
from gangline.domain.node_views import Claim
from gangline.domain.session import SessionResult
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.machine.durable import disk_full_error, remove_unfinished, write_whole
from gangline.machine.private import make_private_folder

log = logging.getLogger("gangline.external")


class ExternalState(msgspec.Struct, frozen=True, kw_only=True):
    """The state that outlives the process."""

    session_id: str
    key_digest: str
    """SHA-256 of the key, in hexadecimal."""
    request: dict[str, Any]
    """The `SessionRequest`, as JSON data."""
    model: str
    created_at: float
    status: Literal["open", "completed", "finalized", "aborted"] = "open"
    claim: Claim | None = None
    ended_at: float = 0.0
    """0.0 until it has ended."""


class ExternalStore:
    """`FOLDER/SESSION.json` and `FOLDER/SESSION.msgpack`. Session ids must be validated by the caller."""

    def __init__(self, folder: Path) -> None:
        make_private_folder(folder)
        remove_unfinished(folder)
        self._folder = folder

    def load_all(self) -> list[ExternalState]:
        """Returns all states. Blocking. A file that cannot be read is logged and kept."""
        states: list[ExternalState] = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                states.append(msgspec.json.decode(path.read_bytes(), type=ExternalState))
            except (OSError, msgspec.MsgspecError) as error:
                log.error("external.unreadable file=%s message=%s", path, error)
        return states

    async def save(self, state: ExternalState) -> None:
        """Durable on return. Raises: StoreError, DiskFull."""
        await asyncio.to_thread(_write, self._folder / f"{state.session_id}.json", msgspec.json.encode(state))

    async def save_result(self, result: SessionResult) -> None:
        """Durable on return. Raises: StoreError, DiskFull."""
        path = self._folder / f"{result.session_id}.msgpack"
        await asyncio.to_thread(lambda: _write(path, encode_msgpack(result)))

    async def load_result(self, session_id: str) -> SessionResult:
        """Raises: NotFound, StoreError."""
        path = self._folder / f"{session_id}.msgpack"
        try:
            return decode_msgpack(await asyncio.to_thread(path.read_bytes), SessionResult)
        except FileNotFoundError:
            raise NotFound(f"there is no result of session {session_id!r}.") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise StoreError(f"the result of session {session_id!r} cannot be read: {error}") from error

    def remove(self, session_id: str) -> None:
        """Blocking."""
        for suffix in ("json", "msgpack"):
            (self._folder / f"{session_id}.{suffix}").unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        full = disk_full_error(error, "the node's sessions")
        raise full or StoreError(f"{path.name} cannot be written: {error}") from error
