"""The entries of the journal: an attempt began, a call was answered, the attempt's result is safe elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self, cast

import msgspec
import numpy as np

from gangline.domain.completion import Completion
from gangline.domain.decodable import warm_decoder
from gangline.domain.tokens import decode_msgpack, token_ids

__all__ = [
    "Appended",
    "AttemptClosed",
    "AttemptKey",
    "AttemptOpened",
    "Entry",
    "EntryHead",
    "decode_entry",
    "decode_head",
    "key_of",
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
        if any(key_of(other) != key_of(first) for other in others):
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


Entry = AttemptOpened | Appended | AttemptClosed
EntryHead = AttemptOpened | _AppendedHead | AttemptClosed
warm_decoder(Entry, EntryHead)


def key_of(record: Entry | EntryHead | Completion) -> AttemptKey:
    return AttemptKey(record.session_id, record.attempt)


def _same_prompt(a: Completion, b: Completion) -> bool:
    return (
        (a.prompt_shared, a.new_messages, a.tools) == (b.prompt_shared, b.new_messages, b.tools)
        and a.prompt_suffix_ids.dtype == b.prompt_suffix_ids.dtype
        and np.array_equal(a.prompt_suffix_ids, b.prompt_suffix_ids)
    )


def decode_entry(payload: bytes) -> Entry:
    """Raises: msgspec.MsgspecError."""
    return decode_msgpack(payload, cast("type[Any]", Entry))


def decode_head(payload: bytes) -> EntryHead:
    """The fields for the index, without the completions. Raises: msgspec.MsgspecError."""
    return decode_msgpack(payload, cast("type[Any]", EntryHead))
