"""`prefix_merging`: one trace per exact chain. Source: Polar, 3.4.2, with exact contexts added.

With `p_m` the prompt ids and `a_m` the sampled ids of turn m, a trace is `p_1 a_1 u_1 a_2 u_2 ... a_K`. Polar finds
`u_m` by searching the re-rendered turn for its end. Here a turn joins only if its prompt *is* `p_m a_m u_m`, so nothing
is searched and nothing assumed. `on_divergence` decides about any other turn:

- `split` (the default): the chain ends, and a new trace begins with the turn's own prompt;
- `splice`: the published rule (`gangline.rows.builders.splicing`). If the prompt still begins with `p_m`, the trace
  continues with the ids after the first end of turn in the re-rendering. From there on the row's context differs from
  the engine's, and `splices` records the place and the reason. A turn that the rule cannot join splits.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel

from gangline.domain.completion import CompletionTree
from gangline.domain.trajectory import Trajectory
from gangline.rows.builders.splicing import end_of_turn_ids, splice_chains
from gangline.rows.chains import BuilderConfig, check_claims, find_chains, make_trajectory, turns_of


class PrefixMergingConfig(BuilderConfig):
    on_divergence: Literal["split", "splice"] = "split"
    """The rule for a turn whose prompt does not extend its parent's context."""
    end_of_turn_ids: tuple[int, ...] = ()
    """Only for `splice`. Empty: the last sampled ids of the turns that ended by themselves."""


class PrefixMergingBuilder:
    name: ClassVar[str] = "prefix_merging"
    Config: ClassVar[type[BaseModel]] = PrefixMergingConfig

    def __init__(self, config: PrefixMergingConfig | None = None) -> None:
        self.config = config or PrefixMergingConfig()

    def build(self, tree: CompletionTree, *, session_id: str, task_id: str) -> Trajectory:
        """Raises: BuilderError (only with `strict`)."""
        if self.config.strict:
            check_claims(tree)
        chains = find_chains(tree, merge=True)
        if self.config.on_divergence == "splice":
            rows = splice_chains(chains, self.config.end_of_turn_ids or end_of_turn_ids(tree, self.config.engine_role))
        else:
            rows = [(chain, turns_of(chain)) for chain in chains]
        return make_trajectory(
            tree, rows, session_id=session_id, task_id=task_id, builder=self.name, config=self.config
        )
