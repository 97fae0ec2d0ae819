"""`prefix_merging`: one trace per exact chain. Source: Polar, 3.4.2, with context truth added.

With `p_m` the prompt ids and `a_m` the sampled ids of turn m, a trace is `p_1 a_1 u_1 a_2 u_2 ... a_K`. Polar finds
`u_m` by searching the re-rendered turn for its end; here a turn joins only where its prompt *is* `p_m a_m u_m`, so
nothing is searched and nothing assumed. `on_divergence` says what happens at any other turn:

- `split` (the default): the chain ends, a new trace begins with the turn's own prompt;
- `splice`: the published rule. Where the prompt still begins with `p_m`, the trace goes on with what follows the first
  end of turn in the re-rendering. From there on the row's context is not what the engine saw, and `splices` says
  where and why. A turn that the rule cannot join splits.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.tokens import TokenIds
from gangline.domain.trajectory import Trajectory
from gangline.trajectories.chains import (
    Chain,
    Turn,
    check_claims,
    find_chains,
    make_trajectory,
    new_messages_since,
    turns_of,
)

__all__ = ["PrefixMergingBuilder", "PrefixMergingConfig"]


class PrefixMergingConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    on_divergence: Literal["split", "splice"] = "split"
    """What to do where a turn's prompt is not its parent's context and more."""
    end_of_turn_ids: tuple[int, ...] = ()
    """Only for `splice`. Empty: the last sampled ids of the turns that ended by themselves."""
    strict: bool = False
    """Raise where a certificate claims what the ids do not bear out; else the chain splits, or the turn is masked."""


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
            rows = _spliced(chains, self.config.end_of_turn_ids or _end_of_turn_ids(tree))
        else:
            rows = [(chain, turns_of(chain)) for chain in chains]
        return make_trajectory(tree, rows, session_id=session_id, task_id=task_id, builder=self.name)


def _spliced(chains: list[Chain], end_ids: tuple[int, ...]) -> list[tuple[Chain, list[Turn]]]:
    """Join each chain to the row that ends with its first turn's parent, where the published rule can."""
    rows: list[tuple[Chain, list[Turn]]] = []
    open_ends: dict[str, list[Turn]] = {}
    for chain in chains:
        turns = turns_of(chain)
        first, last = chain.completions[0], chain.completions[-1]
        before = open_ends.get(first.parent_id or "")
        new_ids = None if before is None else _published_context(before[-1].completion, chain, end_ids)
        if before is None or new_ids is None:
            rows.append((chain, turns))
            before = turns
        else:
            del open_ends[before[-1].completion.completion_id]
            joint = Turn(first, new_ids, new_messages_since(before[-1].completion, first), spliced=True)
            before += [joint, *turns[1:]]
        if last.status == "complete":
            open_ends[last.completion_id] = before
    return rows


def _published_context(before: Completion, chain: Chain, end_ids: tuple[int, ...]) -> TokenIds | None:
    """Polar's `u_m`: what follows the first end of turn in the re-rendered tail; None where the rule does not join."""
    first = chain.completions[0]
    num_before = CompletionTree.num_prompt_ids(before)
    if first.status != "complete" or first.branch_key != before.branch_key or first.prompt_shared < num_before:
        return None
    tail = chain.prompt_ids[num_before:]
    ends = np.flatnonzero(np.isin(tail, end_ids))
    if len(ends) == 0:
        return None
    closed = len(before.sampled_ids) > 0 and int(before.sampled_ids[-1]) in end_ids
    return tail[int(ends[0]) + (1 if closed else 0) :]


def _end_of_turn_ids(tree: CompletionTree) -> tuple[int, ...]:
    """Last sampled ids of the turns that ended by themselves, not by a stop string or a limit."""
    found: set[int] = set()
    for completion in tree:
        certificate = completion.certificate
        if certificate.finish_reason not in ("stop", "tool_calls") or len(completion.sampled_ids) == 0:
            continue
        last = int(completion.sampled_ids[-1])
        if certificate.stop_reason in (None, str(last)):
            found.add(last)
    return tuple(sorted(found))
