"""Errors of file transfers in a sandbox, in place of `gangline.domain.errors`, which needs packages."""

from __future__ import annotations

__all__ = ["InvalidRequest", "LimitExceeded", "NotFound"]


class InvalidRequest(Exception):
    """The path is a link, no regular file, or outside the sandbox."""


class LimitExceeded(Exception):
    """The file is too large."""

    def __init__(self, message: str, *, limit_bytes: int) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes


class NotFound(Exception):
    """There is no such file."""
