"""Servers of tools over HTTP, as the operator of a node names them for tasks."""

from __future__ import annotations

import msgspec


class McpSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task names the URL and cannot change anything else; the node connects, the sandbox does not."""

    url: str
    """Where the server speaks the Model Context Protocol over streamable HTTP."""
    key_env: str | None = None
    """Name of the node's environment variable with the key, sent as a bearer token; None sends none."""
    for_offline_tasks: bool = False
    """Whether tasks may use it whose own network is not `full`."""

    def problem(self) -> str | None:
        """Why the fields do not fit; None if they do."""
        return None if self.url.startswith(("http://", "https://")) else "url must begin with http:// or https://"
