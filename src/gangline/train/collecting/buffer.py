"""The buffer between collector and trainer: whole groups, oldest first, none trained on twice.

`state` goes into a checkpoint with the weights; a buffer restored from it refuses the groups that those weights have
seen, however often the service hands them out again.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gangline.train.collecting.admission import StalenessSettings, is_fresh
from gangline.train.collecting.groups import Group, trainable_traces

__all__ = ["BufferState", "ReplayBuffer"]


class BufferState(msgspec.Struct, frozen=True):
    """The part of a buffer that a checkpoint stores."""

    uses: dict[str, int]
    """task id -> how often the group was trained on, of all that ever were."""


class ReplayBuffer:
    """capacity: groups; the oldest goes when one more comes. max_uses: how often a group may be taken."""

    def __init__(self, capacity: int, staleness: StalenessSettings, *, max_uses: int = 1) -> None:
        if capacity < 1 or max_uses < 1:
            raise ValueError("a buffer holds at least one group, and gives it at least once.")
        self._capacity = capacity
        self._staleness = staleness
        self._max_uses = max_uses
        self._groups: dict[str, Group] = {}
        self._uses: dict[str, int] = {}
        self.num_evicted = 0
        """Groups that left without having been taken as often as they might."""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def task_ids(self) -> frozenset[str]:
        """Ids of the tasks whose groups are held."""
        return frozenset(self._groups)

    @property
    def state(self) -> BufferState:
        return BufferState(dict(self._uses))

    def restore(self, state: BufferState) -> None:
        """Forget the groups held, and refuse those that were trained on as often as they may be."""
        self._groups.clear()
        self._uses = dict(state.uses)

    def add(self, group: Group) -> bool:
        """False when the group is here, or was trained on as often as it may be."""
        if group.task_id in self._groups or self._uses.get(group.task_id, 0) >= self._max_uses:
            return False
        if len(self._groups) >= self._capacity:
            self._evict([next(iter(self._groups))])
        self._groups[group.task_id] = group
        return True

    def drop_stale(self, current_version: int) -> int:
        """Drop groups of which a session is too old for the trainer of `current_version`. Returns how many."""
        stale = [task_id for task_id, group in self._groups.items() if not self._fresh(group, current_version)]
        self._evict(stale)
        return len(stale)

    def take(self, num_groups: int, current_version: int) -> list[Group] | None:
        """The oldest `num_groups` fresh groups, each counted as trained on; None, and nothing counted, with too few."""
        self.drop_stale(current_version)
        if len(self._groups) < num_groups:
            return None
        taken = list(self._groups.values())[:num_groups]
        for group in taken:
            self._uses[group.task_id] = self._uses.get(group.task_id, 0) + 1
            if self._uses[group.task_id] >= self._max_uses:
                del self._groups[group.task_id]
        return taken

    def _fresh(self, group: Group, current_version: int) -> bool:
        return all(is_fresh(trainable_traces(one), current_version, self._staleness) for one in group.sessions)

    def _evict(self, task_ids: Iterable[str]) -> None:
        for task_id in task_ids:
            del self._groups[task_id]
            self.num_evicted += 1
