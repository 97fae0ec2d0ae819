"""The main conversation of a session, from its first message to its last turn.

If the agent's program summarised or edited its history, the model saw a new, shorter conversation. Here both are
joined: the earlier messages, then the new ones of the later conversation. Side calls, sub-agents and requests for
summaries are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import Message, ToolCall, ToolDefinition, ToolResult, message_text
from gangline.rows.lineage import CallRole, assign_roles


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    messages: tuple[Message, ...]
    """Ends with the reply of the last turn."""
    tools: tuple[ToolDefinition, ...]
    num_prompt_messages: int
    """Messages of the first call's request."""
    num_tokens: int
    """Longest context of its calls; 0 if the engine reported no ids."""
    num_turns: int
    last: Completion


def main_conversation(completions: Iterable[Completion]) -> Conversation | None:
    """Returns None when no call of the session's main agent was answered."""
    tree = CompletionTree(completions)
    roles = assign_roles(tree)
    last = _last_turn(tree, roles)
    if last is None:
        return None
    views = _views(tree, roles, last)
    messages: tuple[Message, ...] = ()
    for view in views:
        messages = _joined(messages, view)
        messages += _results_after(tree, view.last) if view is not views[-1] else ()
    return Conversation(
        messages=messages,
        tools=tree.tools(last),
        num_prompt_messages=len(views[0].request),
        num_tokens=max(tree.num_context_ids(view.last.completion_id) for view in views),
        num_turns=sum(message.role == "assistant" for message in messages[len(views[0].request) :]),
        last=last,
    )


class _View(msgspec.Struct, frozen=True):
    """The part of the conversation that one segment shows at its end."""

    request: tuple[Message, ...]
    """Messages of the segment's first call."""
    after: tuple[Message, ...]
    """Replies and messages since."""
    last: Completion


def _last_turn(tree: CompletionTree, roles: dict[str, CallRole]) -> Completion | None:
    """Returns the last turn; of several choices the first, since it is unknown which one the agent used."""
    turns = [one for one in tree if one.status == "complete" and roles[one.completion_id].role == "main"]
    if not turns:
        return None
    return min((turn for turn in turns if _call(turn) == _call(turns[-1])), key=lambda one: one.choice_index)


def _call(completion: Completion) -> str:
    return completion.completion_id.partition(".")[0]


def _views(tree: CompletionTree, roles: dict[str, CallRole], last: Completion) -> list[_View]:
    """Returns the segments that lead to `last`, in order."""
    views: list[_View] = []
    at: Completion | None = last
    while at is not None:
        first = _beginning(tree, at)
        request, whole = tree.messages(first), (*tree.messages(at), at.response)
        views.append(_View(request, whole[len(request) :], at))
        at = _before(tree, roles, first)
    return views[::-1]


def _beginning(tree: CompletionTree, completion: Completion) -> Completion:
    """Returns the first call of its segment. An edited history may share its beginning with the previous segment."""
    while completion.parent_id is not None and completion.lineage.relation != "changed":
        completion = tree[completion.parent_id]
    return completion


def _before(tree: CompletionTree, roles: dict[str, CallRole], first: Completion) -> Completion | None:
    """Returns the last turn before the history was edited or summarised; None at the conversation's own beginning."""
    lineage = roles[first.completion_id].lineage
    if lineage.origin_id is None:
        return None
    origin = tree[lineage.origin_id]
    match lineage.relation:
        case "changed":
            return origin
        case "compacted" if origin.parent_id is not None:
            return tree[origin.parent_id]
        case "compacted":
            summarised = roles[origin.completion_id].lineage.origin_id
            return _last_main_before(tree, roles, origin) if summarised is None else tree[summarised]
        case "sibling" | "retry":
            return _before(tree, roles, _beginning(tree, origin))
        case _:
            return None


def _last_main_before(tree: CompletionTree, roles: dict[str, CallRole], end: Completion) -> Completion | None:
    found = None
    for one in tree:
        if one is end:
            break
        if one.status == "complete" and roles[one.completion_id].role == "main":
            found = one
    return found


def _joined(before: tuple[Message, ...], view: _View) -> tuple[Message, ...]:
    """Returns `before`, then the view's messages after the last one that `before` already contains."""
    there = Counter(map(_key, before))
    known = 0
    for number, message in enumerate(view.request, start=1):
        key = _key(message)
        if there[key]:
            there[key] -= 1
            known = number
    return (*before, *view.request[known:], *view.after)


def _results_after(tree: CompletionTree, turn: Completion) -> tuple[Message, ...]:
    """Returns the results of a turn's tool calls from the next request that has them, for example the request for a
    summary."""
    asked = {part.call_id for part in turn.response.parts if isinstance(part, ToolCall)}
    later = iter(tree)
    for one in later:
        if one is turn:
            break
    for one in later:
        parts = (part for message in one.new_messages for part in message.parts)
        found = tuple(part for part in parts if isinstance(part, ToolResult) and part.call_id in asked)
        if found:
            return (Message("tool", found),)
    return ()


def _key(message: Message) -> tuple[str, str, Sequence[str]]:
    """Returns the values by which messages are compared: an echo differs from the record in thinking and white
    space."""
    calls = tuple(part.call_id for part in message.parts if isinstance(part, ToolCall | ToolResult))
    return message.role, "".join(message_text(message).split()), calls
