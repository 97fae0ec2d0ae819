"""The log of control actions: caller, action, time and response of each, and the refused requests.

One JSON line per action in `actions.jsonl`, written before the action is answered. Refusals go to `refused.jsonl`, so
that a flood of refused requests cannot push actions out. A full file is rotated and the oldest is removed. It stores no
bodies, and only a digest of the token, enough to distinguish tokens.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from gangline.machine.private import make_private_folder
from gangline.wire.http.routes import REFUSED, Action

log = logging.getLogger("gangline.actions")

MAX_FILE_BYTES = 16 * 1024**2
MAX_FILES = 8
_MAX_TEXT = 400


class ActionLog:
    """Appends to files in `folder`. Methods block, can be called from any thread, and never raise."""

    def __init__(
        self, folder: Path, *, where: str, max_file_bytes: int = MAX_FILE_BYTES, max_files: int = MAX_FILES
    ) -> None:
        self.where = where
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files
        self._lock = threading.Lock()

    def write(self, action: Action) -> None:
        """A failure to write is logged in the service's own log, and does not stop the action."""
        name = "refused" if action.status in REFUSED else "actions"
        line = msgspec.json.encode(_bounded(action)) + b"\n"
        try:
            with self._lock:
                self._append(name, line)
        except OSError as error:
            log.error("actions.not_written message=%s action=%s", error, line.decode(errors="replace").rstrip())

    def _append(self, name: str, line: bytes) -> None:
        make_private_folder(self._folder)
        path = self._folder / f"{name}.jsonl"
        with suppress(FileNotFoundError):
            if path.stat().st_size + len(line) > self._max_file_bytes:
                self._set_aside(name)
        with closing(_Descriptor(path)) as opened:
            os.write(opened.number, line)  # one write in append mode: lines never interleave

    def _set_aside(self, name: str) -> None:
        for age in range(self._max_files - 1, 0, -1):
            younger = self._folder / (f"{name}.{age - 1}.jsonl" if age > 1 else f"{name}.jsonl")
            with suppress(FileNotFoundError):
                os.replace(younger, self._folder / f"{name}.{age}.jsonl")


class _Descriptor:
    """Descriptor of a file to append to, readable by its owner only."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self) -> None:
        os.close(self.number)


def _bounded(action: Action) -> Action:
    """Bounds texts chosen by untrusted callers."""
    texts = {name: getattr(action, name) for name in ("path", "subject", "forwarded_for")}
    cut = {name: text[:_MAX_TEXT].encode(errors="replace").decode() for name, text in texts.items() if text is not None}
    return msgspec.structs.replace(action, **cut)


def read_actions(folders: Iterable[Path], *, refused: bool = False) -> list[Action]:
    """All actions in these folders, oldest first; a line cut off by a crash is left out."""
    name = "refused" if refused else "actions"
    found: list[Action] = []
    for folder in folders:
        for path in (*folder.glob(f"{name}.jsonl"), *folder.glob(f"{name}.[0-9]*.jsonl")):
            for line in path.read_bytes().splitlines():
                with suppress(msgspec.MsgspecError):
                    found.append(msgspec.json.decode(line, type=Action))
    return sorted(found, key=lambda action: action.at)
