"""Finds the recorded calls that a fork repeats, by their histories.

Laws
- A call is answered from the record only if its whole request equals the recorded one: see `forms`.
- Titles, sub-agents and retries may come in any order: of calls with equal histories, each is used once, in the order
  of the record.
- A request that equals no recorded one is sampled only after the fork: when all recorded calls were used, or when it
  continues a recorded answer that no recorded call of the fork continues. Any other ends the session: nothing is
  sampled in place of a recorded call.
- Engine and record get the recorded messages where a tolerated value differs, and the fork's edit where it has one.

A fork's edit is a text that replaces the newest message after its last recorded answer. The agent does not know of it:
it sends its own message with each later request, and the edit is applied again each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import Message, ModelCall, Part, Text, ToolResult
from gangline.domain.errors import Failure, ForkDiverged, ResumeDiverged
from gangline.node.capture.placing import branch_key
from gangline.node.replay.forms import Forms, difference, echoes
from gangline.rows.forks.calls import (
    LINEAGE_FILE,
    REPLAYED,
    REQUEST,
    RESUME_FILE,
    RESUMED,
    ForkLineage,
    RecordedCall,
    recorded_calls,
    request_fields,
)


def edited(messages: Sequence[Message], answer_at: int, text: str) -> tuple[Message, ...]:
    """Returns the messages with `text` inserted after the answer, `messages[answer_at]`, and before the model's next
    one.

    It replaces the content of the last tool result there, or else the last text: programs put their own reminders after
    results. Without either nothing is replaced.
    """
    end = answer_at + 1
    while end < len(messages) and messages[end].role != "assistant":
        end += 1
    for kind in (ToolResult, Text):
        for place in reversed(range(answer_at + 1, end)):
            parts = messages[place].parts
            for at in reversed(range(len(parts))):
                if isinstance(parts[at], kind):
                    changed = (*parts[:at], _with_text(parts[at], text), *parts[at + 1 :])
                    message = msgspec.structs.replace(messages[place], parts=changed)
                    return (*messages[:place], message, *messages[place + 1 :])
    return tuple(messages)


def _with_text(part: Part, text: str) -> Part:
    return msgspec.structs.replace(part, content=(Text(text),)) if isinstance(part, ToolResult) else Text(text)


class Match(NamedTuple):
    call: ModelCall
    """With the recorded messages."""
    recorded: RecordedCall | None
    """The call that answers it; None: it is sampled."""


class _Node:
    """A message in a tree of histories."""

    def __init__(self, message: Message | None, fields: tuple[tuple[str, object], ...], turn: int) -> None:
        self.message = message
        self.fields = fields
        self.turn = turn
        """The first call that contains it."""
        self.is_sampled = False
        """Whether it answers a recorded call: clients may not echo all of an answer."""
        self.children: dict[bytes, _Node] = {}
        self.calls: list[RecordedCall] = []
        """Calls whose history ends here, by turn."""

    def child(self, message: Message, key: bytes) -> _Node | None:
        found = self.children.get(key)
        if found is None and message.role == "assistant":
            sampled = (one for one in self.children.values() if one.is_sampled and one.message is not None)
            found = next((one for one in sampled if one.message and echoes(message, one.message)), None)
        return found


class _Path(NamedTuple):
    nodes: tuple[_Node, ...]
    """From the root; ends before the first message that was not recorded there."""
    is_whole: bool


class Replay:
    """The recorded calls that one attempt of a fork repeats."""

    def __init__(
        self,
        completions: Sequence[Completion],
        turn: int,
        forms: Forms,
        *,
        edit: str | None = None,
        engine: str | None = None,
        resumed: bool = False,
    ) -> None:
        """`completions`: the parent's, forkable at `turn`: see `why_not_forkable`. `edit`, `engine`: see `ForkSpec`.

        resumed: the calls are the session's own, from a lease that was lost with its node.
        """
        self.parent = CompletionTree(completions)
        self.turn = turn
        self.engine = engine
        self.resumed = resumed
        self.mark = RESUMED if resumed else REPLAYED
        """Name in a repeated record's metadata: the record that it repeats."""
        self._edit = edit
        self._was_edited = False
        self.num_tolerated = 0
        """Messages in which a tolerated value differed."""
        self.diverged: Failure | None = None
        self.own_ids: dict[str, str] = {}
        """Parent's completion id -> the fork's."""
        self._forms = forms
        self._roots: dict[str, _Node] = {}
        self._calls = recorded_calls(completions)
        self._pending: dict[int, tuple[RecordedCall, _Path]] = {}
        """By turn."""
        self._tolerated: set[int] = set()
        for call in self._calls:
            path = self._add(call)
            if call.turn <= turn:
                self._pending[call.turn] = (call, path)

    def record(self) -> dict[str, bytes]:
        """Returns the origin of the repeated calls, as a file for the session's artifacts."""
        parent = self._calls[0].first
        lineage = ForkLineage(
            session_id=parent.session_id,
            attempt=parent.attempt,
            turn=self.turn,
            num_replayed=self.turn - len(self._pending),
            num_tolerated=self.num_tolerated,
            was_edited=None if self._edit is None else self._was_edited,
            engine=self.engine,
        )
        return {RESUME_FILE if self.resumed else LINEAGE_FILE: msgspec.json.encode(lineage)}

    def restore(self, completions: Sequence[Completion]) -> None:
        """Skip calls that were replayed before a restart of the node, according to the fork's own records."""
        given = {
            completion.metadata[self.mark]: completion.completion_id
            for completion in completions
            if self.mark in completion.metadata
        }
        self.own_ids |= given
        for call in self._calls[: self.turn]:
            if call.first.completion_id in given:
                del self._pending[call.turn]
        self._was_edited = any(self.mark not in completion.metadata for completion in completions)

    def match(self, call: ModelCall) -> Match:
        """Raises: ForkDiverged."""
        if self.diverged is not None:
            raise (ResumeDiverged if self.resumed else ForkDiverged)(self.diverged.message)
        root = self._roots.get(_head(call.dialect, branch_key(call)))
        path = _Path((), False) if root is None else self._walk(root, call)
        pinned = self._pinned(call, path)
        end = path.nodes[-1] if path.is_whole else None
        recorded = None if end is None else next((one for one in end.calls if one.turn in self._pending), None)
        if recorded is not None:
            self._check_fields(recorded, call)
            del self._pending[recorded.turn]
        elif not self._is_behind(path):
            raise self._divergence(call, path)
        return Match(pinned if recorded is not None else self._edited(pinned, path), recorded)

    # -- the record ----------------------------------------------------------------------------------------------

    def _add(self, call: RecordedCall) -> _Path:
        first = call.first
        key = _head(first.dialect, first.branch_key)
        node = self._roots.setdefault(key, _Node(None, (), call.turn))
        nodes, call_ids = [node], list[str]()
        for message in self.parent.messages(first):
            node = self._grown(node, message, call_ids, call.turn)
            nodes.append(node)
        node.calls.append(call)
        for choice in call.choices:
            self._grown(node, choice.response, list(call_ids), call.turn + 1).is_sampled = True
        return _Path(tuple(nodes), True)

    def _grown(self, node: _Node, message: Message, call_ids: list[str], turn: int) -> _Node:
        fields = self._forms.fields(message, call_ids)
        return node.children.setdefault(_digest(fields), _Node(message, fields, turn))

    # -- a request -----------------------------------------------------------------------------------------------

    def _walk(self, root: _Node, call: ModelCall) -> _Path:
        nodes, call_ids = [root], list[str]()
        for message in call.messages:
            after = nodes[-1].child(message, _digest(self._forms.fields(message, call_ids)))
            if after is None:
                return _Path(tuple(nodes), False)
            nodes.append(after)
        return _Path(tuple(nodes), True)

    def _pinned(self, call: ModelCall, path: _Path) -> ModelCall:
        messages = list(call.messages)
        for place, node in enumerate(path.nodes[1:]):
            given, recorded = messages[place], node.message
            if recorded is None or given.role == "assistant" or node.turn > self.turn or given == recorded:
                continue
            if id(node) not in self._tolerated:
                self._tolerated.add(id(node))
                self.num_tolerated += 1
            messages[place] = _with_content(given, recorded)
        return msgspec.structs.replace(call, messages=tuple(messages))

    def _edited(self, call: ModelCall, path: _Path) -> ModelCall:
        """Returns a call after the fork, with the edit if it continues the last recorded answer."""
        pairs = zip(path.nodes, path.nodes[1:], strict=False)
        is_last = (after.is_sampled and any(one.turn == self.turn for one in before.calls) for before, after in pairs)
        answer_at = next((at for at, found in enumerate(is_last) if found), None)
        if self._edit is None or answer_at is None:
            return call
        messages = edited(call.messages, answer_at, self._edit)
        self._was_edited = self._was_edited or messages != call.messages
        return msgspec.structs.replace(call, messages=messages)

    def _check_fields(self, recorded: RecordedCall, call: ModelCall) -> None:
        """Raises: ForkDiverged."""
        theirs, own = recorded.first.metadata[REQUEST], request_fields(call)
        name = next((name for name in (*theirs, *own) if theirs.get(name) != own.get(name)), None)
        model = recorded.first.metadata.get("requested_model", recorded.first.model)
        if name is not None:
            raise self._ended(recorded.turn, f"its field {name!r} is not as recorded")
        if call.model != model:
            raise self._ended(recorded.turn, f"its model is {call.model!r}, and {model!r} was recorded")

    def _is_behind(self, path: _Path) -> bool:
        """Whether the request comes after the fork."""
        if not self._pending:
            return True
        if path.is_whole and any(call.turn > self.turn for call in path.nodes[-1].calls):
            return True
        answers = [
            after for before, after in zip(path.nodes, path.nodes[1:], strict=False) if self._was_given(before, after)
        ]
        expected = {id(node) for _, one in self._pending.values() for node in one.nodes}
        return bool(answers) and id(answers[-1]) not in expected

    def _was_given(self, before: _Node, after: _Node) -> bool:
        """Whether `after` answers a call that was replayed and had `before` as its last message."""
        is_answer = after.message is not None and after.message.role == "assistant"
        return is_answer and any(call.turn not in self._pending for call in before.calls)

    # -- the end of a replay -------------------------------------------------------------------------------------

    def _divergence(self, call: ModelCall, path: _Path) -> ForkDiverged:
        recorded, expected = max(
            self._pending.values(), key=lambda one: (_num_shared(one[1].nodes, path.nodes), -one[0].turn)
        )
        if not path.nodes or path.nodes[0] is not expected.nodes[0]:
            return self._ended(recorded.turn, self._of_head(recorded.first, call))
        place = _num_shared(expected.nodes, path.nodes) - 1
        if place >= len(call.messages):
            return self._ended(recorded.turn, f"message {place} is missing")
        if place + 1 >= len(expected.nodes):
            return self._ended(recorded.turn, f"message {place} is not in the recorded request")
        call_ids = list[str]()
        for message in call.messages[:place]:
            self._forms.fields(message, call_ids)
        given = self._forms.fields(call.messages[place], call_ids)
        field, theirs, own = difference(expected.nodes[place + 1].fields, given)
        return self._ended(recorded.turn, f"message {place}, field {field!r}: {theirs!r} was recorded, here is {own!r}")

    def _of_head(self, recorded: Completion, call: ModelCall) -> str:
        if call.dialect != recorded.dialect:
            return f"its dialect is {call.dialect}, and {recorded.dialect} was recorded"
        model = recorded.metadata.get("requested_model", recorded.model)
        if call.model != model:
            return f"its model is {call.model!r}, and {model!r} was recorded"
        tools, own = self.parent.tools(recorded), call.tools
        if tools == own:
            return "its template arguments are not as recorded"
        names = [tool.name for tool in tools], [tool.name for tool in own]
        changed = next((a.name for a, b in zip(tools, own, strict=False) if a != b), "")
        if names[0] == names[1]:
            return f"the definition of its tool {changed!r} is not as recorded"
        return f"its tools are {', '.join(names[1])}, and {', '.join(names[0])} were recorded"

    def _ended(self, turn: int, why: str) -> ForkDiverged:
        kind = ResumeDiverged if self.resumed else ForkDiverged
        error = kind(f"diverged at call {turn}: {why}.")
        self.diverged = error.failure()
        return error


def _with_content(given: Message, recorded: Message) -> Message:
    """Returns the recorded message with the client's own tool-call ids."""
    ids = [part for part in given.parts if hasattr(part, "call_id")]
    if not ids:
        return recorded
    parts = [
        msgspec.structs.replace(old, call_id=new.call_id) if hasattr(old, "call_id") else old  # type: ignore[union-attr]
        for old, new in zip(recorded.parts, given.parts, strict=True)
    ]
    return Message(recorded.role, tuple(parts), recorded.name)


def _num_shared(a: Sequence[_Node], b: Sequence[_Node]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x is not y), min(len(a), len(b)))


def _head(dialect: str, key: str) -> str:
    return f"{dialect} {key}"


def _digest(fields: object) -> bytes:
    return hashlib.sha256(msgspec.json.encode(fields)).digest()
