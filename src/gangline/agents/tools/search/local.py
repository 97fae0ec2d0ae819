"""Provider `local`: searches documents on the node's disk. It needs no network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from gangline.agents.tools.contract import ToolFailed
from gangline.agents.tools.search.index import Index, index_file
from gangline.agents.tools.search.provider import Hit, Page
from gangline.domain.search_source import SearchSource


class LocalProvider:
    """One open index. Created by `open`."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._reading = asyncio.Lock()

    @classmethod
    async def open(cls, source: SearchSource, index_folder: Path) -> LocalProvider:
        """Raises: InvalidRequest if the corpus cannot be read; OSError."""
        return cls(Index(await asyncio.to_thread(index_file, source, index_folder)))

    async def search(self, query: str, max_results: int) -> Sequence[Hit]:
        async with self._reading:
            return await asyncio.to_thread(self._index.search, query, max_results)

    async def page(self, address: str) -> Page:
        async with self._reading:
            page = await asyncio.to_thread(self._index.page, address)
        if page is None:
            raise ToolFailed(f"there is no document {address!r}: use an address that a search returned")
        return page

    async def close(self) -> None:
        self._index.close()
