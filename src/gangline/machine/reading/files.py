"""Reads files of a task's folder into their JSON format."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.paths import MAX_FILE_BYTES, SourcePath

_MAX_CONTEXT_FILES, _MAX_CONTEXT_BYTES = 200_000, 4 << 30
"""Limits of a folder from which an image is built; such a folder is only hashed."""
_PIECE_BYTES = 1 << 20


def own_file(path: Path) -> SourcePath:
    """A file or folder named by the user. The folders in its path may be links."""
    whole = path.absolute()
    return SourcePath.of(whole.parent) / whole.name if whole.name else SourcePath.of(whole)


def read_text(path: SourcePath, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Line ends become `\\n`. Raises: InvalidRequest."""
    data, _ = path.read(max_bytes)
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error


def written(path: SourcePath, *, mode: int | None = None) -> dict[str, Any]:
    """`content`, `encoding` and `mode` of a file, without default values. Raises: InvalidRequest for a link."""
    data, runs = path.read()
    given: dict[str, Any] = {"mode": mode if mode is not None else 0o755 if runs else 0o644}
    try:
        given["content"] = data.decode()
    except UnicodeDecodeError:
        given |= {"content": base64.b64encode(data).decode(), "encoding": "base64"}
    return given


def written_folder(folder: SourcePath, inside: str) -> dict[str, dict[str, Any]]:
    """Path inside a runtime -> file, for every file below `folder`. Raises: InvalidRequest for a link, or if a limit is
    exceeded.
    """
    found = folder.files()
    below = len(folder.parts)
    return {f"{inside}/{'/'.join(path.parts[below:])}": written(path) for path, _ in found}


def digest_of_folder(folder: SourcePath) -> str:
    """SHA-256 of the paths, modes and contents of all files. Raises: InvalidRequest for a link, or if a limit is
    exceeded.
    """
    digest = hashlib.sha256()
    below = len(folder.parts)
    for path, num_bytes in folder.files(_MAX_CONTEXT_FILES, _MAX_CONTEXT_BYTES):
        large = num_bytes > MAX_FILE_BYTES
        file = _digested(path) if large else written(SourcePath(path.root, path.parts))
        for part in ("/" + "/".join(path.parts[below:]), str(file["mode"]), file["content"]):
            digest.update(len(part).to_bytes(8, "big") + part.encode())
    return digest.hexdigest()


def _digested(path: SourcePath) -> dict[str, Any]:
    """Like `written`, for a file too large for memory: its digest replaces its content."""
    digest = hashlib.sha256()
    with path.opened(_MAX_CONTEXT_BYTES) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return {"mode": 0o644, "content": digest.hexdigest()}


def hidden_files(files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Files in the format of evaluator `script`: plain text is given as only its content."""
    return {
        path: file["content"] if set(file) == {"content", "mode"} and file["mode"] == 0o644 else file
        for path, file in files.items()
    }
