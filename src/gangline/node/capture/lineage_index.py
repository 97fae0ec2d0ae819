"""Calls that would have continued an earlier one, had their client not changed earlier content.

A call that echoes sampled turns after its match (see `placing`), or has another turn where one was sampled, is such a
call. Its origin is found from the end of its history, by the strongest evidence first: the same conversation in another
branch or under another system text; a record key; the turn itself; the prompt before a turn that was replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gangline.domain.completion import Completion, CompletionTree, DivergenceCause, Lineage
from gangline.domain.conversation import Message, ModelCall, ToolCall
from gangline.node.capture.meaning import said_by

__all__ = ["HistoryDigest", "LineageIndex", "Step"]

_TELLING_CHARS = 24
"""A reply of that much text, or with a tool call, is not said twice by chance."""


class HistoryDigest(NamedTuple):
    """Rolling digests of a whole history."""

    strict: bytes
    """Equal for equal prompts."""
    loose: bytes
    """Digest without the parts before a conversation: branch key, system messages. Empty: there is nothing else."""


class Step(NamedTuple):
    """One message of a history."""

    meaning: bytes
    """Digest of the message alone."""
    digest: HistoryDigest
    """Digest of the history up to here."""
    owners: tuple[str, ...]
    """The completions that the message names by their record keys."""


class LineageIndex:
    """Finds them among the completions of one session."""

    def __init__(self, tree: CompletionTree, meaning_of: Callable[[Message], bytes]) -> None:
        self._tree = tree
        self._meaning_of = meaning_of
        self._by_end: dict[bytes, str] = {}
        """loose digest of history and response -> the latest completion"""
        self._by_prompt: dict[bytes, str] = {}
        """Likewise, of the history alone. Aborted calls too."""
        self._by_response: dict[bytes, list[str]] = {}
        self._meanings: dict[Message, bytes] = {}
        """Meanings of recorded messages that were compared: a client that changes a message does so at every call."""

    def add_prompt(self, completion: Completion, history: HistoryDigest) -> None:
        if history.loose:
            self._by_prompt[history.loose] = completion.completion_id

    def add_response(self, completion: Completion, step: Step) -> None:
        """`step`: the response, after its history."""
        self._by_end[step.digest.loose] = completion.completion_id
        self._by_response.setdefault(step.meaning, []).append(completion.completion_id)

    def lineage(self, key: str, call: ModelCall, steps: Sequence[Step], num_shared: int) -> Lineage | None:
        """The call that this one would have continued; None where it echoes only turns that it continues.

        steps: of each message of the call. num_shared: messages that the call has in common with its parent.
        """
        # A last turn of the assistant is no echo: the client begins the reply itself.
        for position in range(len(steps) - 2, num_shared - 1, -1):
            if call.messages[position].role != "assistant":
                continue
            origin_id = self._find(call.messages[position], steps, position)
            if origin_id is not None:
                cause, first_change = self._cause(key, call, steps, self._tree[origin_id])
                return Lineage(relation="changed", origin_id=origin_id, cause=cause, first_change=first_change)
        return None

    def _find(self, echo: Message, steps: Sequence[Step], position: int) -> str | None:
        """The completion whose response stands at `position`, or stood there before the client replaced it."""
        step, before = steps[position], steps[position - 1] if position else None
        if (alike := self._by_end.get(step.digest.loose)) is not None:
            return alike
        if step.owners:
            return step.owners[-1]
        for said in reversed(self._by_response.get(step.meaning, ())):
            if _is_telling(echo) or (before is not None and self._was_asked(said, before.meaning)):
                return said
        return None if before is None else self._by_prompt.get(before.digest.loose)

    def _was_asked(self, completion_id: str, meaning: bytes) -> bool:
        return [self._meaning_of(last) for last in self._tree[completion_id].new_messages[-1:]] == [meaning]

    def _cause(
        self, key: str, call: ModelCall, steps: Sequence[Step], origin: Completion
    ) -> tuple[DivergenceCause, int | None]:
        """The first change in a prompt counts: tools and other parts of the branch key, system text, the rest."""
        if origin.branch_key != key:
            return self._key_cause(call, origin), None
        sampled = (*self._tree.messages(origin), origin.response)
        theirs, ours = _systems(sampled), _systems(call.messages)
        for before, position in zip(theirs, ours, strict=False):
            if not self._is_echoed(sampled[before], call.messages[position], steps[position]):
                return "system_changed", position
        if len(theirs) != len(ours):
            return "system_changed", next(iter(ours[len(theirs) :]), None)
        cause: DivergenceCause = "truncated_turn" if origin.status == "aborted" else "history_edited"
        triples = enumerate(zip(sampled, call.messages, steps, strict=False))
        return cause, next((at for at, triple in triples if not self._is_echoed(*triple)), None)

    def _key_cause(self, call: ModelCall, origin: Completion) -> DivergenceCause:
        if self._tree.tools(origin) != call.tools:
            return "tools_changed"
        same_model = origin.metadata.get("requested_model", origin.model) == call.model
        return "template_changed" if same_model else "model_changed"

    def _is_echoed(self, message: Message, echo: Message, step: Step) -> bool:
        if message == echo:
            return True
        if message not in self._meanings:
            self._meanings[message] = self._meaning_of(message)
        return self._meanings[message] == step.meaning


def _systems(messages: Iterable[Message]) -> list[int]:
    """Where they stand."""
    return [position for position, one in enumerate(messages) if one.role in ("system", "developer")]


def _is_telling(message: Message) -> bool:
    return any(isinstance(part, ToolCall) for part in message.parts) or len(said_by(message)) >= _TELLING_CHARS
