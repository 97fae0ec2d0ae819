"""The Protocol of a place to search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

__all__ = ["Hit", "Page", "SearchProvider"]


class Hit(msgspec.Struct, frozen=True):
    """A document that was found."""

    title: str
    address: str
    """A URL, or the document's id: the argument of `page`."""
    excerpt: str


class Page(msgspec.Struct, frozen=True):
    """A document as plain text."""

    title: str
    address: str
    text: str


class SearchProvider(Protocol):
    """One place to search, open for one session."""

    async def search(self, query: str, max_results: int) -> Sequence[Hit]:
        """The best first; none where nothing fits. `query` is any text.

        Raises: ToolFailed when the query cannot be taken; ToolUnavailable when the place gives no answer.
        """
        ...

    async def page(self, address: str) -> Page:
        """Raises: ToolFailed when there is no such document, or it is no text."""
        ...

    async def close(self) -> None: ...
