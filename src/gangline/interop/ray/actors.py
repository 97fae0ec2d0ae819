"""The actor that runs one node on the machine that Ray chose for it.

A life of the actor is a process that Ray starts. `run` is called in each: by us in the first, by Ray in those that
follow. Work is asked to end by cancelling it, and has then cleaned up when `stop` returns.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol

import msgspec

from gangline.interop.ray.ray import own_host

__all__ = ["NodeActor", "NodeWork", "Place"]


class Place(msgspec.Struct, frozen=True):
    """Where an actor is, in this life."""

    index: int
    """The actor's own number, the same in all its lives."""
    machine: str
    """The machine's name."""
    host: str
    """The machine's address, as the cluster's others reach it."""


class NodeWork(Protocol):
    """The work of an actor; it is sent there by pickle."""

    async def run(self, place: Place, on_ready: Callable[[str], None]) -> None:
        """Keep a node running until cancelled; `on_ready` is called with its URL. Raises: GanglineError when it
        cannot."""
        ...


class NodeActor:
    def __init__(self, work: NodeWork, index: int) -> None:
        self._work = work
        self._index = index
        self._url = ""
        self._is_ready = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until `stop`. May be called again, as Ray does when the answer of a call was lost: it is the same run."""
        if self._running is None:
            place = Place(self._index, socket.gethostname(), own_host())
            self._running = asyncio.create_task(self._work.run(place, self._ready_at))
        await asyncio.shield(self._running)

    def _ready_at(self, url: str) -> None:
        self._url = url
        self._is_ready.set()

    async def ready(self) -> str:
        """The node's URL, once it has one."""
        await self._is_ready.wait()
        return self._url

    async def stop(self) -> None:
        """Returns when all is cleaned up. Idempotent."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
