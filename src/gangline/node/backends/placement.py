"""Which backend a session gets, and keeps: least assigned first, on this machine first. Source: 000, section 3.3.2."""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Mapping

from gangline.node.backends.records import Assignment, Backend, Rank

__all__ = ["LeastAssigned", "Placement"]

log = logging.getLogger("gangline.backends")


class LeastAssigned:
    """Keys by their number of assignments, in a min-heap whose entries are renewed, not moved.

    An update costs O(log n); outdated entries are dropped when they surface.
    """

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


class Placement:
    """Chooses among the backends that were `offered`, and counts who has whom."""

    def __init__(self, backends: Mapping[str, Backend], *, affinity_slack: int) -> None:
        """`backends`: the pool's own, by id. See `BackendPool` for the others."""
        self._backends = backends
        self._affinity_slack = affinity_slack
        self._near, self._far = LeastAssigned(), LeastAssigned()
        self._of_task: dict[str, Counter[str]] = {}
        """task id -> backend id -> sessions"""

    def offer(self, backend: Backend) -> None:
        """It may be chosen from now on. Idempotent, as is `withdraw`."""
        self._heap(backend).put(backend.backend_id, backend.rank)

    def withdraw(self, backend: Backend) -> None:
        self._heap(backend).drop(backend.backend_id)

    def settle(self, assignment: Assignment) -> Backend | None:
        """The session's backend, or another where that is not healthy; None when there is none."""
        held = assignment.backend
        if held is not None and held.state == "healthy":
            return held
        chosen = self._choose(assignment.task_id)
        if chosen is not None:
            if held is not None:
                _note_move(assignment, held, chosen)
            self.leave(assignment)
            self._join(assignment, chosen)
        return chosen

    def leave(self, assignment: Assignment) -> None:
        backend, assignment.backend = assignment.backend, None
        if backend is None:
            return
        backend.num_sessions -= 1
        mates = self._of_task[assignment.task_id]
        mates[backend.backend_id] -= 1
        if not +mates:
            del self._of_task[assignment.task_id]
        if backend.state == "healthy":
            self.offer(backend)

    def _join(self, assignment: Assignment, backend: Backend) -> None:
        assignment.backend = backend
        backend.num_sessions += 1
        backend.num_assigned += 1
        self._of_task.setdefault(assignment.task_id, Counter())[backend.backend_id] += 1
        self.offer(backend)

    def _choose(self, task_id: str) -> Backend | None:
        key = self._near.least() or self._far.least()
        if key is None:
            return None
        least = self._backends[key]
        mates = [self._backends[mate] for mate in self._of_task.get(task_id, ()) if mate in self._backends]
        mates = [mate for mate in mates if mate.state == "healthy" and self._heap(mate) is self._heap(least)]
        best = min(mates, key=lambda mate: mate.rank, default=least)
        return best if best.num_sessions - least.num_sessions < self._affinity_slack else least

    def _heap(self, backend: Backend) -> LeastAssigned:
        return self._near if backend.is_near else self._far


def _note_move(assignment: Assignment, old: Backend, new: Backend) -> None:
    why = "removed" if old.state == "draining" else old.error or "unhealthy"
    assignment.moves.append({"from": old.url, "to": new.url, "why": why})
    log.warning("backend.replaced session=%s from=%s to=%s why=%s", assignment.session_id, old.url, new.url, why)
