"""Notification of waiting callers, without losing a change between the check and the wait.

Turns of nodes that wait for work: new work wakes all of them, and only as many try to take it as there is work for.

Laws
- Waiting nodes that can run the same try one after the other. When one of them finds nothing, those behind it wait on
  without trying, until work is announced again.
- Not here: the first try of a node's request, which is never left out.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Hashable, Sequence

from gangline.domain.session import Heartbeat, Lease

_MAX_NODES = 100_000
"""Maximum number of nodes whose offers are remembered, most recent first."""


class LeaseTurns:
    """Bound to one event loop."""

    def __init__(self) -> None:
        self._offers: OrderedDict[str, Hashable] = OrderedDict()
        self._kinds: dict[Hashable, _Kind] = {}

    def heard(self, beat: Heartbeat) -> None:
        """Remember the node's offer."""
        self._offers[beat.node_id] = _likeness(beat)
        self._offers.move_to_end(beat.node_id)
        if len(self._offers) > _MAX_NODES:
            self._offers.popitem(last=False)

    def gives_gpus(self, node_id: str) -> bool:
        """Whether a session that ended there may have freed GPUs."""
        return self._offers.get(node_id) == node_id

    async def taken(
        self,
        node_id: str,
        task_ids: Sequence[str] | None,
        num_announced: int,
        take: Callable[[], Awaitable[list[Lease]]],
    ) -> list[Lease]:
        """Leases of `take`, in the node's turn; empty if a similar node has just found nothing.

        num_announced: number of announcements of work before this call. A node without a known offer has no similar
        nodes.
        """
        offer = self._offers.get(node_id, node_id)
        key = (offer, None if task_ids is None else tuple(task_ids))
        kind = self._kinds.setdefault(key, _Kind())
        kind.num_using += 1
        try:
            async with kind.lock:
                if num_announced <= kind.empty_at:
                    return []
                leases = await take()
                if not leases:
                    kind.empty_at = num_announced
                return leases
        finally:
            kind.num_using -= 1
            if not kind.num_using:
                del self._kinds[key]


def _likeness(beat: Heartbeat) -> Hashable:
    """Equal for nodes that can run the same work. A node with GPUs is like no other, because some of its GPUs may be in
    use; its key is its id.
    """
    offer = beat.offer
    if offer is None:
        return None
    if offer.num_gpus:
        return beat.node_id
    images = {name: tuple(sorted(told.items())) for name, told in offer.images.items()}
    return frozenset(offer.runtimes), frozenset(offer.labels), frozenset(images.items()), frozenset(offer.networks)


class _Kind:
    """Nodes that can run the same work."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.empty_at = -1
        """Number of announcements of work before the last unsuccessful try."""
        self.num_using = 0


class Notifier:
    """Wakes listeners by topic. Listen first, then check, then wait: a notification after `listen` is never missed.

    Bound to one event loop.
    """

    def __init__(self) -> None:
        self._listeners: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._counts: Counter[str] = Counter()

    def num_notified(self, topic: str) -> int:
        """Number of notifications of a topic since it has had listeners without interruption."""
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
        """Whether a topic was notified since `listen` or the last `wait`. Waits at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._heard.wait()
        except TimeoutError:
            return False
        self._heard.clear()
        return True
