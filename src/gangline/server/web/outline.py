"""A session as listed by the page: its chains, and one line per model call, without messages and tokens.

A chain is a run of calls of which each exactly continues the tokens of the previous one. Sub-agents, compactions,
edited histories and retries begin separate chains, with the reason. A session of 500 calls takes about 200 kB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from gangline.domain.completion import Certificate, Completion, CompletionTree, Relation
from gangline.domain.conversation import Message, ToolCall, message_text
from gangline.domain.errors import Failure
from gangline.domain.lifecycle import Outcome, Stage
from gangline.domain.session import HarnessExit, SessionResult, StageTiming
from gangline.domain.trajectory import TraceRole
from gangline.domain.unshown import unshown, unshown_lines
from gangline.domain.usage import SessionUsage
from gangline.domain.views import SessionView
from gangline.rows.chains import is_exact, why_masked
from gangline.rows.forks.calls import recorded_calls
from gangline.rows.lineage import CallRole, assign_roles

_PREVIEW_CHARS = 160

_Place = Callable[[Completion], tuple[str | None, float | None, str | None]]
"""(trace id, score, reason for masking) of a call."""


class CallLine(msgspec.Struct, frozen=True, kw_only=True):
    """One model call, without its messages and tokens."""

    number: int
    """Position in commit order, from 0."""
    completion_id: str
    turn: int | None
    """The session's model call that it answers, counted in the order of answers from 1: where a fork can begin. None
    for an abandoned reply.
    """
    chain: int
    parent: int | None
    """Number of the call whose conversation it continues."""
    role: TraceRole
    agent_role: str | None
    relation: Relation
    origin: int | None
    reason: str
    """The evidence for the relation."""
    status: str
    model: str
    started_at: float
    """Unix time, UTC, seconds."""
    finished_at: float
    num_prompt_ids: int
    num_new_ids: int
    """Prompt ids that are not in the parent's context."""
    num_sampled_ids: int
    mean_logprob: float | None
    lowest_logprob: float | None
    versions: tuple[int, ...]
    """Policy versions that sampled it, in order."""
    trace: str | None
    """Id of the row with its tokens; None if no row contains them."""
    masked: str | None
    """Why none of its tokens is trained on; None if they are."""
    score: float | None
    """The evaluator's score of this call."""
    preview: str
    """The beginning of the reply's text, on one line."""
    tools: tuple[str, ...]
    """Names of the tools that the reply calls."""
    unshown: tuple[str, ...]
    """Parts of the request that the chat template does not render for the model, in words."""
    certificate: Certificate
    num_forgotten_ids: int
    """Ids of the parent's context from the first difference on; 0 for an exact call."""


