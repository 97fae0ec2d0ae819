"""The actor that runs one node on the machine that Ray chose.

Ray may start several processes for an actor, one after the other, and `run` is called in each: by us in the first, by
Ray after a restart. Work is stopped by cancelling it, and has cleaned up when `stop` returns.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol

import msgspec

from gangline.interop.ray.ray import own_host


class Place(msgspec.Struct, frozen=True):
    """Where an actor currently runs."""

    index: int
    """The actor's number, kept across restarts."""
    machine: str
    """The machine's name."""
    host: str
    """The machine's address within the cluster."""


class NodeWork(Protocol):
    """An actor's work, which is pickled and sent to it."""

    async def run(self, place: Place, on_ready: Callable[[str], None]) -> None:
        """Keep a node running until cancelled or drained. Calls `on_ready` with its URL.

        Raises: GanglineError if it cannot.
        """
        ...


class NodeActor:
    def __init__(self, work: NodeWork, index: int) -> None:
        self._work = work
        self._index = index
        self._url = ""
        self._is_ready = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Run until `stop`, or until the node has drained.

        Ray may call it again if a call's answer was lost: it joins the same run.
        """
        if self._running is None:
            place = Place(self._index, socket.gethostname(), own_host())
            self._running = asyncio.create_task(self._work.run(place, self._ready_at))
        await asyncio.shield(self._running)

    def _ready_at(self, url: str) -> None:
        self._url = url
        self._is_ready.set()

    async def ready(self) -> str:
        """The node's URL, once it is known."""
        await self._is_ready.wait()
        return self._url

    async def stop(self) -> None:
        """Returns when everything is cleaned up. Idempotent."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
