"""Tool servers over HTTP that a node's operator names for tasks."""

from __future__ import annotations

import msgspec


class McpSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task can only name the URL, not change anything else. The node connects, not the sandbox."""

    url: str
    """Where the server speaks the Model Context Protocol over streamable HTTP."""
    key_env: str | None = None
    """Name of the node's environment variable with the key, sent as a bearer token; None: no key is sent."""
    for_offline_tasks: bool = False
    """Whether tasks may use it whose own network is not `full`."""

    def problem(self) -> str | None:
        """Returns why the fields are invalid; None if they are valid."""
        return None if self.url.startswith(("http://", "https://")) else "url must begin with http:// or https://"
