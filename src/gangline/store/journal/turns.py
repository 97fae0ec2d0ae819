"""Records of running sessions, stored off their nodes: `{session}/{fence}.turns`, a file of frames per lease.

They survive the node that sent them, and are deleted once the session has a result. All methods block and raise
StoreError, DiskFull if there is no space, and InvalidRequest if an id is invalid.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import msgspec

from gangline.domain.errors import StoreError
from gangline.domain.ids import validated_id
from gangline.domain.session import KeptTurns, Turns
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.machine.durable import disk_full_error, make_folder
from gangline.store.journal.entries import Appended, FrameWriter, Unframed, read_frames

log = logging.getLogger("gangline.server")

TURNS_FOLDER = ".turns"
"""Name of the folder among results, which no id can equal: ids never begin with a dot."""
_MARKER = b"gl-turns"
_SUFFIX = ".turns"


class TurnStore:
    """One folder; see `TurnRecords` of the server. Several servers may share it, because only one at a time receives a
    lease's records."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def append(self, turns: Turns) -> None:
        path = self._path(turns.session_id, turns.fence)
        frame = Unframed(turns.first, turns.fence & 0xFFFFFFFF, encode_msgpack(turns.calls))
        try:
            make_folder(path.parent)
            writer = FrameWriter(path, _MARKER)
            try:
                writer.append([frame])
            finally:
                writer.close()
        except OSError as error:
            raise _explained(error) from error

    def latest(self, session_id: str, before: int) -> KeptTurns:
        found = [self._read(path) for path in self._files(session_id) if int(path.stem) < before]
        return max(found, key=lambda one: (len(one.completions), one.fence), default=KeptTurns())

    def forget(self, session_id: str) -> None:
        try:
            shutil.rmtree(self._folder / validated_id(session_id, "session_id"))
        except FileNotFoundError:
            return
        except OSError as error:
            raise _explained(error) from error

    def sessions(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir()) if self._folder.is_dir() else []

    def _files(self, session_id: str) -> Iterable[Path]:
        folder = self._folder / validated_id(session_id, "session_id")
        return folder.glob(f"*{_SUFFIX}") if folder.is_dir() else ()

    def _read(self, path: Path) -> KeptTurns:
        """An intact beginning, without holes."""
        calls: list[Appended] = []
        try:
            with path.open("rb") as file:
                for frame in read_frames(file, path.stat().st_size, _MARKER):
                    if frame.number > len(calls):
                        break
                    calls[frame.number :] = decode_msgpack(frame.payload, tuple[Appended, ...])
        except msgspec.MsgspecError as error:
            log.error("turns.unreadable file=%s message=%s", path, error)
        except OSError as error:
            raise _explained(error) from error
        return KeptTurns(fence=int(path.stem), completions=tuple(chain.from_iterable(call.whole() for call in calls)))

    def _path(self, session_id: str, fence: int) -> Path:
        return self._folder / validated_id(session_id, "session_id") / f"{int(fence)}{_SUFFIX}"


def _explained(error: OSError) -> StoreError:
    return disk_full_error(error, "the records of turns") or StoreError(f"records of turns cannot be kept: {error}")
