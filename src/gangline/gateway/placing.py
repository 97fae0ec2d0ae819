"""Where a call belongs in its session: the completion whose context it continues, and what is new since then.

A history is compared by meaning, not by bytes: arguments as parsed JSON, white space of sampled text normalised,
thinking optional, tool-call ids left out (they only decide between equals). Each prefix of a history that ends with
a sampled turn has a rolling digest, so placing costs one pass over the request, however many completions there are.
The deepest match wins; what no one sampled (an edited turn, a compaction) simply is new.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gangline.domain.completion import Completion
from gangline.domain.conversation import Message, ModelCall, Text, ToolCall, ToolResult

__all__ = ["Place", "PlaceIndex", "branch_key", "same_meaning"]


class Place(msgspec.Struct, frozen=True):
    """`messages[:num_shared]` are the parent's messages and its response; the rest is new."""

    branch_key: str
    parent_id: str | None
    num_shared: int
    new_messages: tuple[Message, ...]
    digest: bytes
    """Of the whole history."""


def branch_key(call: ModelCall) -> str:
    """Digest of what stands before every message: calls of different keys share no prefix."""
    material = msgspec.json.encode((call.model, call.tools, call.template_kwargs), order="deterministic")
    return hashlib.blake2b(material, digest_size=12).hexdigest()


class PlaceIndex:
    """Finds parents among the completions of one session that were answered whole."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, list[str]] = {}
        self._digests: dict[str, bytes] = {}
        """completion id -> digest of its history and response"""
        self._by_call_id: dict[str, str] = {}
        self._completions: dict[str, Completion] = {}

    def place(self, call: ModelCall) -> Place:
        key = branch_key(call)
        digest = key.encode()
        keyed: set[str] = set()
        parent_id, num_shared = None, 0
        for position, message in enumerate(call.messages, start=1):
            digest = _roll(digest, self._as_sampled(message, keyed))
            if message.role == "assistant" and digest in self._by_digest:
                parent_id, num_shared = self._choose(self._by_digest[digest], message, keyed), position
        return Place(key, parent_id, num_shared, call.messages[num_shared:], digest)

    def add(self, completion: Completion, history: bytes) -> None:
        """`history`: the digest of the call that it answers, as `place` gave it."""
        digest = _roll(history, completion.response)
        completion_id = completion.completion_id
        self._by_digest.setdefault(digest, []).append(completion_id)
        self._digests[completion_id] = digest
        self._completions[completion_id] = completion
        for part in completion.response.parts:
            if isinstance(part, ToolCall):
                self._by_call_id[part.call_id] = completion_id

    def restore(self, completion: Completion) -> None:
        """Add a completion read from the journal. Its parent must have been added before."""
        digest = completion.branch_key.encode()
        if completion.messages_shared and completion.parent_id is not None:
            digest = self._digests[completion.parent_id]
        for message in completion.new_messages:
            digest = _roll(digest, message)
        self.add(completion, digest)

    def _as_sampled(self, message: Message, keyed: set[str]) -> Message:
        """The response that `message` echoes, when its tool-call ids say so and it only lost its text beside them.

        `keyed` collects the completions that the history names by their record keys.
        """
        call_ids = [part.call_id for part in message.parts if isinstance(part, ToolCall)]
        owners = {self._by_call_id.get(call_id) for call_id in call_ids}
        owner = owners.pop() if len(owners) == 1 else None
        if owner is None:
            return message
        keyed.add(owner)
        sampled = self._completions[owner].response
        has_text = any(isinstance(part, Text) and part.text.strip() for part in message.parts)
        lost_text = not has_text and _calls(message) == _calls(sampled)
        return sampled if lost_text else message

    def _choose(self, candidates: Sequence[str], echo: Message, keyed: set[str]) -> str:
        """Among histories of one meaning: named by record key, else echoed to the letter, else the latest."""
        if len(candidates) == 1:
            return candidates[0]
        ranks = [
            (self._nearest_keyed(candidate) in keyed, self._completions[candidate].response == echo, number)
            for number, candidate in enumerate(candidates)
        ]
        return candidates[max(ranks)[2]]

    def _nearest_keyed(self, completion_id: str) -> str | None:
        """The completion itself or its nearest ancestor whose response carries record keys."""
        at: str | None = completion_id
        while at is not None:
            completion = self._completions[at]
            if any(isinstance(part, ToolCall) for part in completion.response.parts):
                return at
            at = completion.parent_id
        return None


def same_meaning(a: Message, b: Message) -> bool:
    return _normal_form(a) == _normal_form(b)


def _roll(digest: bytes, message: Message) -> bytes:
    return hashlib.blake2b(_normal_form(message), key=digest[:64], digest_size=16).digest()


def _normal_form(message: Message) -> bytes:
    role = "system" if message.role == "developer" else message.role
    if role == "assistant":
        return msgspec.json.encode((role, _assistant_text(message), _calls(message)))
    texts = [part.text for part in message.parts if isinstance(part, Text)]
    results = [_joined(part.content) for part in message.parts if isinstance(part, ToolResult)]
    return msgspec.json.encode((role, message.name, "\n".join(texts).strip(), results))


def _assistant_text(message: Message) -> str:
    return " ".join("".join(part.text for part in message.parts if isinstance(part, Text)).split())


def _joined(pieces: Iterable[Text]) -> str:
    return "\n".join(piece.text for piece in pieces).strip()


def _calls(message: Message) -> list[tuple[str, str]]:
    return [(part.name, _normal_json(part.arguments)) for part in message.parts if isinstance(part, ToolCall)]


def _normal_json(text: str) -> str:
    """Sorted, without white space, `1.0` as `1` (as JavaScript writes it); text that is no JSON as it is."""
    try:
        return _sorted_json.encode(_json.decode(text or "{}"))
    except (ValueError, RecursionError):
        return " ".join(text.split())


def _number(text: str) -> Any:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


# Made once: the module's functions make a new one per call when they are given options.
_json = json.JSONDecoder(parse_float=_number)
_sorted_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
