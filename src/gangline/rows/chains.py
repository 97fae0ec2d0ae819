"""Groups completions into exact chains, and makes the trace of a run of turns.

Laws that every builder here keeps:
- every completion is a turn of exactly one trace, so every sampled token is in exactly one trace, once, in order;
- a token has `loss_mask = 1` only when it was sampled by a complete, trainable completion; the reason why a turn is
  masked is in its certificate (`untrainable`);
- the ids before a turn are the ids that the engine conditioned it on, except after a declared splice.

A call whose prompt has images without evidence (`Certificate.images`) does not extend a chain without such images, and
no row that contains such a call is trained on.
An aborted completion extends no chain, and none extends it: it has its own trace, whose mask is all 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict

from gangline.domain.completion import MEDIA, Certificate, Completion, CompletionTree
from gangline.domain.contracts import Builder, DropsTurns
from gangline.domain.conversation import Message
from gangline.domain.errors import BuilderError
from gangline.domain.images import PlacedImage
from gangline.domain.tokens import LossMask, TokenIds, Versions, token_ids
from gangline.domain.trajectory import Splice, Trace, TraceRole, Trajectory, TurnSpan
from gangline.rows.lineage import CallRole, assign_roles


def built(builder: Builder, completions: Iterable[Completion], *, session_id: str, task_id: str) -> Trajectory:
    """Build a trajectory. Raises: BuilderError, and ValueError when the completions do not fit together."""
    trajectory = builder.build(CompletionTree(completions), session_id=session_id, task_id=task_id)
    drops_turns = builder.drops_turns if isinstance(builder, DropsTurns) else None
    return msgspec.structs.replace(trajectory, drops_turns=drops_turns)


class BuilderConfig(BaseModel):
    """Options of every builder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    strict: bool = False
    """Raise if a certificate's claims contradict the ids; otherwise the chain splits, or the turn is masked with a
    reason."""
    roles: tuple[TraceRole, ...] | None = None
    """Turns of other roles are masked, and their certificates have the reason. None: every role is trained on."""
    engine_role: str | None = None
    """The role whose model is trained, if roles have their own engines; None: the policy. Turns of other models are
    masked, and their certificates have the reason."""


@dataclass(slots=True)
class Chain:
    """Completions whose prompts each begin with every id before them."""

    completions: list[Completion]
    prompt_ids: TokenIds = field(default_factory=token_ids)
    """Prompt ids of the first completion."""
    context_ids: TokenIds = field(default_factory=token_ids)
    """[T] `prompt_ids`, then everything up to the last sampled id."""


@dataclass(slots=True)
class Turn:
    """One completion in a trace: the new context since the previous turn, then the sampled ids."""

    completion: Completion
    new_ids: TokenIds
    new_messages: tuple[Message, ...]
    spliced: bool = False


def is_exact(tree: CompletionTree, completion: Completion) -> bool:
    """Whether the prompt begins with every id of the parent's context: by the ids, and by the certificate."""
    if completion.parent_id is None or completion.certificate.context != "exact":
        return False
    return completion.prompt_shared == tree.num_context_ids(completion.parent_id)


def why_masked(completion: Completion, engine_role: str | None = None) -> str | None:
    """Returns why no token of this completion may be trained on; None when all may. engine_role: see
    `BuilderConfig`."""
    if completion.status == "aborted":
        return completion.certificate.untrainable or "aborted: the call ended before its reply did"
    if completion.certificate.untrainable is not None:
        return completion.certificate.untrainable
    if len(completion.sampled_ids) == 0:
        return "no token was sampled"
    if len(completion.logprobs) != len(completion.sampled_ids):
        return f"{len(completion.logprobs)} log-probs for {len(completion.sampled_ids)} sampled ids"
    if not np.isfinite(completion.logprobs).all():
        return "a log-prob is not finite"
    answered_by = completion.certificate.engine_role
    if answered_by != engine_role:
        return "engine of the policy" if answered_by is None else f"engine of role {answered_by}"
    if completion.of_environment and engine_role is None:
        return "call of an environment, not of the agent"
    return None


def check_claims(tree: CompletionTree) -> None:
    """Raises: BuilderError when a certificate's claims contradict the ids."""
    for completion in tree:
        claims_exact = completion.certificate.context == "exact"
        if claims_exact and not is_exact(tree, completion):
            raise BuilderError(f"{completion.completion_id}: certified exact, but its prompt differs from its parent")
        if completion.trainable and (reason := why_masked(completion)) is not None:
            raise BuilderError(f"{completion.completion_id}: certified trainable, but {reason}")


