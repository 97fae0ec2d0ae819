"""Which of a Harbor job's rollouts make a group that can be delivered. Pure.

Harbor's attempts at one task by one agent and model are a group. It is delivered once each of its samples has ended,
by its newest attempt. An attempt that is retried by hand after that is a group of its own.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from gangline.domain.task import MAX_SAMPLES
from gangline.interop.harbor.relay.api import HarborRollout


def affinity_of(rollout: HarborRollout) -> str:
    """A task id that all attempts of a group have in common, so that they can share an engine."""
    return f"harbor-{_digest(_group(rollout))}"


def ended_groups(rollouts: Iterable[HarborRollout], delivered: Collection[str]) -> list[list[HarborRollout]]:
    """Groups that have ended and were not delivered, in Harbor's order.

    rollouts: every attempt of one job. delivered: ids of those that were delivered.
    """
    groups = defaultdict[tuple[Any, ...], list[HarborRollout]](list)
    for rollout in rollouts:
        if not rollout.is_superseded:
            groups[_group(rollout)].append(rollout)
    ended = [group for group in groups.values() if all(rollout.has_ended for rollout in group)]
    fresh = [[rollout for rollout in group if rollout.id not in delivered] for group in ended]
    return [group for group in fresh if group]


def alike(rollouts: Sequence[HarborRollout]) -> list[list[HarborRollout]]:
    """Divide a group by what its rollouts were made of: two of a job's agents may differ in settings alone.

    rollouts: with their locks.
    """
    groups = defaultdict[str, list[HarborRollout]](list)
    for rollout in rollouts:
        groups[_digest(rollout.lock)].append(rollout)
    return [group[at : at + MAX_SAMPLES] for group in groups.values() for at in range(0, len(group), MAX_SAMPLES)]


def task_id_of(group: Sequence[HarborRollout]) -> str:
    """The same for the same rollouts, so that a group is delivered once."""
    return f"harbor-{group[0].job_id[:8]}-{_digest(sorted(rollout.id for rollout in group))}"


def _group(rollout: HarborRollout) -> tuple[Any, ...]:
    task, model = rollout.task, rollout.model
    return rollout.job_id, task.digest, task.name, rollout.agent.name, model.name, model.reasoning_effort


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]
