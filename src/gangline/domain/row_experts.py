"""Routed experts of a row, put together from the records of its calls.

A record holds the positions that its parent's does not, so the experts of a context are found on the way up.
"""

from __future__ import annotations

import hashlib

import numpy as np

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.experts import ExpertArray, ExpertsMissing, RowExperts
from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trace

__all__ = ["context_experts", "expert_problem", "experts_of_trace", "experts_of_traces"]


def context_experts(tree: CompletionTree, completion: Completion) -> ExpertArray:
    """[T - 1, layers, chosen] of the prompt and the sampled ids, T in all: no layer has seen the last one.

    Raises: ExpertsMissing where a record lacks them, or holds other bytes than it certifies.
    """
    pieces: list[ExpertArray] = []
    at, want = completion, tree.num_context_ids(completion.completion_id) - 1
    while True:
        own = _own(at)
        start = at.certificate.routed_experts.start if at.certificate.routed_experts is not None else 0
        if start + len(own) < want:
            raise ExpertsMissing(f"{at.completion_id} holds experts to position {start + len(own)}, and not to {want}")
        if want > start:
            pieces.append(own[: want - start])
            want = start
        if want == 0:
            return np.concatenate(pieces[::-1]) if len(pieces) != 1 else pieces[0]
        if at.parent_id is None or want > at.prompt_shared:
            raise ExpertsMissing(f"{at.completion_id} holds experts from position {start} on only")
        at = tree[at.parent_id]


def _own(completion: Completion) -> ExpertArray:
    evidence = completion.certificate.routed_experts
    if evidence is None:
        raise ExpertsMissing(f"{completion.completion_id} was sampled without capture.routed_experts")
    if evidence.refused is not None:
        raise ExpertsMissing(f"{completion.completion_id}: {evidence.refused}")
    if hashlib.sha256(completion.routed_experts).hexdigest() != evidence.digest:
        raise ExpertsMissing(f"{completion.completion_id} holds other experts than its certificate says")
    return evidence.array(completion.routed_experts)


def experts_of_trace(tree: CompletionTree, trace: Trace) -> RowExperts:
    """Experts of a trace's whole prompt and its response, or why they are not known."""
    last = trace.spans[-1].completion_id
    if trace.splices:
        return RowExperts(missing="the row is spliced: its ids are not those that the engine had")
    if last not in tree:
        return RowExperts(missing=f"the record of {last} is not among the session's completions")
    try:
        return RowExperts.of(context_experts(tree, tree[last]))
    except ExpertsMissing as why:
        return RowExperts(missing=str(why))


def expert_problem(tree: CompletionTree, trace: Trace) -> str | None:
    """The experts that a trace is certified to have and has not; None where nothing is wrong, or none are certified."""
    evidence = trace.certificates[-1].routed_experts
    if evidence is None or evidence.refused is not None or trace.splices or trace.spans[-1].completion_id not in tree:
        return None
    return experts_of_trace(tree, trace).missing


def experts_of_traces(result: SessionResult) -> dict[str, RowExperts]:
    """trace id -> its experts; none where the session was sampled without `capture.routed_experts`."""
    traces = () if result.trajectory is None else result.trajectory.traces
    if all(one.routed_experts is None for trace in traces for one in trace.certificates):
        return {}
    tree = CompletionTree(result.completions)
    return {trace.trace_id: experts_of_trace(tree, trace) for trace in traces}
