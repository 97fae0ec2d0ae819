"""Environments of a session: servers of tools that are the agent's world, and the record of each call of theirs."""

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
    """Tools for the grader alone, alongside those that the task hides."""
    offers_tools: ClassVar[bool]
    """Whether the agent gets any tool. Its harness must be able to take them."""
    command: Sequence[str]
    """An MCP server on its standard streams, in the environment's sandbox."""
    env: Mapping[str, str]
    """Environment of the command."""


@runtime_checkable
class HasOpening(Protocol):
    """A kind whose command reads something before it speaks MCP."""

    opening: bytes
    """Written to the command's stdin first. What the agent must not know goes here: each process of a sandbox can read
    the arguments of all others."""


class OfferedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of an environment."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object."""


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a call as MCP has it, and the environment's step."""

    content: Sequence[Mapping[str, Any]]
    """Content blocks."""
    structured: Mapping[str, Any] | None = None
    is_error: bool = False
    reward: float | None = None
    """None where the call was no step."""
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
    """The result's text; the front of a long one."""
    is_error: bool
    reward: float | None
    done: bool
    completion_id: str | None = None
    """The model's turn that made the call; None where it is not known."""
    began_at: float
    """Unix time, UTC, seconds."""
    duration_s: float


class SessionEnvironment(Protocol):
    """One environment of a running session."""

    tools: Sequence[OfferedTool]
    """Tools that the agent is offered."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        """The agent's call, which is recorded.

        Raises: InvalidRequest for a tool that is not offered; EnvironmentFailed; SessionOver after `fence`.
        """
        ...

    async def fence(self) -> None:
        """Take no more calls of the agent's, and end those that run. Idempotent."""
        ...


class GradedEnvironment(Protocol):
    """An environment after the agent's end."""

    hidden_tools: Mapping[str, OfferedTool]
    """Tools that only the grader may call, by name."""
    failure: str | None
    """Why the environment was of no use to the agent; None where it worked."""

    async def ask(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        """The grader's call of any tool. Raises: EnvironmentFailed."""
        ...
