"""The buffer between collector and trainer: whole groups, oldest first, each used at most `max_uses` times.

`state` is stored in a checkpoint with the weights. A buffer restored from it refuses groups that those weights were
trained on, however often the service returns them.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gangline.train.collecting.admission import StalenessSettings, is_fresh
from gangline.train.collecting.groups import Group, trainable_traces


class BufferState(msgspec.Struct, frozen=True):
    """The part of a buffer that a checkpoint stores."""

    uses: dict[str, int]
    """task id -> how often its group was used for training, for all groups ever used."""


class ReplayBuffer:
    """capacity: groups; the oldest is evicted when it is exceeded. max_uses: how often a group may be taken."""

    def __init__(self, capacity: int, staleness: StalenessSettings, *, max_uses: int = 1) -> None:
        if capacity < 1 or max_uses < 1:
            raise ValueError("a buffer holds at least one group, and gives it at least once.")
        self._capacity = capacity
        self._staleness = staleness
        self._max_uses = max_uses
        self._groups: dict[str, Group] = {}
        self._uses: dict[str, int] = {}

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
        """Drops the groups held, and refuses those that were used as often as allowed."""
        self._groups.clear()
        self._uses = dict(state.uses)

    def add(self, group: Group) -> bool:
        """False if the group is already held, or was used as often as allowed."""
        if group.task_id in self._groups or self._uses.get(group.task_id, 0) >= self._max_uses:
            return False
        if len(self._groups) >= self._capacity:
            self._evict([next(iter(self._groups))])
        self._groups[group.task_id] = group
        return True

    def drop_stale(self, current_version: int) -> int:
        """Drops groups with a session that is too old for the trainer of `current_version`. Returns their number."""
        stale = [task_id for task_id, group in self._groups.items() if not self._fresh(group, current_version)]
        self._evict(stale)
        return len(stale)

    def take(self, num_groups: int, current_version: int) -> list[Group] | None:
        """The oldest `num_groups` fresh groups, each counted as used; None, without counting, if there are too few."""
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
        return all(is_fresh(trainable_traces(session), current_version, self._staleness) for session in group.sessions)

    def _evict(self, task_ids: Iterable[str]) -> None:
        for task_id in task_ids:
            del self._groups[task_id]
