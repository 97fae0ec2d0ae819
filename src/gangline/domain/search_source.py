"""Search sources that a node's operator names for tasks."""

from __future__ import annotations

from typing import Literal

import msgspec


class SearchSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task can only name a source, not change its path, its URL or its key."""

    kind: Literal["local", "tavily", "brave", "searxng"]
    """`local`: documents on the node's disk. The others: providers of web search."""
    path: str | None = None
    """For `local`: a folder, or a dataset file. Every task that names the source can read every text in it."""
    text_column: str = "text"
    """For `local`: names of a dataset's columns. Without the other two, a record's title and id come from its place and
    text."""
    title_column: str = "title"
    id_column: str = "id"
    url: str | None = None
    """Base URL of a provider, if not the default; `searxng` has no default."""
    key_env: str | None = None
    """Name of the node's environment variable with the key; None: the provider's default name."""
    fetch_pages: bool = False
    """Whether `fetch_page` may read any public web page, from the node's address."""
    for_offline_tasks: bool = False
    """Whether tasks may use a provider whose own network is not `full`."""

    def problem(self) -> str | None:
        """Returns why the fields do not fit together; None if they do."""
        if self.kind == "local":
            return None if self.path else "a local source needs a path"
        if self.path:
            return f"a source of kind {self.kind} has no path"
        if self.url is None:
            return "searxng needs the url of an instance" if self.kind == "searxng" else None
        return None if self.url.startswith(("http://", "https://")) else "url must begin with http:// or https://"
