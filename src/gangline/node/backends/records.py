"""The records of a pool about each engine and each session, and the views of them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from gangline.domain.node_views import BackendState, BackendView
from gangline.domain.template_told import lacks, told
from gangline.models.engines.contract import Engine, EngineCapabilities

__all__ = ["Assignment", "Backend", "BackendSpec", "Rank"]

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
    role: str | None = None
    """The role whose calls it answers; None: it serves the policy."""
    capture: Literal["ids", "text"] | None = None
    """`text` takes a server that reports no token ids; None: as the pool does."""


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
    failed_at: float = 0.0
    """When its last failed health check ended. Unix time, UTC, seconds; 0.0: none failed."""
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

    @contextmanager
    def in_use(self) -> Generator[Engine]:
        """Counts a call in flight while the block lasts."""
        self.num_calls += 1
        self.idle.clear()
        try:
            yield self.engine
        finally:
            self.num_calls -= 1
            if self.num_calls == 0:
                self.idle.set()

    def view(self) -> BackendView:
        return BackendView(
            backend_id=self.backend_id,
            url=self.url,
            engine=self.capabilities.engine,
            label=self.label,
            role=self.spec.role,
            api_key_env=self.spec.api_key_env,
            is_near=self.is_near,
            state=self.state,
            model=self.capabilities.model,
            version=self.capabilities.version,
            tier=self.capabilities.tier,
            template=self.capabilities.template,
            template_told=tuple(told(self.capabilities.template)),
            template_lacks=tuple(lacks(self.capabilities.template)),
            sees_images=self.capabilities.sees_images,
            num_sessions=self.num_sessions,
            num_assigned=self.num_assigned,
            num_calls=self.num_calls,
            num_failures=self.num_failures,
            error=self.error,
            weights_known=self.weights_known,
            reports_versions=self.capabilities.reports_versions,
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
