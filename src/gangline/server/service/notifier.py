"""Notification of waiting callers, without losing a change between the check and the wait."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence

__all__ = ["Notifier"]


class Notifier:
    """Wakes listeners by topic. Listen first, then check, then wait: a notification after `listen` is never missed.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._listeners: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._counts: Counter[str] = Counter()

    def num_notified(self, topic: str) -> int:
        """How often a topic was notified since somebody listens without a break."""
        return self._counts[topic]

    def notify(self, topic: str) -> None:
        """Wake all current listeners of this topic."""
        if topic in self._listeners:
            self._counts[topic] += 1
        for heard in self._listeners.get(topic, ()):
            heard.set()

    def notify_all(self) -> None:
        for topic in list(self._listeners):
            self.notify(topic)

    def listen(self, *topics: str) -> Listener:
        return Listener(self, topics)

    def add(self, topic: str, heard: asyncio.Event) -> None:
        self._listeners[topic].add(heard)

    def remove(self, topic: str, heard: asyncio.Event) -> None:
        self._listeners[topic].discard(heard)
        if not self._listeners[topic]:
            del self._listeners[topic]
            self._counts.pop(topic, None)


class Listener:
    """`with notifier.listen(topic, ...) as listener:` check; `await listener.wait(timeout_s)`; check again."""

    def __init__(self, notifier: Notifier, topics: Sequence[str]) -> None:
        self._notifier = notifier
        self._topics = topics
        self._heard = asyncio.Event()

    def __enter__(self) -> Listener:
        for topic in self._topics:
            self._notifier.add(topic, self._heard)
        return self

    def __exit__(self, *_exc: object) -> None:
        for topic in self._topics:
            self._notifier.remove(topic, self._heard)

    async def wait(self, timeout_s: float) -> bool:
        """Whether a topic was notified since `listen` or the last `wait`; waits for it at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._heard.wait()
        except TimeoutError:
            return False
        self._heard.clear()
        return True
