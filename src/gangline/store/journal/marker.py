"""The marker of a journal's frames (see `entries`): in its own file, and at the beginning of every segment."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from gangline.domain.errors import OtherVersion
from gangline.machine.durable import write_whole
from gangline.store.journal.entries import MARKER_BYTES, read_frame

log = logging.getLogger("gangline.journal")

_NAME = "marker"


def journal_marker(folder: Path) -> bytes:
    """The journal's marker, created with a new journal. A lost marker is recovered from the segments.

    Raises: OtherVersion if there are entries but no marker of theirs; OSError.
    """
    return _found_marker(folder, keep=True)


def check_journal(folder: Path) -> None:
    """Checks a journal without changing it. Raises: OtherVersion if it cannot be opened."""
    if folder.is_dir():
        _found_marker(folder, keep=False)


def _found_marker(folder: Path, *, keep: bool) -> bytes:
    path = folder / _NAME
    kept = path.read_bytes() if path.exists() else b""
    segments = [segment for segment in sorted(folder.glob("*.log")) if segment.stat().st_size]
    found = next((marker for segment in segments if (marker := _first_of(segment)) is not None), None)
    if found is None and len(kept) != MARKER_BYTES:
        if segments:
            raise OtherVersion(
                f"the entries in {folder} cannot be read: they are of another version of Gangline, or {path} and the "
                f"beginning of every segment are lost. Move it away (mv {folder} {folder}.old): sessions that were "
                "open there run again, and calls of theirs that were not delivered are lost. Or finish them with the "
                "version that wrote them, or use another data folder."
            )
        found = secrets.token_bytes(MARKER_BYTES)
    if found is None or found == kept or not keep:
        return kept
    if segments:
        log.error("journal.marker_restored file=%s", path)
    write_whole(path, found)
    return found


def _first_of(segment: Path) -> bytes | None:
    """The bytes before the first frame, if that frame is intact."""
    with segment.open("rb") as file:
        if read_frame(file, 0, os.fstat(file.fileno()).st_size, None) is None:
            return None
        file.seek(0)
        return file.read(MARKER_BYTES)
