"""An importer's options, and its result."""

from __future__ import annotations

from typing import Any

import msgspec

from gangline.domain.task import NetworkPolicy

__all__ = ["Choices", "Imported"]


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of the importing user."""

    runtime: str | None = None
    """Name of a runtime plug-in; None is the one that the task needs."""
    image: str | None = None
    """In place of the task's own: an image name, or a folder, as the runtime understands it."""
    network: NetworkPolicy | None = None
    """None is the model only, and refuses a task that would be graded wrongly for it."""
    oracle: bool = False
    """The agent is the task's own solution, run by harness `shell`: its reward must be 1."""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """One task, ready but for its agent."""

    name: str
    body: dict[str, Any]
    """Body of `POST /v1/tasks`; without the agent's harness, unless the oracle is it."""
    notes: tuple[str, ...] = ()
    """Differences from the task's source."""
