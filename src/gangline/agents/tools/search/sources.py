"""Decides which sources a session may search: those that the operator configured and the task's network allows.

A web search provider makes the node a way out of the sandbox, for queries and pages. So it serves only tasks with
network `full`, which have such access anyway, and other tasks if the operator sets `for_offline_tasks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.agents.tools.contract import ToolContext
from gangline.agents.tools.search.local import LocalProvider
from gangline.agents.tools.search.provider import SearchProvider
from gangline.agents.tools.search.web import WebProvider
from gangline.domain.errors import InvalidRequest, ToolUnavailable
from gangline.settings.installation import extra_command
from gangline.settings.machine import Settings

if TYPE_CHECKING:
    from gangline.agents.tools.search.pages import PageReader


class SessionSource:
    """A named source, opened on first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._provider: SearchProvider | None = None

    async def opened(self, context: ToolContext) -> SearchProvider:
        """Raises: ToolUnavailable if the session may not use it or it cannot be opened."""
        if self._provider is None:
            try:
                self._provider = await _open(self._name, context)
            except (InvalidRequest, OSError) as error:
                raise ToolUnavailable(f"the search source {self._name!r} cannot be used: {error}") from error
        return self._provider

    async def close(self) -> None:
        """Idempotent."""
        provider, self._provider = self._provider, None
        if provider is not None:
            await provider.close()


async def _open(name: str, context: ToolContext) -> SearchProvider:
    source = context.search_sources.get(name)
    if source is None:
        known = ", ".join(sorted(context.search_sources)) or "none"
        raise ToolUnavailable(
            f"this node has no search source {name!r}; known: {known}. Add it to the node's `search_sources`."
        )
    if source.kind == "local":
        return await LocalProvider.open(source, Settings.from_environ().cache_dir / "search")
    if context.network != "full" and not source.for_offline_tasks:
        raise ToolUnavailable(
            f"the search source {name!r} is on the web, and the task's network is `{context.network}`. Give the task"
            " network `full`, or set `for_offline_tasks` in the node's `search_sources`."
        )
    return WebProvider(source, pages=_page_reader() if source.fetch_pages else None)


def _page_reader() -> PageReader:
    try:
        from gangline.agents.tools.search.pages import PageReader  # noqa: PLC0415 - only this needs the extra `search`
    except ModuleNotFoundError as error:
        raise ToolUnavailable(f"{error.name} is not installed. Run: {extra_command('search')}") from error
    return PageReader()
