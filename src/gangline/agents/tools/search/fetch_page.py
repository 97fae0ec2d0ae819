"""The tool `fetch_page`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from pydantic import BaseModel, ConfigDict

from gangline.agents.tools.arguments import read, schema_of
from gangline.agents.tools.contract import Observation, Tool, ToolContext, ToolFailed
from gangline.agents.tools.search.provider import Page
from gangline.agents.tools.search.sources import SessionSource

_NOTE_BYTES = 128


class FetchPageConfig(BaseModel):
    """Settings of tool `fetch_page`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = "web"
    """Name of one of the node's `search_sources`, usually the same as for `web_search`."""


class _Fetch(msgspec.Struct):
    address: Annotated[str, Meta(description="Address of the document, as web_search returns it.")]
    offset: Annotated[int, Meta(ge=0, description="Characters to skip, to read on in a long document.")] = 0


class FetchPageTool(Tool):
    """Returns a part of a document, and the offset of the next part."""

    Config: ClassVar[type[BaseModel]] = FetchPageConfig
    name = "fetch_page"
    description = "Read a document that web_search found, as plain text. A long one is read in pieces."
    parameters = schema_of(_Fetch)

    def __init__(self, config: FetchPageConfig) -> None:
        self._source = SessionSource(config.source)

    async def open(self, context: ToolContext) -> None:
        await self._source.opened(context)

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        call = read(arguments, _Fetch)
        page = await (await self._source.opened(context)).page(call.address)
        return Observation(content=_piece(page, call.offset, context.max_output_bytes))

    async def close(self) -> None:
        await self._source.close()


def _piece(page: Page, offset: int, max_bytes: int) -> str:
    """Raises: ToolFailed."""
    if offset and offset >= len(page.text):
        raise ToolFailed(f"the document has {len(page.text)} characters: give a smaller offset")
    head = f"{page.title}\n\n" if not offset else ""
    room = max(1, max_bytes - len(head.encode(errors="replace")) - _NOTE_BYTES)
    rest = page.text[offset : offset + room].encode(errors="replace")[:room].decode(errors="ignore")
    end = offset + len(rest)
    note = f"\n[characters {offset} to {end} of {len(page.text)}: give offset {end} for more]"
    return head + rest + (note if end < len(page.text) else "")
