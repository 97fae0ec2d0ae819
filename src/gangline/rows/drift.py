"""The drift report: calls that did not continue exactly the tokens sampled before, by place and cause. Pure.

A conversation can break in two ways. `diverged`: the client sent the same history, but the engine's rendering of it
does not begin with the sampled ids. `changed`: the client itself edited the history. Both begin a new row; no sampled
token is lost, but the prompt is computed, stored and trained on again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from statistics import median
from typing import Literal, TypeVar

import msgspec

from gangline.domain.completion import Completion, CompletionTree, Context, DivergenceCause, PromptSource
from gangline.domain.errors import BuilderError
from gangline.rows.renderings import count_renderings

Key = TypeVar("Key", bound=Hashable)


class CallDrift(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of one completion that the report needs."""

    session_id: str
    completion_id: str
    model: str
    dialect: str
    aborted: bool
    prompt_source: PromptSource
    context: Context
    changed: bool
    """The client edited the history; otherwise the call would continue an earlier one."""
    cause: DivergenceCause | None
    """Cause of a break of either kind."""
    first_divergence: int | None
    num_parent_ids: int
    """Ids of the parent's context; 0 without a parent."""
    num_prompt_ids: int
    num_sampled_ids: int
    fallback: str | None
    as_rendered: bool | None
    unlike_rendering: str | None
    parse: str
    finish_reason: str
    untrainable: str | None


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """One call that begins a row although its conversation had begun before."""

    session_id: str
    completion_id: str
    kind: Literal["diverged", "changed"]
    cause: DivergenceCause
    first_divergence: int | None
    """Index into the parent's context of the first id that differs; None for `changed`."""
    num_parent_ids: int
    num_prompt_ids: int
    fallback: str | None


class DriftReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are of completions unless a name indicates otherwise."""

    num_sessions: int
    num_completions: int
    num_aborted: int
    num_sampled_tokens: int
    contexts: dict[str, int]
    """first, exact, diverged."""
    num_changed: int
    """Calls with any context whose history the client edited."""
    exact_share: float | None
    """Share of exact, unchanged calls among the calls whose conversation had begun before; None without such calls."""
    prompt_sources: dict[str, int]
    causes: dict[str, int]
    """Causes of the breaks of both kinds."""
    fallbacks: dict[str, int]
    """Why calls were rendered by the engine although it takes ids."""
    renderings: dict[str, int]
    """Stitched calls: `as_rendered`, `not_as_rendered`, `not_compared` with the template's rendering."""
    unlike_renderings: dict[str, int]
    """Difference from the template's rendering -> stitched calls."""
    parses: dict[str, int]
    finish_reasons: dict[str, int]
    untrainable: dict[str, int]
    """Reason -> completions without trainable tokens."""
    num_untrainable_tokens: int
    num_repeated_tokens: int
    """Prompt ids of all breaks: the cost of splitting, in ids that another row already contains, or nearly."""
    num_forgotten_tokens: int
    """Ids of parents' contexts from the first difference on: computed once and useless for the next call."""
    median_first_divergence: float | None
    """Median position of the divergence, as a share of the parent's context."""
    breaks: tuple[Break, ...]


def call_drifts(completions: Iterable[Completion]) -> list[CallDrift]:
    """Returns one session's completions, in commit order.

    Raises: BuilderError when they do not fit together.
    """
    try:
        tree = CompletionTree(completions)
    except ValueError as error:
        raise BuilderError(f"the journal is not a tree of completions: {error}") from error
    return [_call_drift(tree, completion) for completion in tree]


def _call_drift(tree: CompletionTree, completion: Completion) -> CallDrift:
    certificate, lineage = completion.certificate, completion.lineage
    changed = lineage.relation == "changed"
    return CallDrift(
        session_id=completion.session_id,
        completion_id=completion.completion_id,
        model=completion.model,
        dialect=completion.dialect,
        aborted=completion.status == "aborted",
        prompt_source=certificate.prompt_source,
        context=certificate.context,
        changed=changed,
        cause=(lineage.cause if changed else None) or certificate.cause,
        first_divergence=certificate.first_divergence,
        num_parent_ids=0 if completion.parent_id is None else tree.num_context_ids(completion.parent_id),
        num_prompt_ids=tree.num_prompt_ids(completion),
        num_sampled_ids=len(completion.sampled_ids),
        fallback=certificate.fallback,
        as_rendered=certificate.as_rendered,
        unlike_rendering=certificate.unlike_rendering,
        parse=certificate.parse,
        finish_reason=certificate.finish_reason,
        untrainable=certificate.untrainable,
    )


def drift_report(calls: Iterable[CallDrift]) -> DriftReport:
    """Summarise the calls of any number of sessions."""
    held = list(calls)
    contexts = Counter(call.context for call in held)
    breaks = tuple(_break(call) for call in held if call.changed or call.context == "diverged")
    diverged = [break_ for break_ in breaks if break_.first_divergence is not None and break_.num_parent_ids]
    num_exact = sum(call.context == "exact" and not call.changed for call in held)
    num_followed = num_exact + len(breaks)
    return DriftReport(
        num_sessions=len({call.session_id for call in held}),
        num_completions=len(held),
        num_aborted=sum(call.aborted for call in held),
        num_sampled_tokens=sum(call.num_sampled_ids for call in held),
        contexts=dict(contexts),
        num_changed=sum(call.changed for call in held),
        exact_share=num_exact / num_followed if num_followed else None,
        prompt_sources=_counted(call.prompt_source for call in held),
        causes=_counted(break_.cause for break_ in breaks),
        fallbacks=_counted(call.fallback for call in held),
        renderings=count_renderings(held),
        unlike_renderings=_counted(call.unlike_rendering for call in held),
        parses=_counted(call.parse for call in held),
        finish_reasons=_counted(call.finish_reason for call in held),
        untrainable=_counted(call.untrainable for call in held),
        num_untrainable_tokens=sum(call.num_sampled_ids for call in held if call.untrainable is not None),
        num_repeated_tokens=sum(break_.num_prompt_ids for break_ in breaks),
        num_forgotten_tokens=sum(one.num_parent_ids - (one.first_divergence or 0) for one in diverged),
        median_first_divergence=(
            median((one.first_divergence or 0) / one.num_parent_ids for one in diverged) if diverged else None
        ),
        breaks=breaks,
    )


def drift_by(calls: Iterable[tuple[Key, CallDrift]]) -> dict[Key, DriftReport]:
    """Returns a report per key, in order of first appearance."""
    grouped: dict[Key, list[CallDrift]] = {}
    for key, call in calls:
        grouped.setdefault(key, []).append(call)
    return {key: drift_report(group) for key, group in grouped.items()}


def _break(call: CallDrift) -> Break:
    return Break(
        session_id=call.session_id,
        completion_id=call.completion_id,
        kind="changed" if call.changed else "diverged",
        cause=call.cause or "unknown",
        first_divergence=call.first_divergence,
        num_parent_ids=call.num_parent_ids,
        num_prompt_ids=call.num_prompt_ids,
        fallback=call.fallback,
    )


def _counted(values: Iterable[str | None]) -> dict[str, int]:
    """Returns counts, most frequent first; None is not counted."""
    return dict(Counter(value for value in values if value is not None).most_common())