def find_chains(tree: CompletionTree, *, merge: bool) -> list[Chain]:
    """Returns chains with every completion in exactly one; chains are in commit order of their first completion.

    With `merge` the first committed exact child of a completion extends its chain; later siblings start separate
    chains, whose prompt is the shared context. Linear in the ids of all chains together.
    """
    chains: list[Chain] = []
    chain_of: dict[str, Chain] = {}
    open_ends: dict[str, Chain] = {}
    for completion in tree:
        chain = open_ends.pop(completion.parent_id or "", None) if merge and _extends(tree, completion) else None
        if chain is None:
            chain = Chain([completion])
            chains.append(chain)
        else:
            chain.completions.append(completion)
        chain_of[completion.completion_id] = chain
        if completion.status == "complete":
            open_ends[completion.completion_id] = chain
    for chain in chains:
        _fill_ids(chain, chain_of)
    return chains


def _extends(tree: CompletionTree, completion: Completion) -> bool:
    if completion.status != "complete" or completion.parent_id is None:
        return False
    parent = tree[completion.parent_id]
    if _has_media(completion) and not _has_media(parent):
        return False  # the tokens before the first image are trained on, in their own row
    return (
        parent.branch_key == completion.branch_key
        and is_exact(tree, completion)
        and _placed(completion)[: len(_placed(parent))] == _placed(parent)  # equal ids can represent other pixels
    )


def _has_media(completion: Completion) -> bool:
    return completion.certificate.untrainable in MEDIA


def _placed(completion: Completion) -> tuple[PlacedImage, ...]:
    evidence = completion.certificate.images
    return () if evidence is None else evidence.placed


def _fill_ids(chain: Chain, chain_of: dict[str, Chain]) -> None:
    """Concatenate the chain's ids. A parent's context is a prefix of its own chain's ids, which began and was filled
    earlier."""
    first = chain.completions[0]
    shared = token_ids() if first.parent_id is None else chain_of[first.parent_id].context_ids[: first.prompt_shared]
    pieces = [shared]
    for completion in chain.completions:
        pieces += [completion.prompt_suffix_ids, completion.sampled_ids]
    chain.context_ids = np.concatenate(pieces)
    chain.prompt_ids = chain.context_ids[: CompletionTree.num_prompt_ids(first)]


def turns_of(chain: Chain) -> list[Turn]:
    """Returns the chain's turns. An exact child's suffix *is* the text between its parent's sampled ids and its own."""
    first, *rest = chain.completions
    turns = [Turn(first, token_ids(), ())]
    before = first
    for completion in rest:
        turns.append(Turn(completion, completion.prompt_suffix_ids, new_messages_since(before, completion)))
        before = completion
    return turns


def goes_on_from(before: Completion, completion: Completion) -> bool:
    """Whether a child's messages begin with its parent's whole request and reply.

    A call in tokens has no messages, so only its ids decide.
    """
    if completion.parent_id != before.completion_id:
        return False
    num_before = before.messages_shared + len(before.new_messages) + 1
    num_messages = completion.messages_shared + len(completion.new_messages)
    return num_messages == 0 or completion.messages_shared == num_before


def new_messages_since(before: Completion, completion: Completion) -> tuple[Message, ...]:
    """Returns the messages of `completion` after `before`'s request and reply (an echo of either may differ from the
    record)."""
    num_before = before.messages_shared + len(before.new_messages) + 1
    return completion.new_messages[max(0, num_before - completion.messages_shared) :]


