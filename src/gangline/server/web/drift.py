"""Drift: how a call deviates from the tokens or messages of the call it continues.

A record stores only the new messages of a request. Messages equivalent to recorded ones are stored as sampled, so the
harness's own wording of an echoed reply is not recorded. The certificate's cause was determined by comparing with that
wording when the call was made.
"""

from __future__ import annotations

import msgspec

from gangline.domain.completion import Completion, CompletionTree, DivergenceCause, PromptSource
from gangline.domain.conversation import Message
from gangline.domain.tokens import TokenIds
from gangline.server.web.contents import shortened
from gangline.server.web.outline import CallLine, OpenedSession
from gangline.server.web.tokens import TokenBytes

_BEFORE = 16
_AFTER = 64


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Some ids of a longer sequence."""

    ids: tuple[int, ...]
    text: str
    """Their text; an id with unknown bytes is shown as `[id]`."""
    num_left_out: int
    """Number of further ids."""


class TokenDrift(msgspec.Struct, frozen=True, kw_only=True):
    """The first token of a prompt that differs from the context it should continue, and its surroundings."""

    first: int
    """Its index in that context."""
    in_call: int
    """Number of the call whose record contains the token there."""
    is_sampled: bool
    """Whether that call sampled it; otherwise it is part of its prompt."""
    num_context_ids: int
    """Length of the context to be continued."""
    alike: Stretch
    """The end of the common part."""
    recorded: Stretch
    """The context from there on, which stitching would have kept."""
    prompted: Stretch
    """The prompt from there on, as it was stitched or rendered."""


class HistoryChange(msgspec.Struct, frozen=True, kw_only=True):
    """The client's change to a conversation that it would otherwise have continued."""

    origin: int
    """Number of the call that it would have continued."""
    index: int | None
    """Index of the first message that differs; None if the change precedes all messages."""
    recorded: Message | None
    """The message there in the origin's conversation; None if there is none."""
    sent: Message | None
    """The message there in this request; None if there is none."""
    tools: tuple[str, ...]
    """Names of tools that only one of them has, or that are defined differently."""


class CallDrift(msgspec.Struct, frozen=True, kw_only=True):
    """One call compared with the call it continues."""

    number: int
    parent: int | None
    prompt_source: PromptSource
    """Source of the prompt's ids: `engine` and `rendered` are the templates of the engine and of Gangline."""
    cause: DivergenceCause | None
    fallback: str | None
    """Why the messages were rendered although the engine accepts ids."""
    num_known_messages: int
    """Number of the request's messages equivalent to the parent's conversation. Their wording is not recorded."""
    sent: tuple[Message, ...]
    """The other messages of the request, as sent by the harness."""
    tokens: TokenDrift | None
    """None if the prompt begins with the parent's whole context, or there is no parent."""
    change: HistoryChange | None
    """None if the client did not change a recorded conversation."""


def drifts(line: CallLine) -> bool:
    """Whether there is a difference to display."""
    return line.certificate.context == "diverged" or line.relation == "changed"


def call_drift(session: OpenedSession, number: int, known: TokenBytes) -> CallDrift:
    """Blocking; milliseconds per million tokens. known: bytes of token ids.

    Raises: IndexError if there is no such call.
    """
    call, line, tree = session.calls[number], session.outline.calls[number], session.tree
    return CallDrift(
        number=number,
        parent=line.parent,
        prompt_source=call.certificate.prompt_source,
        cause=call.certificate.cause or call.lineage.cause,
        fallback=call.certificate.fallback,
        num_known_messages=call.messages_shared,
        sent=tuple(map(shortened, call.new_messages)),
        tokens=_token_drift(session, call, known) if call.certificate.context == "diverged" else None,
        change=None if line.relation != "changed" or line.origin is None else _change(tree, call, session, line.origin),
    )


def _token_drift(session: OpenedSession, call: Completion, known: TokenBytes) -> TokenDrift | None:
    tree = session.tree
    if call.parent_id is None:
        return None
    context = tree.context_ids(tree[call.parent_id])
    first = call.prompt_shared
    holder, is_sampled = _holder(tree, call.parent_id, first)
    start = max(0, first - _BEFORE)
    return TokenDrift(
        first=first,
        in_call=next(line.number for line in session.outline.calls if line.completion_id == holder),
        is_sampled=is_sampled,
        num_context_ids=len(context),
        alike=_stretch(context[start:first], known, start),
        recorded=_stretch(context[first : first + _AFTER], known, max(0, len(context) - first - _AFTER)),
        prompted=_stretch(call.prompt_suffix_ids[:_AFTER], known, max(0, len(call.prompt_suffix_ids) - _AFTER)),
    )


def _holder(tree: CompletionTree, completion_id: str, position: int) -> tuple[str, bool]:
    """(completion that owns the id at `position` of this one's context, whether it sampled the id)."""
    held = tree[completion_id]
    while position < held.prompt_shared and held.parent_id is not None:
        held = tree[held.parent_id]
    return held.completion_id, position >= tree.num_prompt_ids(held)


def _stretch(ids: TokenIds, known: TokenBytes, num_left_out: int) -> Stretch:
    held = ids.tolist()
    text = b"".join(known[one] if one in known else f"[{one}]".encode() for one in held)
    return Stretch(ids=tuple(held), text=text.decode(errors="replace"), num_left_out=num_left_out)


def _change(tree: CompletionTree, call: Completion, session: OpenedSession, origin: int) -> HistoryChange:
    before = session.calls[origin]
    index = call.lineage.first_change
    theirs, ours = (*tree.messages(before), before.response), tree.messages(call)
    old, new = ({tool.name: tool for tool in tree.tools(one)} for one in (before, call))
    return HistoryChange(
        origin=origin,
        index=index,
        recorded=None if index is None or index >= len(theirs) else shortened(theirs[index]),
        sent=None if index is None or index >= len(ours) else shortened(ours[index]),
        tools=tuple(sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))),
    )
