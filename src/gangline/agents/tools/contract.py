"""Tools of an agent that runs in the node: the Protocol for the entry points `gangline.tools`.

A tool's class has a pydantic `Config` and is instantiated with it, once per session. A tool that acts in the sandbox
uses the session's action server or its `Sandbox`, so it has no more rights than the agent's user. A tool that acts
elsewhere, such as a search, does so from the node, and only with the operator's permission: the sandbox stays offline.

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


class ToolFailed(Exception):
    """A call cannot be executed. The message is for the model, which may try again."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call, for the model."""

    content: str
    is_error: bool = False
    """The call was not executed, or its command failed. It is counted, but is never a failure of the session."""
    answer: str | None = None
    """Set by `submit`: the agent is done, and this is its answer."""


class ToolContext(msgspec.Struct, frozen=True, kw_only=True):
    """The session for which a tool acts."""

    runtime: Sandbox
    env: Mapping[str, str]
    """Environment of the agent's commands."""
    action_server: Callable[[], Awaitable[ActionServer]]
    """The session's action server, started by the first call. A failed one is replaced, and its state is lost.

    Raises: ActionServerFailed.
    """
    command_timeout_s: float
    """Default seconds for one action in the sandbox."""
    max_output_bytes: int
    """Limit of an observation; longer ones keep their head and tail."""
    network: NetworkPolicy = "none"
    """The task's policy for its sandbox."""
    search_sources: Mapping[str, SearchSource] = {}
    """Search sources that the node's operator allows."""
    mcp_sources: Mapping[str, McpSource] = {}
    """MCP servers over HTTP that the node's operator allows."""


class NoConfig(BaseModel):
    """Config of a tool without settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Tool(Protocol):
    """A function that a model can call. Subclassing this class gives default implementations of `open` and `close`."""

    Config: ClassVar[type[BaseModel]]
    name: str
    """The name that the model uses."""
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, an object."""

    async def open(self, context: ToolContext) -> None:
        """Prepare for a session. Called once, before the agent's first turn; does nothing by default.

        Raises: HarnessError if the tool cannot work in this session, which then fails.
        """
        return

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        """Execute a call. `arguments` is the object that the model wrote, not validated against the schema.

        Raises: ToolFailed, ActionRefused, InvalidRequest, ActionServerFailed, RuntimeFailed.
        """
        ...

    async def close(self) -> None:
        """Free the tool's resources, such as connections. Called once, at the end of the session."""
        return
