"""Joins turns whose contexts are not exact, by the published rule. Source: Polar, 3.4.2.

With `p_m` the prompt ids and `a_m` the sampled ids of turn m: if `p_{m+1}` begins with `p_m`, the row continues after
`a_m` with the ids after the first end of turn in the rest of `p_{m+1}`. From there on the row's context differs from
the engine's; each such place is a `Splice` of the trace. A turn that the rule cannot join begins its own row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.tokens import TokenIds
from gangline.rows.chains import Chain, Turn, new_messages_since, turns_of

MayJoin = Callable[[Completion, Completion], bool]
"""(previous turn, turn) -> whether the builder's own rule lets the turn follow."""


def splice_chains(
    chains: list[Chain], end_ids: tuple[int, ...], may_join: MayJoin | None = None
) -> list[tuple[Chain, list[Turn]]]:
    """Join each chain to the row that ends with its first turn's parent, if the published rule can.

    chains: in commit order of their first turn. Returns rows: the chain that each one begins with, and its turns.
    """
    rows: list[tuple[Chain, list[Turn]]] = []
    open_ends: dict[str, list[Turn]] = {}
    for chain in chains:
        turns = turns_of(chain)
        first, last = chain.completions[0], chain.completions[-1]
        before = open_ends.get(first.parent_id or "")
        if before is not None and may_join is not None and not may_join(before[-1].completion, first):
            before = None
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
    """Returns Polar's `u_m`: the ids after the first end of turn in the re-rendered tail; None if the rule does not
    join."""
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


def end_of_turn_ids(tree: CompletionTree, engine_role: str | None) -> tuple[int, ...]:
    """Returns the last sampled ids of one model's turns that ended by themselves, not at a stop string or a limit."""
    found: set[int] = set()
    for completion in tree:
        certificate = completion.certificate
        if certificate.engine_role != engine_role or len(completion.sampled_ids) == 0:
            continue
        if certificate.finish_reason not in ("stop", "tool_calls"):
            continue
        last = int(completion.sampled_ids[-1])
        if certificate.stop_reason in (None, str(last)):
            found.add(last)
    return tuple(sorted(found))
