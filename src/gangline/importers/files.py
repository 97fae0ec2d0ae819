"""Files of a task's folder, as they are written in JSON."""

from __future__ import annotations

import base64
import stat
from pathlib import Path
from typing import Any

from gangline.domain.errors import InvalidRequest

__all__ = ["hidden_files", "read_text", "written", "written_folder"]


def read_text(path: Path) -> str:
    """Raises: InvalidRequest."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error


def written(path: Path, *, mode: int | None = None) -> dict[str, Any]:
    """`content`, `encoding` and `mode` of a file, without default values. Raises: InvalidRequest for a link."""
    if path.is_symlink() or not path.is_file():
        raise InvalidRequest(f"{path} is a link or no regular file: only files can be sent along.")
    data = path.read_bytes()
    runs = bool(path.stat().st_mode & stat.S_IXUSR)
    given: dict[str, Any] = {"mode": mode if mode is not None else 0o755 if runs else 0o644}
    try:
        given["content"] = data.decode()
    except UnicodeDecodeError:
        given |= {"content": base64.b64encode(data).decode(), "encoding": "base64"}
    return given


def written_folder(folder: Path, inside: str) -> dict[str, dict[str, Any]]:
    """Path inside a runtime -> file, for every file below `folder`. Raises: InvalidRequest for a link."""
    found = sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    return {f"{inside}/{path.relative_to(folder).as_posix()}": written(path) for path in found}


def hidden_files(files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """As evaluator `script` takes them: plain text is only its content."""
    return {
        path: file["content"] if set(file) == {"content", "mode"} and file["mode"] == 0o644 else file
        for path, file in files.items()
    }
