"""Tools of an agent that runs in the node: the Protocol behind the entry points `gangline.tools`.

A tool's class has a pydantic `Config` and is made from it, once a session. A tool that acts in the sandbox uses the
session's action server or its handle, so that it can do no more than the agent's user. A tool that acts elsewhere, such
as a search, does so from the node, and only where the node's operator has allowed it: the sandbox stays offline.

Call a tool through `gangline.agents.tools.calls.observe`, which turns errors into observations.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Protocol

import msgspec
from pydantic import BaseModel, ConfigDict

from gangline.agents.tools.action_server import ActionServer
from gangline.domain.mcp_source import McpSource
from gangline.domain.sandbox import Sandbox
from gangline.domain.search_source import SearchSource
from gangline.domain.task import NetworkPolicy

__all__ = ["NoConfig", "Observation", "Tool", "ToolContext", "ToolFailed"]


class ToolFailed(Exception):
    """A call cannot be done. The message is for the model, which may call again."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a call, as the model reads it."""

    content: str
    is_error: bool = False
    """The call was not done, or the command that it ran failed: counted, never a failure of the session."""
    answer: str | None = None
    """Set by `submit`: the agent is done, and this is its answer."""


class ToolContext(msgspec.Struct, frozen=True, kw_only=True):
    """The session that a tool acts for."""

    runtime: Sandbox
    env: Mapping[str, str]
    """Environment of the agent's commands."""
    action_server: Callable[[], Awaitable[ActionServer]]
    """The session's action server, started by the first call; a failed one is replaced, its state is lost.

    Raises: ActionServerFailed.
    """
    command_timeout_s: float
    """Time for one action in the sandbox, where the call gives none."""
    max_output_bytes: int
    """Limit of an observation; longer ones keep their head and tail."""
    network: NetworkPolicy = "none"
    """The task's policy for its sandbox."""
    search_sources: Mapping[str, SearchSource] = {}
    """Places that the node's operator lets tasks search."""
    mcp_sources: Mapping[str, McpSource] = {}
    """MCP servers over HTTP that the node's operator lets tasks use."""


class NoConfig(BaseModel):
    """Config of a tool that has no settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Tool(Protocol):
    """One function that a model may call. A class that names this one as its base gets `open` and `close` from it."""

    Config: ClassVar[type[BaseModel]]
    name: str
    """As the model calls it."""
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object: its arguments."""

    async def open(self, context: ToolContext) -> None:
        """Prepare for a session. Called once, before the agent's first turn; nothing by default.

        Raises: HarnessError when the tool can be of no use to this session, which then fails.
        """
        return

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        """Act. `arguments` is an object as the model wrote it, not checked against the schema.

        Raises: ToolFailed, ActionRefused, InvalidRequest, ActionServerFailed, RuntimeFailed.
        """
        ...

    async def close(self) -> None:
        """Free the tool's own resources, such as connections. Called once, at the end of the session."""
        return
