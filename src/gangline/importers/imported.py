"""An importer's options, its result, and the metadata that it keeps."""

from __future__ import annotations

from typing import Any

import msgspec

from gangline.domain.task import NetworkPolicy

__all__ = ["Choices", "Imported", "plain"]


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of the importing user."""

    runtime: str | None = None
    """Name of a runtime plug-in; None is the one that the task needs."""
    image: str | None = None
    """In place of the task's own: an image name, or a folder, as the runtime understands it."""
    python: str | None = None
    """Folder of a Python environment that has the source's own package; None is ours, where it has it."""
    network: NetworkPolicy | None = None
    """None is the model only, and refuses a task that would be graded wrongly for it."""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """One task, ready but for its agent."""

    name: str
    body: dict[str, Any]
    """Body of `POST /v1/tasks`, without an agent's harness; with the reference solution where the source has one."""
    notes: tuple[str, ...] = ()
    """Differences from the task's source."""


def plain(instance: Any) -> dict[str, Any]:
    """A row or a task's file as JSON has it: dates become texts, bytes base 64, infinite numbers null."""
    return msgspec.json.decode(msgspec.json.encode(instance))
