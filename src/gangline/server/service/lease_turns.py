"""Limits how many waiting nodes try to take new work: new work wakes all of them, but only as many try as there is work
for.

Laws
- Waiting nodes that can run the same work try one after the other. If one finds nothing, the nodes after it keep
  waiting without trying, until work is announced again.
- The first try of a node's request is not handled here and is never skipped.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
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
