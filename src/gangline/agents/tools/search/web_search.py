"""The tool `web_search`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from pydantic import BaseModel, ConfigDict, Field

from gangline.agents.tools.arguments import read, schema_of
from gangline.agents.tools.contract import Observation, Tool, ToolContext
from gangline.agents.tools.search.provider import Hit
from gangline.agents.tools.search.sources import SessionSource

_MAX_EXCERPT_CHARS = 600


class WebSearchConfig(BaseModel):
    """Settings of tool `web_search`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = "web"
    """Name of one of the node's `search_sources`."""
    max_results: int = Field(default=5, ge=1, le=20)
    """Maximum number of documents returned by a search."""


class _Query(msgspec.Struct):
    query: Annotated[str, Meta(description="Words to search for.")]


class WebSearchTool(Tool):
    """Returns title, address and excerpt of the best documents."""

    Config: ClassVar[type[BaseModel]] = WebSearchConfig
    name = "web_search"
    description = "Search for documents. Returns the title, the address and an excerpt of the best ones."
    parameters = schema_of(_Query)

    def __init__(self, config: WebSearchConfig) -> None:
        self._source = SessionSource(config.source)
        self._max_results = config.max_results

    async def open(self, context: ToolContext) -> None:
        await self._source.opened(context)

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        query = read(arguments, _Query).query
        hits = await (await self._source.opened(context)).search(query, self._max_results)
        shown = "\n\n".join(_shown(number, hit) for number, hit in enumerate(hits, 1))
        return Observation(content=shown or "[nothing was found: try other words]")

    async def close(self) -> None:
        await self._source.close()


def _shown(number: int, hit: Hit) -> str:
    return f"{number}. {hit.title}\n{hit.address}\n{hit.excerpt[:_MAX_EXCERPT_CHARS]}"
