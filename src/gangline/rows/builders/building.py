"""Building a trajectory, including the completions that the builder declares as dropped."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.contracts import Builder, DropsTurns
from gangline.domain.trajectory import Trajectory

__all__ = ["built"]


def built(builder: Builder, completions: Iterable[Completion], *, session_id: str, task_id: str) -> Trajectory:
    """Raises: BuilderError, and ValueError when the completions do not fit together."""
    trajectory = builder.build(CompletionTree(completions), session_id=session_id, task_id=task_id)
    drops_turns = builder.drops_turns if isinstance(builder, DropsTurns) else None
    return msgspec.structs.replace(trajectory, drops_turns=drops_turns)
