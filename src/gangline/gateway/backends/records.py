"""The records of a pool about each engine and each session, and the views of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from gangline.engines.contract import Engine, EngineCapabilities, TemplateFacts

__all__ = ["Assignment", "Backend", "BackendSpec", "BackendState", "BackendView", "Rank"]

BackendState = Literal["healthy", "unhealthy", "draining"]

Rank = tuple[int, int, int]
"""(sessions now, sessions ever, order of arrival): the least goes first."""


class BackendSpec(msgspec.Struct, frozen=True):
    """How an operator names an engine."""

    url: str
    kind: str = "auto"
    """Kind of the engine plug-in; `auto` detects it."""
    label: str | None = None
    api_key_env: str | None = None
    """Name of the environment variable that holds its key."""
    options: dict[str, Any] = {}
    """Options of the plug-in, and `parsers`."""


class BackendView(msgspec.Struct, frozen=True, kw_only=True):
    """One backend as an operator sees it."""

    backend_id: str
    url: str
    engine: str
    """Its kind: `vllm`, `sglang`, `openai_text`."""
    label: str | None
    """Where it runs, such as a host's or node's name."""
    api_key_env: str | None
    """Name of the environment variable that holds its key; None: it wants none."""
    is_near: bool
    """On the node's own machine, by its label, or without one by its address: chosen before all others."""
    state: BackendState
    model: str
    version: str
    template: TemplateFacts
    num_sessions: int
    """Assigned to it now."""
    num_assigned: int
    """Sessions that were ever assigned to it."""
    num_calls: int
    """In flight."""
    num_failures: int
    """Health checks failed in a row."""
    error: str | None
    weights_known: bool = True
    """False: it came, or came back from a failure, after a policy version was set; or a weight update was cut off."""
    since: float
    """When it took this state. Unix time, UTC, seconds."""


@dataclass(eq=False, slots=True)
class Backend:
    """One running engine, as the pool knows it."""

    backend_id: str
    number: int
    spec: BackendSpec
    engine: Engine
    capabilities: EngineCapabilities
    identity: dict[str, Any]
    is_near: bool
    state: BackendState
    since: float
    num_sessions: int = 0
    num_assigned: int = 0
    num_calls: int = 0
    num_failures: int = 0
    error: str | None = None
    weights_known: bool = True
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its last call in flight has ended."""

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def label(self) -> str | None:
        return self.spec.label

    @property
    def rank(self) -> Rank:
        return self.num_sessions, self.num_assigned, self.number

    def view(self) -> BackendView:
        return BackendView(
            backend_id=self.backend_id,
            url=self.url,
            engine=self.capabilities.engine,
            label=self.label,
            api_key_env=self.spec.api_key_env,
            is_near=self.is_near,
            state=self.state,
            model=self.capabilities.model,
            version=self.capabilities.version,
            template=self.capabilities.template,
            num_sessions=self.num_sessions,
            num_assigned=self.num_assigned,
            num_calls=self.num_calls,
            num_failures=self.num_failures,
            error=self.error,
            weights_known=self.weights_known,
            since=self.since,
        )


@dataclass(eq=False, slots=True)
class Assignment:
    """A session's backend, and the moves that no completion has recorded yet."""

    session_id: str
    task_id: str
    backend: Backend | None = None
    moves: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    is_over: bool = False
