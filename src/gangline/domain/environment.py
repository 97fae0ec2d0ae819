"""Environments of a session: tool servers that are the agent's world, and the record of each of their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec
from pydantic import BaseModel


class EnvironmentKind(Protocol):
    """A kind of environment: entry points `gangline.environments`. Constructed with its validated `Config`."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]]
    hidden_tools: ClassVar[frozenset[str]]
    """Tools for the grader alone, in addition to the ones that the task hides."""
    offers_tools: ClassVar[bool]
    """Whether the agent gets any tools. Its harness must support them."""
    command: Sequence[str]
    """An MCP server on its standard streams, in the environment's sandbox."""
    env: Mapping[str, str]
    """Environment of the command."""


@runtime_checkable
class HasOpening(Protocol):
    """A kind whose command reads input before it speaks MCP."""

    opening: bytes
    """Written to the command's stdin first. Secrets from the agent belong here: every process in a sandbox can read the
    arguments of all others."""


class OfferedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of an environment."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object."""


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call in MCP's format, and the environment's step."""

    content: Sequence[Mapping[str, Any]]
    """Content blocks."""
    structured: Mapping[str, Any] | None = None
    is_error: bool = False
    reward: float | None = None
    """None if the call was not a step."""
    done: bool = False
    """Whether the episode is over."""

    @property
    def text(self) -> str:
        return "\n".join(block["text"] for block in self.content if block.get("type") == "text")


class EnvironmentCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call in a session's record: a line of its artifact `environment.jsonl`."""

    environment: str
    tool: str
    arguments: Mapping[str, Any]
    text: str
    """The result's text; only the front of a long one."""
    is_error: bool
    reward: float | None
    done: bool
    completion_id: str | None = None
    """The model's turn that made the call; None if unknown."""
    began_at: float
    """Unix time, UTC, seconds."""
    duration_s: float


class SessionEnvironment(Protocol):
    """One environment of a running session."""

    tools: Sequence[OfferedTool]
    """Tools offered to the agent."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        """Make and record a call of the agent.

        Raises: InvalidRequest for a tool that is not offered; EnvironmentFailed; SessionOver after `fence`.
        """
        ...

    async def fence(self) -> None:
        """Refuse further calls of the agent, and end running ones. Idempotent."""
        ...


class GradedEnvironment(Protocol):
    """An environment after the agent has ended."""

    hidden_tools: Mapping[str, OfferedTool]
    """Tools that only the grader may call, by name."""
    failure: str | None
    """Why the environment did not work for the agent; None if it worked."""

    async def ask(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        """Call any tool for the grader. Raises: EnvironmentFailed."""
        ...
