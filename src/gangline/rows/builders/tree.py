"""`tree`: a session as one prefix tree whose leaves are the chains of `prefix_merging`; for storage and tree attention.

The traces are `prefix_merging`'s, but a prompt contains only ids that no earlier trace contains: `shared_prefix` names
the trace that has the others, and `with_whole_prompts` (`gangline.rows.shared_prefixes`) restores them. Divergences
always split: a spliced row is not a path of the tree.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from gangline.domain.completion import CompletionTree
from gangline.domain.errors import InvalidRequest
from gangline.domain.tokens import Logprobs, LossMask, TokenIds, Versions
from gangline.domain.trajectory import Trace, Trajectory
from gangline.rows.chains import BuilderConfig, check_claims, find_chains, make_trajectory, turns_of
from gangline.rows.shared_prefixes import share_prefixes


class TreeConfig(BuilderConfig):
    """Options of every builder."""


class TreeBuilder:
    name: ClassVar[str] = "tree"
    Config: ClassVar[type[BaseModel]] = TreeConfig

    def __init__(self, config: TreeConfig | None = None) -> None:
        self.config = config or TreeConfig()

    def build(self, tree: CompletionTree, *, session_id: str, task_id: str) -> Trajectory:
        """Raises: BuilderError (only with `strict`)."""
        if self.config.strict:
            check_claims(tree)
        rows = [(chain, turns_of(chain)) for chain in find_chains(tree, merge=True)]
        whole = make_trajectory(
            tree, rows, session_id=session_id, task_id=task_id, builder=self.name, config=self.config
        )
        return msgspec.structs.replace(whole, traces=tuple(share_prefixes(whole.traces)))


class TokenTree(msgspec.Struct, frozen=True, kw_only=True):
    """All tokens of a session, each once, in the form for trainers with tree attention. Arrays are [N].

    A token attends to itself and to its ancestors: follow `parents`. Parents come before their children.
    """

    ids: TokenIds
    parents: NDArray[np.int32]
    """Index of the token before this one; -1 where a conversation begins."""
    depths: NDArray[np.int32]
    """Position of the token in its conversation; 0 where it begins."""
    loss_mask: LossMask
    logprobs: Logprobs
    """0.0 where masked."""
    versions: Versions
    """-1 where masked."""
    trace_starts: dict[str, int]
    """trace id -> index of the first token that the trace adds, in token order."""


def token_tree(trajectory: Trajectory) -> TokenTree:
    """Returns the tokens of a `tree` trajectory as flat arrays. For other builders, one path per trace with no shared
    part.

    Raises: InvalidRequest when a trace shares a prefix with a trace that does not come before it.
    """
    traces = trajectory.traces
    starts: dict[str, int] = {}
    before: dict[str, Trace] = {}
    parents: list[NDArray[np.int32]] = []
    depths: list[NDArray[np.int32]] = []
    num = 0
    for trace in traces:
        num_own = len(trace.prompt_ids) + len(trace.response_ids)
        chain = np.arange(num - 1, num + num_own - 1, dtype=np.int32)
        chain[:1] = _parent(trace, before, starts)
        parents.append(chain)
        depths.append(np.arange(num_own, dtype=np.int32) + np.int32(_num_shared(trace)))
        starts[trace.trace_id], before[trace.trace_id] = num, trace
        num += num_own
    return TokenTree(
        ids=_all([np.concatenate([trace.prompt_ids, trace.response_ids]) for trace in traces], np.int32),
        parents=_all(parents, np.int32),
        depths=_all(depths, np.int32),
        loss_mask=_all([_with_prompt(trace, trace.loss_mask, 0) for trace in traces], np.int8),
        logprobs=_all([_with_prompt(trace, trace.response_logprobs, 0) for trace in traces], np.float32),
        versions=_all([_with_prompt(trace, trace.response_versions, -1) for trace in traces], np.int32),
        trace_starts=starts,
    )


def _num_shared(trace: Trace) -> int:
    return 0 if trace.shared_prefix is None else trace.shared_prefix.num_ids


def _parent(trace: Trace, before: dict[str, Trace], starts: dict[str, int]) -> int:
    """Returns the index of the last id that `trace` shares; -1 when it shares none. The trace it names may itself share
    that id."""
    shared = trace.shared_prefix
    if shared is None:
        return -1
    holder = before.get(shared.trace_id)
    while holder is not None and shared.num_ids <= _num_shared(holder) and holder.shared_prefix is not None:
        holder = before[holder.shared_prefix.trace_id]
    if holder is None:
        raise InvalidRequest(f"{trace.trace_id} shares a prefix with {shared.trace_id}, which is not before it.")
    return starts[holder.trace_id] + shared.num_ids - 1 - _num_shared(holder)


A = TypeVar("A", bound=np.generic)


def _with_prompt(trace: Trace, values: NDArray[A], fill: int) -> NDArray[A]:
    """Returns the response's `values`, after `fill` for the trace's own part of the prompt."""
    return np.concatenate([np.full(len(trace.prompt_ids), fill, values.dtype), values])


def _all(parts: list[NDArray[A]], dtype: type[A]) -> NDArray[A]:
    """Like np.concatenate, but also for an empty list."""
    return np.concatenate(parts) if parts else np.empty(0, dtype)
