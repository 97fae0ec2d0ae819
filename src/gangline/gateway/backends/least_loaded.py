"""Who has the least to do: a min-heap whose entries are renewed, not moved. Source: 000, section 3.3.2."""

from __future__ import annotations

import heapq

from gangline.gateway.backends.records import Rank

__all__ = ["LeastAssigned"]


class LeastAssigned:
    """Keys ordered by their number of assignments. An update costs O(log n); outdated entries are dropped when they
    surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, str]] = []
        self._ranks: dict[str, Rank] = {}

    def put(self, key: str, rank: Rank) -> None:
        """Insert, or renew."""
        self._ranks[key] = rank
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 64 + 4 * len(self._ranks):
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def drop(self, key: str) -> None:
        self._ranks.pop(key, None)

    def least(self) -> str | None:
        """None when empty."""
        while self._heap:
            rank, key = self._heap[0]
            if self._ranks.get(key) == rank:
                return key
            heapq.heappop(self._heap)
        return None
