"""Waking those who wait for a change, without losing a change that comes between looking and waiting."""

from __future__ import annotations

import asyncio
from collections import defaultdict

__all__ = ["Bells"]


class Bells:
    """Bells by name. Listen first, then look, then wait: a ring after `listen` is never missed.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._listeners: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def ring(self, name: str) -> None:
        """Wake everybody who listens to this bell now."""
        for heard in self._listeners.get(name, ()):
            heard.set()

    def ring_all(self) -> None:
        for name in list(self._listeners):
            self.ring(name)

    def listen(self, name: str) -> Listener:
        return Listener(self, name)

    def add(self, name: str, heard: asyncio.Event) -> None:
        self._listeners[name].add(heard)

    def remove(self, name: str, heard: asyncio.Event) -> None:
        self._listeners[name].discard(heard)
        if not self._listeners[name]:
            del self._listeners[name]


class Listener:
    """`with bells.listen(name) as listener:` check; `await listener.wait(timeout_s)`; check again."""

    def __init__(self, bells: Bells, name: str) -> None:
        self._bells = bells
        self._name = name
        self._heard = asyncio.Event()

    def __enter__(self) -> Listener:
        self._bells.add(self._name, self._heard)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._bells.remove(self._name, self._heard)

    async def wait(self, timeout_s: float) -> bool:
        """Whether the bell rang since `listen` or the last `wait`, waiting for it at most so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._heard.wait()
        except TimeoutError:
            return False
        self._heard.clear()
        return True
