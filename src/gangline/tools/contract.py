"""What a tool of an agent in the node is: the Protocol behind the entry points `gangline.tools`.

A tool's class has a pydantic `Config` and is made from it, once a session. What it does in the sandbox it does through
the session's action server or its handle, so that it can do no more than the agent's user. What it does elsewhere, such
as a search, the node does: keys are read from the node's environment by the name that `Config` gives, and the sandbox
stays offline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Protocol

import msgspec
from pydantic import BaseModel

from gangline.domain.contracts import RuntimeHandle
from gangline.tools.action_server import ActionServer

__all__ = ["Observation", "Tool", "ToolContext", "ToolFailed"]


class ToolFailed(Exception):
    """A call cannot be done. The message is for the model, which may call again."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What the model is told of a call."""

    content: str
    is_error: bool = False
    """The call was not done, or what it ran failed: counted, never a failure of the session."""
    answer: str | None = None
    """Set by `submit`: the agent is done, and this is its answer."""


class ToolContext(msgspec.Struct, frozen=True, kw_only=True):
    """The session that a tool acts for."""

    runtime: RuntimeHandle
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


class Tool(Protocol):
    """One function that a model may call."""

    Config: ClassVar[type[BaseModel]]
    name: str
    """As the model calls it."""
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object: its arguments."""

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        """Act. `arguments` is an object as the model wrote it, not checked against the schema.

        Raises: ToolFailed, ActionRefused, ActionServerFailed, RuntimeFailed.
        """
        ...

    async def close(self) -> None:
        """Free what the tool holds, such as connections. Called once, at the end of the session."""
        ...
