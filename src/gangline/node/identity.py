"""A random name of a node's data folder, by which the server distinguishes two nodes with the same id, and the label of
its sandboxes."""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path

from gangline.domain.errors import StoreError
from gangline.machine.durable import write_whole

_FORM = re.compile(r"[0-9a-f]{32}")


def node_identity(folder: Path) -> str:
    """Returns the folder's name, made on first use. Blocking; call with the folder's lock held. Raises: StoreError."""
    path = folder / "identity"
    try:
        kept = path.read_text(errors="replace").strip() if path.exists() else ""
        if not _FORM.fullmatch(kept):
            kept = secrets.token_hex(16)
            write_whole(path, kept.encode())
    except OSError as error:
        raise StoreError(f"{path} cannot be read or written: {error.strerror}. Check the data folder.") from error
    return kept


def owner_of(folder: Path) -> str:
    """Returns the label of the node's sandboxes, which stays the same over restarts."""
    return f"gl{hashlib.sha256(str(folder).encode()).hexdigest()[:10]}"