class ChainLine(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that continue each other's tokens exactly."""

    number: int
    role: TraceRole
    relation: Relation
    """How its first call derives from an earlier one."""
    origin: int | None
    """Number of that earlier call."""
    reason: str
    calls: tuple[int, ...]
    num_sampled_ids: int


class KeptFile(msgspec.Struct, frozen=True):
    """A file stored with the result."""

    name: str
    num_bytes: int


class SessionOutline(msgspec.Struct, frozen=True, kw_only=True):
    """A session, down to its calls."""

    session_id: str
    task_id: str
    attempt: int
    node_id: str
    stage: Stage | None
    """Stage of a running session; None if it has ended."""
    outcome: Outcome | None
    """None while it runs."""
    failure: Failure | None
    reward: float | None
    reward_details: dict[str, Any]
    harness_exit: HarnessExit | None
    timings: tuple[StageTiming, ...]
    usage: SessionUsage | None
    limits: dict[str, str]
    unshown: tuple[str, ...]
    """Lines about tools and their results that the model was not shown, as of `gangline show`."""
    untrainable: dict[str, str]
    """trace id -> why the row must not be trained on."""
    files: tuple[KeptFile, ...]
    chains: tuple[ChainLine, ...]
    calls: tuple[CallLine, ...]


class OpenedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session with all data shared by its views."""

    files: Mapping[str, bytes]
    """Stored with the result; empty while it runs."""
    tree: CompletionTree
    calls: tuple[Completion, ...]
    """In commit order."""
    outline: SessionOutline


def open_session(result: SessionResult) -> OpenedSession:
    """Divide a result's calls into chains. Takes milliseconds per hundred calls.

    Raises: ValueError if the calls do not form a tree.
    """
    tree = CompletionTree(result.completions)
    lines = _call_lines(tree, _Spans(result).of)
    traces = () if result.trajectory is None else result.trajectory.traces
    outline = SessionOutline(
        session_id=result.session_id,
        task_id=result.task_id,
        attempt=result.attempt,
        node_id=result.node_id,
        stage=None,
        outcome=result.outcome,
        failure=result.failure,
        reward=result.reward,
        reward_details=result.reward_details,
        harness_exit=result.harness_exit,
        timings=result.timings,
        usage=result.usage,
        limits=result.limits,
        unshown=tuple(unshown_lines(result.completions)),
        untrainable={trace.trace_id: trace.untrainable for trace in traces if trace.untrainable is not None},
        files=tuple(KeptFile(name, len(content)) for name, content in sorted(result.artifacts.items())),
        chains=_chain_lines(lines),
        calls=lines,
    )
    return OpenedSession(files=result.artifacts, tree=tree, calls=tuple(tree), outline=outline)


def open_running(session: SessionView, attempt: int, completions: Iterable[Completion]) -> OpenedSession:
    """The same for a running session, from the calls recorded so far. It has no rows yet: a call is masked if no row
    can contain it.

    Raises: ValueError if the calls do not form a tree.
    """
    tree = CompletionTree(completions)
    lines = _call_lines(tree, lambda call: (None, None, why_masked(call)))
    outline = SessionOutline(
        session_id=session.session_id,
        task_id=session.task_id,
        attempt=attempt,
        node_id=session.node_id or "",
        stage=session.stage,
        outcome=None,
        failure=session.failure,
        reward=None,
        reward_details={},
        harness_exit=None,
        timings=(),
        usage=None,
        limits={},
        unshown=tuple(unshown_lines(tree)),
        untrainable={},
        files=(),
        chains=_chain_lines(lines),
        calls=lines,
    )
    return OpenedSession(files={}, tree=tree, calls=tuple(tree), outline=outline)


class _Spans:
    """Where each call is in the trajectory: its trace, the evaluator's score, and whether it is trained on."""

    def __init__(self, result: SessionResult) -> None:
        self._found: dict[str, tuple[str, float | None, bool, str | None]] = {}
        for trace in () if result.trajectory is None else result.trajectory.traces:
            for span, certificate in zip(trace.spans, trace.certificates, strict=True):
                is_trained = bool(trace.loss_mask[span.start : span.end].any())
                why = trace.untrainable or certificate.untrainable
                self._found[span.completion_id] = (trace.trace_id, span.score, is_trained, why)

    def of(self, call: Completion) -> tuple[str | None, float | None, str | None]:
        """See `_Place`."""
        found = self._found.get(call.completion_id)
        if found is None:
            return None, None, why_masked(call) or "in no row of the session"
        trace_id, score, is_trained, why = found
        return trace_id, score, None if is_trained else why or why_masked(call) or "masked by the builder"


def _call_lines(tree: CompletionTree, place: _Place) -> tuple[CallLine, ...]:
    calls = tuple(tree)
    numbers = {call.completion_id: number for number, call in enumerate(calls)}
    roles = assign_roles(tree)
    turns = {choice.completion_id: recorded.turn for recorded in recorded_calls(calls) for choice in recorded.choices}
    return tuple(
        _call_line(tree, call, number, chain, numbers, roles[call.completion_id], place, turns.get(call.completion_id))
        for number, (call, chain) in enumerate(zip(calls, _chains(tree, calls), strict=True))
    )


def _chains(tree: CompletionTree, calls: tuple[Completion, ...]) -> list[int]:
    """[number of calls] chain of each call. The first exact child of a call extends its chain."""
    chain_of: list[int] = []
    open_ends: dict[str, int] = {}
    num_chains = 0
    for call in calls:
        extends = call.status == "complete" and is_exact(tree, call)
        chain = open_ends.pop(call.parent_id or "", None) if extends else None
        if chain is None:
            chain, num_chains = num_chains, num_chains + 1
        chain_of.append(chain)
        if call.status == "complete":
            open_ends[call.completion_id] = chain
    return chain_of


def _call_line(
    tree: CompletionTree,
    call: Completion,
    number: int,
    chain: int,
    numbers: dict[str, int],
    known: CallRole,
    place: _Place,
    turn: int | None,
) -> CallLine:
    trace_id, score, masked = place(call)
    sampled = len(call.logprobs) > 0
    num_parent = 0 if call.parent_id is None else tree.num_context_ids(call.parent_id)
    return CallLine(
        number=number,
        completion_id=call.completion_id,
        turn=turn,
        chain=chain,
        parent=numbers.get(call.parent_id or ""),
        role=known.role,
        agent_role=call.metadata.get("agent_role"),
        relation=known.lineage.relation,
        origin=numbers.get(known.lineage.origin_id or ""),
        reason=known.lineage.reason,
        status=call.status,
        model=call.model,
        started_at=call.started_at,
        finished_at=call.finished_at,
        num_prompt_ids=tree.num_prompt_ids(call),
        num_new_ids=len(call.prompt_suffix_ids),
        num_sampled_ids=len(call.sampled_ids),
        mean_logprob=_finite(float(call.logprobs.mean())) if sampled else None,
        lowest_logprob=_finite(float(call.logprobs.min())) if sampled else None,
        versions=tuple(dict.fromkeys(span.version for span in call.certificate.version_spans if span.end > span.start)),
        trace=trace_id,
        masked=masked,
        score=score,
        preview=" ".join(message_text(call.response)[: 2 * _PREVIEW_CHARS].split())[:_PREVIEW_CHARS],
        tools=_tool_names(call.response),
        unshown=unshown(tree, call),
        certificate=call.certificate,
        num_forgotten_ids=num_parent - call.prompt_shared,
    )


def _tool_names(message: Message) -> tuple[str, ...]:
    return tuple(part.name for part in message.parts if isinstance(part, ToolCall))


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _chain_lines(calls: tuple[CallLine, ...]) -> tuple[ChainLine, ...]:
    grouped: dict[int, list[CallLine]] = {}
    for call in calls:
        grouped.setdefault(call.chain, []).append(call)
    return tuple(
        ChainLine(
            number=number,
            role=held[0].role,
            relation=held[0].relation,
            origin=held[0].parent if held[0].origin is None else held[0].origin,
            reason=held[0].reason,
            calls=tuple(call.number for call in held),
            num_sampled_ids=sum(call.num_sampled_ids for call in held),
        )
        for number, held in grouped.items()
    )
