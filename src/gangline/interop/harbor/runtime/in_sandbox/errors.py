"""Errors of file transfers in a sandbox. They replace `gangline.domain.errors`, which needs third-party packages."""

from __future__ import annotations


class InvalidRequest(Exception):
    """The path is a link, not a regular file, or outside the sandbox."""


class LimitExceeded(Exception):
    """The file is too large."""

    def __init__(self, message: str, *, limit_bytes: int) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes


class NotFound(Exception):
    """The file does not exist."""
