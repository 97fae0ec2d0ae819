"""A trace as runs of tokens, for display: prompt, context between turns, and each turn's sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from gangline.domain.trajectory import Trace

_FROM: dict[str, str] = {
    "sibling": "the prompt of {origin} again",
    "retry": "the prompt of {origin} again, which was aborted",
    "changed": "would continue from {origin}, but {cause}{where}",
    "spawned": "spawned by a tool call of {origin}",
    "compacted": "continues from the summary in {origin}",
}
"""Description of a trace's beginning by its first call's relation, if its ids do not explain it."""


@dataclass(frozen=True)
class Run:
    """Adjacent tokens of one kind."""

    kind: Literal["prompt", "context", "sampled"]
    ids: list[int]
    logprobs: list[float] | None
    """[len(ids)] of a trained turn; None for tokens that are not trained on."""
    turn: int
    """The turn that these tokens belong or lead to."""
    spliced: bool = False
    """Whether this context differs from the engine's."""


def runs_of(trace: Trace) -> Iterator[Run]:
    yield Run("prompt", trace.prompt_ids.tolist(), None, 0)
    splices = {splice.completion_id for splice in trace.splices}
    at = 0
    for index, span in enumerate(trace.spans):
        if span.start > at:
            ids = trace.response_ids[at : span.start].tolist()
            yield Run("context", ids, None, index, span.completion_id in splices)
        turn = slice(span.start, span.end)
        trained = bool(np.any(trace.loss_mask[turn]))
        logprobs = trace.response_logprobs[turn].tolist() if trained else None
        yield Run("sampled", trace.response_ids[turn].tolist(), logprobs, index)
        at = span.end


def elided(run: Run, *, head: int, tail: int) -> tuple[int, int]:
    """Range `[start, end)` to leave out of a long run; empty if the run is short."""
    num = len(run.ids)
    return (num, num) if num <= head + tail + 1 else (head, num - tail)


def standing(trace: Trace) -> str:
    """The beginning of a trace, and the reason for it."""
    lineage = trace.lineage
    reason = f" ({lineage.reason})" if lineage.reason and lineage.relation in ("root", "changed") else ""
    return _beginning(trace) + reason


def _beginning(trace: Trace) -> str:
    first, lineage = trace.certificates[0], trace.lineage
    if lineage.relation not in ("root", "continuation", "branch"):
        return _FROM[lineage.relation].format(
            origin=lineage.origin_id,
            cause=lineage.cause,
            where="" if lineage.first_change is None else f" at message {lineage.first_change}",
        )
    if trace.parent_trace_id is None:
        return "a new conversation"
    if first.context == "diverged":
        where = "" if first.first_divergence is None else f" at id {first.first_divergence}"
        return f"split from {trace.parent_trace_id}{where}: {first.cause or 'unknown'}"
    return f"branches off {trace.parent_trace_id} with its context unchanged"
