"""Where a call belongs in its session: the completion whose context it continues, and what is new since then.

A history is compared by meaning, not by bytes: arguments as parsed JSON, white space of sampled text normalised,
thinking optional, tool-call ids left out (they only decide between equals). Each prefix of a history that ends with
a sampled turn has a rolling digest, so placing costs one pass over the request, however many completions there are; of
a request that goes on from an earlier one, word by word, only what is new is digested.
The deepest match wins; what no one sampled (an edited turn, a compaction) simply is new.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gangline.domain.completion import Completion
from gangline.domain.conversation import Document, Image, Message, ModelCall, Text, Thinking, ToolCall, ToolResult

__all__ = ["Place", "PlaceIndex", "branch_key", "same_meaning", "signed_reply_id"]


_MAX_WALKS = 3
"""Conversations of one branch key that take turns without being digested anew."""


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


class _Walk(msgspec.Struct, frozen=True):
    """One pass over a history, kept so that the next request of the same conversation passes over what is new only."""

    messages: tuple[Message, ...]
    digests: tuple[bytes, ...]
    """After each message."""
    owners: tuple[tuple[str, ...], ...]
    """Of each message: the completions that it names by their record keys."""


class PlaceIndex:
    """Finds parents among the completions of one session that were answered whole."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, list[str]] = {}
        self._digests: dict[str, bytes] = {}
        """completion id -> digest of its history and response"""
        self._by_call_id: dict[str, str] = {}
        self._by_reply_id: dict[str, list[str]] = {}
        self._completions: dict[str, Completion] = {}
        self._walks: dict[str, list[_Walk]] = {}
        """branch key -> the latest walks, newest last"""

    def place(self, call: ModelCall) -> Place:
        key = branch_key(call)
        walk = self._walk(key, call.messages)
        keyed: set[str] = set()
        parent_id, num_shared = None, 0
        for position, (message, digest, owners) in enumerate(
            zip(walk.messages, walk.digests, walk.owners, strict=True), start=1
        ):
            keyed.update(owners)
            if message.role == "assistant" and (candidates := self._by_digest.get(digest)) is not None:
                parent_id, num_shared = self._choose(candidates, message, keyed), position
        digest = walk.digests[-1] if walk.digests else key.encode()
        return Place(key, parent_id, num_shared, call.messages[num_shared:], digest)

    def _walk(self, key: str, messages: tuple[Message, ...]) -> _Walk:
        walks = self._walks.setdefault(key, [])
        num_known, known = max(
            ((_num_equal(walk.messages, messages), walk) for walk in walks),
            key=lambda found: found[0],
            default=(0, None),
        )
        digests = list(known.digests[:num_known]) if known else []
        owners = list(known.owners[:num_known]) if known else []
        digest = digests[-1] if digests else key.encode()
        for message in messages[num_known:]:
            named = self._named_by(message)
            digest = _roll(digest, self._as_sampled(message, named))
            digests.append(digest)
            owners.append(named)
        walk = _Walk(messages, tuple(digests), tuple(owners))
        if known is not None and num_known == len(known.messages):
            walks.remove(known)
        self._walks[key] = [*walks, walk][-_MAX_WALKS:]
        return walk

    def add(self, completion: Completion, history: bytes) -> None:
        """`history`: the digest of the call that it answers, as `place` gave it."""
        digest = _roll(history, completion.response)
        completion_id = completion.completion_id
        self._by_digest.setdefault(digest, []).append(completion_id)
        self._digests[completion_id] = digest
        self._completions[completion_id] = completion
        reply_id = completion.metadata.get("reply_id")
        if isinstance(reply_id, str):
            self._by_reply_id.setdefault(reply_id, []).append(completion_id)
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

    def _named_by(self, message: Message) -> tuple[str, ...]:
        """The completions whose record keys `message` carries: in tool-call ids, in the signatures of thinking."""
        if message.role != "assistant":
            return ()
        named: list[str] = []
        for part in message.parts:
            if isinstance(part, ToolCall) and (owner := self._by_call_id.get(part.call_id)) is not None:
                named.append(owner)
            elif isinstance(part, Thinking) and part.signature:
                named += self._by_reply_id.get(signed_reply_id(part.signature), ())
        return tuple(dict.fromkeys(named))

    def _as_sampled(self, message: Message, named: tuple[str, ...]) -> Message:
        """The response that `message` echoes, when its tool-call ids say so and it only lost its text beside them."""
        owners = {self._by_call_id.get(part.call_id) for part in message.parts if isinstance(part, ToolCall)}
        owner = owners.pop() if len(owners) == 1 else None
        if owner is None:
            return message
        sampled = self._completions[owner].response
        has_text = any(isinstance(part, Text) and part.text.strip() for part in message.parts)
        lost_text = not has_text and _calls(message) == _calls(sampled)
        return sampled if lost_text else message

    def _choose(self, candidates: Sequence[str], echo: Message, keyed: set[str]) -> str:
        """Among histories of one meaning: named by record key, else echoed to the letter, else the latest."""
        if len(candidates) == 1:
            return candidates[0]
        ranks = [
            (
                candidate in keyed or self._nearest_keyed(candidate) in keyed,
                self._completions[candidate].response == echo,
                number,
            )
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


def _num_equal(a: tuple[Message, ...], b: tuple[Message, ...]) -> int:
    """Length of the longest common front."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])


def signed_reply_id(signature: str) -> str:
    """The reply id in a signature that is ours; empty in others'."""
    try:
        text = base64.b64decode(signature, validate=True).decode()
    except ValueError:
        text = signature
    owner, _, reply_id = text.partition(":")
    return reply_id if owner == "gangline" else ""


def _roll(digest: bytes, message: Message) -> bytes:
    # SHA-256: today's processors have instructions for it, so a long prompt costs a fifth of BLAKE2's time.
    return hashlib.sha256(digest + _normal_form(message)).digest()


def _normal_form(message: Message) -> bytes:
    role = "system" if message.role == "developer" else message.role
    if role == "assistant":
        return msgspec.json.encode((role, _assistant_text(message), _calls(message)))
    texts = [_piece(part) for part in message.parts if isinstance(part, (Text, Image, Document))]
    results = [_joined(part.content) for part in message.parts if isinstance(part, ToolResult)]
    return msgspec.json.encode((role, message.name, "\n".join(texts).strip(), results))


def _assistant_text(message: Message) -> str:
    return " ".join("".join(part.text for part in message.parts if isinstance(part, Text)).split())


def _joined(pieces: Iterable[Text | Image | Document]) -> str:
    return "\n".join(map(_piece, pieces)).strip()


def _piece(piece: Text | Image | Document) -> str:
    """Its text, or what stands for its media."""
    return piece.text if isinstance(piece, Text) else f"\0{type(piece).__name__}\0{piece.url}"


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
