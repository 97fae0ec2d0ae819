"""`per_request`: one trace per completion. Source: Polar, 3.4.1.

Each trace's prompt is the completion's own, so contexts are always exact. A session of T turns repeats its history T
times.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from gangline.domain.completion import CompletionTree
from gangline.domain.trajectory import Trajectory
from gangline.rows.chains import BuilderConfig, check_claims, find_chains, make_trajectory, turns_of


class PerRequestConfig(BuilderConfig):
    """Options of every builder."""


class PerRequestBuilder:
    name: ClassVar[str] = "per_request"
    Config: ClassVar[type[BaseModel]] = PerRequestConfig

    def __init__(self, config: PerRequestConfig | None = None) -> None:
        self.config = config or PerRequestConfig()

    def build(self, tree: CompletionTree, *, session_id: str, task_id: str) -> Trajectory:
        """Raises: BuilderError (only with `strict`)."""
        if self.config.strict:
            check_claims(tree)
        rows = [(chain, turns_of(chain)) for chain in find_chains(tree, merge=False)]
        return make_trajectory(
            tree, rows, session_id=session_id, task_id=task_id, builder=self.name, config=self.config
        )
