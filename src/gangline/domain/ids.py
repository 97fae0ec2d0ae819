"""Ids, validated before they are used in a path, a query or a log."""

from __future__ import annotations

import hashlib
import re
import secrets

from gangline.domain.errors import InvalidRequest

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""Letters, digits, `.`, `_`, `-`; at most 128 characters, no leading dot or dash, no path separators."""

RECORD_KEY = re.compile(r"[0-9a-f]{16}")
"""A reply's key in the records, part of its ids in every dialect."""

ROLE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""The name of a client's role among several, or a label of a node."""

_ID = re.compile(ID_PATTERN)
_OF_RUN = re.compile(r"(.+?)-(?:\d{6}-v\d{6}-\d{4}|\d{6,9})(?:\.(?:run|coalition).*)?")


def validated_id(value: str, what: str) -> str:
    """Returns `value`. Raises: InvalidRequest when it is not an id."""
    if not _ID.fullmatch(value):
        raise InvalidRequest(f"{what} must match {ID_PATTERN}, got {value[:140]!r}.")
    return value


def run_of(task_id: str) -> str:
    """The training run or evaluation that numbered the task: `a` for `a-000001`. Empty for other ids."""
    found = _OF_RUN.fullmatch(task_id)
    return found[1] if found else ""


def root_span_of(task_id: str) -> tuple[int, int]:
    """Ids of the trace and of the root span of a task, on every machine."""
    digest = hashlib.sha256(task_id.encode()).digest()
    return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:24]) or 1


def new_id(prefix: str) -> str:
    """Returns a new id such as `task-3f9c1a72b04d`."""
    return f"{prefix}-{secrets.token_hex(6)}"


def new_secret(prefix: str) -> str:
    """Returns a new key with 192 random bits; the prefix names its purpose."""
    return f"{prefix}-{secrets.token_urlsafe(24)}"
