"""The entries of the journal: an attempt began, a call was answered, the attempt's result is safe elsewhere.

An entry that is too large for one frame is kept as `Piece` entries, one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self, cast

import msgspec
import numpy as np

from gangline.domain.completion import Completion
from gangline.domain.conversation import Document, Image, Part, Text, Thinking, ToolCall, ToolResult
from gangline.domain.decodable import warm_decoder
from gangline.domain.tokens import decode_msgpack, token_ids

__all__ = [
    "Appended",
    "AttemptClosed",
    "AttemptKey",
    "AttemptOpened",
    "Entry",
    "EntryHead",
    "Piece",
    "decode_entries",
    "decode_head",
    "key_of",
    "num_text_chars",
]


class AttemptKey(NamedTuple):
    """One attempt at one session."""

    session_id: str
    attempt: int


class AttemptOpened(msgspec.Struct, frozen=True, tag="opened"):
    """A session's attempt began on this node."""

    session_id: str
    attempt: int
    task_id: str
    fence: int
    held_out: bool = False


class Appended(msgspec.Struct, frozen=True, tag="completions"):
    """The choices of one call. The shared part of their prompts is kept with the first."""

    session_id: str
    attempt: int
    completions: tuple[Completion, ...]
    one_prompt: bool = False
    """Whether the others have the first one's `prompt_suffix_ids`, `new_messages` and `tools`, left out here."""

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> Self:
        """Raises: ValueError when they are not of one attempt."""
        first, *others = completions
        if others and any(key_of(other) != key_of(first) for other in others):
            raise ValueError("completions of several attempts cannot be appended together")
        one_prompt = bool(others) and all(_same_prompt(first, other) for other in others)
        if one_prompt:
            nothing = {"prompt_suffix_ids": token_ids(), "new_messages": (), "tools": ()}
            others = [msgspec.structs.replace(other, **nothing) for other in others]
        return cls(*key_of(first), (first, *others), one_prompt)

    def whole(self) -> tuple[Completion, ...]:
        if not self.one_prompt:
            return self.completions
        first, *others = self.completions
        prompt = {name: getattr(first, name) for name in ("prompt_suffix_ids", "new_messages", "tools")}
        return (first, *(msgspec.structs.replace(other, **prompt) for other in others))


class _AppendedHead(msgspec.Struct, frozen=True, tag="completions"):
    """The fields of `Appended` for the index; the rest is skipped, not decoded."""

    session_id: str
    attempt: int


class AttemptClosed(msgspec.Struct, frozen=True, tag="closed"):
    """The attempt's result is safe elsewhere: its entries may go."""

    session_id: str
    attempt: int


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """A part of an entry's MessagePack. The entry exists once its last piece does."""

    session_id: str
    attempt: int
    index: int
    """0 begins an entry; an unfinished one before it never came to be."""
    is_last: bool
    data: bytes


class _PieceHead(msgspec.Struct, frozen=True, tag="piece"):
    """The fields of `Piece` for the index."""

    session_id: str
    attempt: int


Entry = AttemptOpened | Appended | AttemptClosed
EntryHead = AttemptOpened | _AppendedHead | AttemptClosed | _PieceHead
_Stored = Entry | Piece
warm_decoder(Entry, EntryHead, _Stored)


def key_of(record: Entry | EntryHead | Completion) -> AttemptKey:
    return AttemptKey(record.session_id, record.attempt)


def num_text_chars(entry: Entry) -> int:
    """Characters of the texts and media in an entry's new messages, bytes of evidence: its bulk, if large."""
    if not isinstance(entry, Appended):
        return 0
    num_chars = 0
    for one in entry.completions:
        num_chars += one.num_evidence_bytes
        for message in one.new_messages:
            for part in message.parts:
                num_chars += len(part.text) if type(part) is Text else _num_chars(part)
    return num_chars


def _num_chars(part: Part) -> int:
    match part:
        case Text() | Thinking():
            return len(part.text)
        case Image() | Document():
            return len(part.url)
        case ToolCall():
            return len(part.arguments)
        case ToolResult():
            return sum(map(_num_chars, part.content))


def _same_prompt(a: Completion, b: Completion) -> bool:
    return (
        (a.prompt_shared, a.new_messages, a.tools) == (b.prompt_shared, b.new_messages, b.tools)
        and a.prompt_suffix_ids.dtype == b.prompt_suffix_ids.dtype
        and np.array_equal(a.prompt_suffix_ids, b.prompt_suffix_ids)
    )


def decode_entries(payloads: Iterable[bytes]) -> Iterator[Entry]:
    """The whole entries of one attempt's payloads, in order. Raises: msgspec.MsgspecError."""
    gathered: list[bytes] = []
    for payload in payloads:
        stored = decode_msgpack(payload, cast("type[Any]", _Stored))
        if not isinstance(stored, Piece):
            yield stored
            continue
        if stored.index == 0:
            gathered.clear()
        gathered.append(stored.data)
        if stored.is_last:
            yield decode_msgpack(b"".join(gathered), cast("type[Any]", Entry))


def decode_head(payload: bytes) -> EntryHead:
    """The fields for the index, without the completions. Raises: msgspec.MsgspecError."""
    return decode_msgpack(payload, cast("type[Any]", EntryHead))