def make_trajectory(
    tree: CompletionTree,
    rows: Sequence[tuple[Chain, list[Turn]]],
    *,
    session_id: str,
    task_id: str,
    builder: str,
    config: BuilderConfig,
) -> Trajectory:
    """Make the traces of `rows`: the chain that each one begins with, and its turns."""
    trace_id_of = {
        turn.completion.completion_id: f"{session_id}.t{index}"
        for index, (_, turns) in enumerate(rows)
        for turn in turns
    }
    role_of = assign_roles(tree)
    masked = {
        one.completion_id: why_masked(one, config.engine_role) or _left_out(role_of[one.completion_id], config.roles)
        for one in tree
    }
    for _, turns in rows:
        media = next((turn.completion.certificate.untrainable for turn in turns if _has_media(turn.completion)), None)
        if media is not None:  # a row whose ids represent pixels is not trained on
            masked |= {turn.completion.completion_id: media for turn in turns}
        elif any(turn.spliced for turn in turns) and any(_placed(turn.completion) for turn in turns):
            masked |= {turn.completion.completion_id: "images" for turn in turns}  # a splice moves their placeholders
    traces: list[Trace] = []
    for chain, turns in rows:
        first = turns[0].completion
        trace = _make_trace(
            tree,
            chain,
            turns,
            trace_id=trace_id_of[first.completion_id],
            session_id=session_id,
            role_of=role_of,
            masked=masked,
            parent_trace_id=None if first.parent_id is None else trace_id_of[first.parent_id],
        )
        traces.append(trace)
    return Trajectory(
        session_id=session_id, task_id=task_id, builder=builder, traces=tuple(traces), num_completions=len(tree)
    )


def _left_out(call: CallRole, roles: Collection[TraceRole] | None) -> str | None:
    if roles is None or call.role in roles:
        return None
    return f"role {call.role}: the builder trains on {', '.join(roles) or 'none'} only"


def _make_trace(
    tree: CompletionTree,
    chain: Chain,
    turns: Sequence[Turn],
    *,
    trace_id: str,
    session_id: str,
    role_of: Mapping[str, CallRole],
    masked: Mapping[str, str | None],
    parent_trace_id: str | None,
) -> Trace:
    first, last = turns[0].completion, turns[-1].completion
    response_ids = np.concatenate([ids for turn in turns for ids in (turn.new_ids, turn.completion.sampled_ids)])
    loss_mask: LossMask = np.zeros(len(response_ids), np.int8)
    logprobs = np.zeros(len(response_ids), np.float32)
    versions: Versions = np.full(len(response_ids), -1, np.int32)
    texts: list[str | None] = [None] * len(response_ids)
    spans: list[TurnSpan] = []
    splices: list[Splice] = []
    at = 0
    for turn in turns:
        completion = turn.completion
        start = at + len(turn.new_ids)
        end = start + len(completion.sampled_ids)
        if masked[completion.completion_id] is None:
            loss_mask[start:end] = 1
            logprobs[start:end] = completion.logprobs
            _write_versions(versions[start:end], completion.certificate)
        if completion.sampled_texts:
            texts[start:end] = completion.sampled_texts
        if turn.spliced:
            splices.append(Splice(completion.completion_id, at, completion.certificate.cause or "unknown"))
        role = role_of[completion.completion_id].role
        agent_role: str | None = completion.metadata.get("agent_role")
        spans.append(
            TurnSpan(completion.completion_id, start, end, role, agent_role=agent_role, model=completion.model)
        )
        at = end
    return Trace(
        trace_id=trace_id,
        session_id=session_id,
        prompt_ids=chain.prompt_ids,
        response_ids=response_ids,
        loss_mask=loss_mask,
        response_logprobs=logprobs,
        response_versions=versions,
        response_texts=tuple(texts) if any(turn.completion.sampled_texts for turn in turns) else (),
        spans=tuple(spans),
        prompt_messages=tree.messages(first),
        response_messages=_response_messages(turns),
        tools=tree.tools(first),
        finish_reason=last.certificate.finish_reason,
        role=role_of[first.completion_id].role,
        lineage=role_of[first.completion_id].lineage,
        parent_trace_id=parent_trace_id,
        certificates=tuple(_certificate(turn.completion, masked) for turn in turns),
        splices=tuple(splices),
        untrainable=None if loss_mask.any() else _why_untrainable(turns, masked),
    )


def _write_versions(out: Versions, certificate: Certificate) -> None:
    """Tokens outside all spans keep -1: their version is unknown."""
    for span in certificate.version_spans:
        out[span.start : span.end] = span.version


def _certificate(completion: Completion, masked: Mapping[str, str | None]) -> Certificate:
    reason = masked[completion.completion_id]
    if reason == completion.certificate.untrainable:
        return completion.certificate
    return msgspec.structs.replace(completion.certificate, untrainable=reason)


def _why_untrainable(turns: Iterable[Turn], masked: Mapping[str, str | None]) -> str:
    reasons = dict.fromkeys(masked[turn.completion.completion_id] or "" for turn in turns)
    return "; ".join(reasons)


def _response_messages(turns: Sequence[Turn]) -> tuple[Message, ...]:
    return tuple(message for turn in turns for message in (*turn.new_messages, turn.completion.response))
