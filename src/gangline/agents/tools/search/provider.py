"""The Protocol of a search provider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Hit(msgspec.Struct, frozen=True):
    """A document that was found."""

    title: str
    address: str
    """A URL or a document's id: the argument of `page`."""
    excerpt: str


class Page(msgspec.Struct, frozen=True):
    """A document as plain text."""

    title: str
    address: str
    text: str


class SearchProvider(Protocol):
    """A search provider, open for one session."""

    async def search(self, query: str, max_results: int) -> Sequence[Hit]:
        """The best hits first; empty if there are no matches. `query` can be any text.

        Raises: ToolFailed if the query is rejected; ToolUnavailable if the provider does not answer.
        """
        ...

    async def page(self, address: str) -> Page:
        """Raises: ToolFailed if the document does not exist or is not text."""
        ...

    async def close(self) -> None: ...
