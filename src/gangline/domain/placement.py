"""What a session needs of a node, what a node offers, and why one does not suit the other. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gangline.domain.task import TaskRequest

__all__ = ["Needs", "Offer", "nearest", "needs_of"]


class Needs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node must have to run the sessions of a task."""

    runtimes: tuple[str, ...] = ()
    """Names of runtime plug-ins: the agent's, the grader's, and those of its environments. Sorted."""
    labels: tuple[str, ...] = ()
    """Labels of the node, of the same. Sorted."""


class Offer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node can run."""

    runtimes: tuple[str, ...] = ()
    """Names of runtime plug-ins that can start sandboxes there."""
    missing: dict[str, str] = {}
    """Name of another runtime plug-in -> why it cannot."""
    labels: tuple[str, ...] = ()
    """Its architecture, and the labels that its operator gave it."""

    def lacks(self, needs: Needs) -> list[str]:
        """What is missing, a sentence for each; none: the node can run it."""
        runtimes = [self._lack(name) for name in needs.runtimes if name not in self.runtimes]
        return runtimes + [f"label `{label}`" for label in needs.labels if label not in self.labels]

    def _lack(self, runtime: str) -> str:
        return f"runtime `{runtime}`: {self.missing.get(runtime, 'the node does not have this plug-in')}"


def needs_of(task: TaskRequest) -> Needs:
    others = (task.evaluator.runtime, *(spec.runtime for spec in task.environments.values()))
    specs = [task.runtime, *(one for one in others if one is not None)]
    return Needs(
        runtimes=tuple(sorted({spec.backend for spec in specs})),
        labels=tuple(sorted({label for spec in specs for label in spec.node_labels})),
    )


def nearest(needs: Needs, offers: Iterable[tuple[str, Offer]]) -> str | None:
    """Why no node can run it, by the node that lacks the least; None where one can, or where there is none.

    offers: node id -> offer.
    """
    lacks = [(len(missing := offer.lacks(needs)), node_id, missing) for node_id, offer in offers]
    if not lacks or min(lacks)[0] == 0:
        return None
    _, node_id, missing = min(lacks)
    return f"no node can run it; node {node_id} lacks {'; '.join(missing)}"
