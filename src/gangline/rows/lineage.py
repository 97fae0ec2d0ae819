"""Determines the purpose of each call of a finished session: its role, and how its conversation began. A pure function
of the tree.

A *segment* is a root with its descendants. An *agent* is one or more segments that a reader would see as one
conversation. The rules use only the records, in this order:

1. A segment that continues an edited history, or has the prompt of an earlier call, belongs to that call's agent. So
   does a segment with other system text, tools or template, unless it is a *detour*: one call that was never continued,
   while the conversation continued without it (a classifier, a title, a summary).
2. A segment whose first messages quote an earlier reply, and which has the same model, tools and system text as that
   reply's conversation, belongs to its agent. If the reply had a history and was not continued itself, it was a
   `compaction`, and the segment is `compacted` from it.
3. A segment whose first request is the argument of an earlier tool call is `spawned`: a sub-agent. So is a segment that
   works (several calls, or tool calls) and whose last answer came back as a tool's result.
4. Of the other agents the one with most sampled tokens is `main`; agents with tools come before agents without, and
   agents that the client does not name before named ones. Agents that work with the same model, tools and system text
   are `main` too. Others that work, or that the client names, are sub-agents, and the rest is `side`. A conversation
   with the model of a role's own engines is `main` only if the policy answered no other conversation.

The evidence for a role other than `main` is in the `lineage.reason` of the segment's root, or of the compaction.

Evidence in a session's texts is a reply quoted at the beginning of another conversation, or a task handed over in a
tool call. Texts are compared with white space folded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from gangline.domain.completion import Completion, CompletionTree, Lineage
from gangline.domain.conversation import Message, Text, ToolCall, ToolResult, message_text
from gangline.domain.trajectory import TraceRole

_NEAR = 32
"""Calls before (or after) a segment that are searched for its origin (or its use)."""

_DIGITS = re.compile(r"\d+")

_QUOTE_CHARS = 40
"""A reply of this length is not in another conversation's beginning by chance; a summary is longer."""

_EXCERPT_CHARS = 200
"""Likewise, for the lines of a reply: some harnesses cut the summary out of a longer reply."""

TASK_CHARS = 16
"""Likewise, for the prompt in a tool call and the answer that comes back, which must also be in their places."""

_COVER = 0.5
"""Smallest share of the longer text that the shorter one must be: a harness wraps a sub-agent's prompt in other text,
but a command inside a classifier's prompt is a different case."""

_SCANNED_CHARS = 50_000
"""Characters scanned at the beginning, and at the end, of a long text."""


def opening_of(root: Completion) -> str:
    """Returns the text before the first reply that a request echoes, without tool results."""
    texts: list[str] = []
    for message in root.new_messages:
        if message.role == "assistant":
            break
        if message.role != "tool":
            texts.append(message_text(message))
    return flat(_ends(" ".join(texts)))


def quotes(opening: str, reply: Message, said: str) -> bool:
    """Whether a conversation's opening quotes the reply. `said`: the reply's text, flat."""
    if len(said) < _QUOTE_CHARS:
        return False
    if said in opening:
        return True
    lines = [line for line in map(flat, message_text(reply).splitlines()) if len(line) >= _QUOTE_CHARS]
    return sum(len(line) for line in lines if line in opening) >= _EXCERPT_CHARS


def tasks_of(root: Completion) -> list[str]:
    """Returns a conversation's first task: each user text, and all of them joined, since clients add reminders to
    it."""
    messages = [new_message for new_message in root.new_messages if new_message.role == "user"]
    texts = [flat(part.text) for message in messages for part in message.parts if isinstance(part, Text)]
    return list(dict.fromkeys([*texts, flat(" ".join(map(message_text, messages)))]))


