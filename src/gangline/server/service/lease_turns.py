"""Turns of nodes that wait for work: new work wakes all of them, and only as many try to take it as there is work for.

Laws
- Waiting nodes that can run the same try one after the other. When one of them finds nothing, those behind it wait on
  without trying, until work is announced again.
- Not here: the first try of a node's request, which is never left out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence

from gangline.domain.session import Heartbeat, Lease

__all__ = ["LeaseTurns"]

_MAX_NODES = 100_000
"""Nodes whose offers are remembered: those heard last."""


class LeaseTurns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._offers: OrderedDict[str, Hashable] = OrderedDict()
        self._kinds: dict[Hashable, _Kind] = {}

    def heard(self, beat: Heartbeat) -> None:
        """Remember what the node can run."""
        self._offers[beat.node_id] = _likeness(beat)
        self._offers.move_to_end(beat.node_id)
        if len(self._offers) > _MAX_NODES:
            self._offers.popitem(last=False)

    def gives_gpus(self, node_id: str) -> bool:
        """Whether a session that ended there may have freed some."""
        return self._offers.get(node_id) == node_id

    async def taken(
        self,
        node_id: str,
        task_ids: Sequence[str] | None,
        num_announced: int,
        take: Callable[[], Awaitable[list[Lease]]],
    ) -> list[Lease]:
        """Leases of `take`, in the node's turn; none where a node like it has just found nothing.

        num_announced: how often work was announced before this call. A node that was not heard here has no others
        like it.
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
    """The same for nodes that can run the same. One that has GPUs is like no other: some of them may be taken. It is
    its id."""
    offer = beat.offer
    if offer is None:
        return None
    if offer.num_gpus:
        return beat.node_id
    images = {name: tuple(sorted(told.items())) for name, told in offer.images.items()}
    return frozenset(offer.runtimes), frozenset(offer.labels), frozenset(images.items()), frozenset(offer.networks)


class _Kind:
    """Nodes that can run the same."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.empty_at = -1
        """How often work had been announced before the last try in vain."""
        self.num_using = 0