def results_of(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        for part in message.parts:
            if isinstance(part, ToolResult):
                yield flat(_ends("".join(piece.text for piece in part.content if isinstance(piece, Text))))


def calls_of(message: Message) -> list[ToolCall]:
    return [part for part in message.parts if isinstance(part, ToolCall)]


def carries(call: ToolCall, task: str) -> bool:
    """Whether one of a tool call's arguments is the task, or nearly all of it."""
    for value in _strings(_parsed(call.arguments)):
        short, long = sorted((flat(value), task), key=len)
        if len(short) >= max(TASK_CHARS, _COVER * len(long)) and short in long:
            return True
    return False


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _strings(value: Any) -> Iterator[str]:
    """Yields all strings in JSON data."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting += list(one.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        elif isinstance(one, list):
            waiting += one


def _ends(text: str) -> str:
    return text if len(text) <= 2 * _SCANNED_CHARS else f"{text[:_SCANNED_CHARS]}\n{text[-_SCANNED_CHARS:]}"


def flat(text: str) -> str:
    return " ".join(text.split())


class CallRole(msgspec.Struct, frozen=True, kw_only=True):
    role: TraceRole
    lineage: Lineage
    """The recorded lineage; for a root, the lineage derived from the whole session."""


def assign_roles(tree: CompletionTree) -> dict[str, CallRole]:
    """Returns completion id -> its role. Every completion has one."""
    return _Session(tree).roles()


class _Segment:
    def __init__(self, root: Completion, number: int) -> None:
        self.root = root
        self.number = number
        """Commit order of the root in the session."""
        self.completions: list[Completion] = []
        self.lineage = root.lineage
        self.agent: _Segment | None = None
        """An earlier segment of its agent; None: it is the first. Not itself, which would be a cycle."""
        self.role: TraceRole | None = None
        """Set if it differs from its agent's."""

    @property
    def first_of_agent(self) -> _Segment:
        at = self
        while at.agent is not None:
            at = at.agent
        return at

    def joins(self, other: _Segment) -> None:
        mine, theirs = self.first_of_agent, other.first_of_agent
        if mine is not theirs:
            mine.agent = theirs

    @property
    def works(self) -> bool:
        """Whether it is more than one question and its answer."""
        return len(self.completions) > 1 or any(calls_of(completion.response) for completion in self.completions)

    def begins(self, relation: Any, origin_id: str, reason: str) -> None:
        self.lineage = msgspec.structs.replace(self.lineage, relation=relation, origin_id=origin_id, reason=reason)


class _Session:
    def __init__(self, tree: CompletionTree) -> None:
        self._tree = tree
        self._order = list(tree)
        self._said = [flat(message_text(one.response)) for one in self._order]
        """[number of completions], in commit order."""
        self._numbers = {one.completion_id: number for number, one in enumerate(self._order)}
        self._continued = {one.parent_id for one in self._order}
        self._segment_of: dict[str, _Segment] = {}
        self._openings: dict[str, str] = {}
        """completion id of a root -> the beginning of its request"""
        self._compactions: dict[str, str] = {}
        """completion id -> the root that continues from its summary"""
        self._segments = self._divided()

    def _divided(self) -> list[_Segment]:
        segments: list[_Segment] = []
        for number, completion in enumerate(self._order):
            if completion.parent_id is None:
                segment = _Segment(completion, number)
                segments.append(segment)
            else:
                segment = self._segment_of[completion.parent_id]
            segment.completions.append(completion)
            self._segment_of[completion.completion_id] = segment
        return segments

    def roles(self) -> dict[str, CallRole]:
        for segment in self._segments:
            self._join_changed(segment)
        for segment in self._segments:
            if not (self._join_quoting(segment) or segment.root.lineage.relation == "changed"):
                self._tell_spawned(segment)
        self._tell_agents()
        return {one.completion_id: self._role_of(one) for one in self._order}

    def _role_of(self, completion: Completion) -> CallRole:
        segment = self._segment_of[completion.completion_id]
        lineage = segment.lineage if completion is segment.root else completion.lineage
        if (successor := self._compactions.get(completion.completion_id)) is not None:
            reason = f"{successor} begins with what it says"
            return CallRole(role="compaction", lineage=msgspec.structs.replace(lineage, reason=reason))
        return CallRole(role=segment.role or segment.first_of_agent.role or "side", lineage=lineage)

    # -- changed histories, siblings, retries ----------------------------------------------------------------------

    def _join_changed(self, segment: _Segment) -> None:
        lineage = segment.lineage
        origin = self._segment_of.get(lineage.origin_id or "")
        if origin is None or origin is segment:
            return
        if lineage.relation == "changed" and self._is_detour(segment, lineage):
            segment.role = "side"
            reason = f"one call ({lineage.cause}); the conversation went on without it"
            segment.begins("changed", lineage.origin_id or "", reason)
        else:
            segment.joins(origin)

    def _is_detour(self, segment: _Segment, lineage: Lineage) -> bool:
        if lineage.cause in ("history_edited", "truncated_turn") or segment.works:
            return False
        origin = self._tree[lineage.origin_id or ""]
        went_on = any(one.parent_id == origin.completion_id for one in self._order[segment.number + 1 :])
        return went_on or bool(self._tree.tools(origin) and not segment.root.tools)

    # -- summaries -------------------------------------------------------------------------------------------------

    def _join_quoting(self, segment: _Segment) -> bool:
        opening = self._opening(segment.root)
        for number in reversed(range(max(segment.number - _NEAR, 0), segment.number)):
            quoted, text = self._order[number], self._said[number]
            if calls_of(quoted.response) or not quotes(opening, quoted.response, text):
                continue
            before = self._conversation_before(quoted, segment)
            held = before or self._segment_of[quoted.completion_id]
            if _front(held.root) != _front(segment.root):
                continue
            segment.joins(held)
            if before is not None and quoted.completion_id not in self._continued:
                self._compactions[quoted.completion_id] = segment.root.completion_id
                segment.begins("compacted", quoted.completion_id, f"begins with what {quoted.completion_id} says")
            return True
        return False

    def _opening(self, root: Completion) -> str:
        if root.completion_id not in self._openings:
            self._openings[root.completion_id] = opening_of(root)
        return self._openings[root.completion_id]

    def _conversation_before(self, completion: Completion, successor: _Segment) -> _Segment | None:
        """Returns the conversation that a reply could summarise: its own history, its origin's, or one quoted in its
        request."""
        segment = self._segment_of[completion.completion_id]
        if completion.parent_id is not None:
            return segment
        if completion.lineage.relation == "changed":
            return self._segment_of.get(completion.lineage.origin_id or "", segment)
        if _front(completion) == _front(successor.root):
            return None  # a step of an agent that writes its history or memory into each new request
        request = self._opening(completion)
        number = self._numbers[completion.completion_id]
        for earlier in reversed(range(max(number - _NEAR, 0), number)):
            if len(self._said[earlier]) >= TASK_CHARS and self._said[earlier] in request:
                return self._segment_of[self._order[earlier].completion_id]
        return None

    # -- sub-agents ------------------------------------------------------------------------------------------------

    def _tell_spawned(self, segment: _Segment) -> None:
        if segment.first_of_agent is not segment:
            return
        tasks = tasks_of(segment.root)
        for number in reversed(range(max(segment.number - _NEAR, 0), segment.number)):
            spawner = self._order[number]
            names = [call.name for call in calls_of(spawner.response) if any(carries(call, task) for task in tasks)]
            if names:
                segment.role = "sub_agent"
                segment.begins("spawned", spawner.completion_id, f"its prompt is an argument of `{names[0]}`")
                return
        user = self._user_of_answer(segment)
        if user is not None:
            segment.role = "sub_agent" if segment.works else "side"
            segment.begins(segment.lineage.relation, user, f"its answer is a tool's result in {user}")

    def _user_of_answer(self, segment: _Segment) -> str | None:
        """Returns the call of another segment that got this one's last reply as a tool's result."""
        last = self._numbers[segment.completions[-1].completion_id]
        if len(self._said[last]) < TASK_CHARS:
            return None
        for later in self._order[last + 1 : last + 1 + _NEAR]:
            if self._segment_of[later.completion_id] is segment:
                continue
            if any(self._said[last] in text for text in results_of(later.new_messages)):
                return later.completion_id
        return None

    # -- the rest --------------------------------------------------------------------------------------------------

    def _tell_agents(self) -> None:
        sampled: dict[int, int] = {}
        for segment in self._segments:
            number = segment.first_of_agent.number
            num_here = sum(len(completion.sampled_ids) for completion in segment.completions)
            sampled[number] = sampled.get(number, 0) + num_here
        agents = [one for one in self._segments if one.agent is None and one.role is None]
        if not agents:  # every conversation was begun by another one's tool call: the first is the main one
            agents = self._segments[:1]
        if not agents:
            return
        main = max(agents, key=lambda one: (*_standing(one.root), sampled[one.number], -one.number))
        for agent in agents:
            agent.role = self._role_beside(agent, main)

    def _role_beside(self, agent: _Segment, main: _Segment) -> TraceRole:
        if agent is main:
            return "main"
        if agent.works and _front(agent.root) == _front(main.root):
            return "main"
        if agent.root.of_environment:
            agent.lineage = msgspec.structs.replace(agent.lineage, reason="calls of an environment")
            return "sub_agent" if agent.works else "side"
        agent_id = _agent_id(agent.root)
        if agent_id not in ("", _agent_id(main.root)):
            agent.lineage = msgspec.structs.replace(agent.lineage, reason=f"the client calls it agent {agent_id}")
            return "sub_agent"
        reason = (
            "works under another system text, other tools or another model" if agent.works else "one question alone"
        )
        agent.lineage = msgspec.structs.replace(agent.lineage, reason=reason)
        return "sub_agent" if agent.works else "side"


def _agent_id(root: Completion) -> str:
    return str(root.metadata.get("agent_id") or "")


def _standing(root: Completion) -> tuple[bool, bool, bool, bool]:
    """Sort key: the highest is preferred as main conversation."""
    return not root.of_environment, root.certificate.engine_role is None, not _agent_id(root), bool(root.tools)


def _front(root: Completion) -> tuple[bool, str | None, str, str, str]:
    """Returns the conversation's engines, its owner and the text before it. Digits are ignored, since dates and times
    change."""
    systems = [
        message_text(new_message) for new_message in root.new_messages if new_message.role in ("system", "developer")
    ]
    owner = (root.of_environment, root.certificate.engine_role, _agent_id(root))
    return *owner, root.branch_key, _DIGITS.sub("0", flat(" ".join(systems)))
