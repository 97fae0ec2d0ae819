"""A scripted reply as token ids, in the format that the served tokenizer's models use."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Literal

from gangline.domain.errors import InvalidRequest
from gangline.language.contract import ChatTokenizer
from gangline.language.parsing.detect import opens_thinking
from gangline.serving.scripted.script import CallTool, Reply

__all__ = ["ReplyEncoder", "scripted_logprob"]

_NUM_BYTE_CANDIDATES = 1024
"""Byte-level vocabularies have their bytes among the first ids, after a few special tokens."""

_TAGS = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})


def scripted_logprob(position: int, token_id: int) -> float:
    """Log-prob of the id at `position` of a reply: finite, negative, the same every time."""
    return -(1 + zlib.crc32(f"{position}:{token_id}".encode()) % 3000) / 1000


class ReplyEncoder:
    """Writes replies with one tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.end_of_turn_id = _end_of_turn(tokenizer)
        self._byte_ids: dict[int, int] | None = None

    def encode(self, reply: Reply, calls: Sequence[CallTool], prompt_ids: Sequence[int]) -> list[int]:
        """Ids of the whole reply, end of turn included unless the reply ends for length."""
        pieces = [*self._thinking(reply.thinking, prompt_ids), reply.text]
        for number, call in enumerate(calls):
            body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
            pieces += ["\n" if number or reply.text else "", "<tool_call>", f"\n{body}\n", "</tool_call>"]
        ids = self._ids(pieces, reply.split)
        return ids if ids and reply.finish == "length" else [*ids, self.end_of_turn_id]

    def _thinking(self, thinking: str | None, prompt_ids: Sequence[int]) -> list[str]:
        if opens_thinking(self._tokenizer, prompt_ids):
            return [f"{thinking or ''}\n", "</think>", "\n\n"]
        closed = self._tokenizer.decode(prompt_ids[-8:]).rstrip().endswith("</think>")
        return [] if thinking is None or closed else ["<think>", f"\n{thinking}\n", "</think>", "\n\n"]

    def _ids(self, pieces: Sequence[str], split: Literal["bytes", "chars"] | None) -> list[int]:
        """Tags stay whole in a split text: they are tokens of their own in any spelling."""
        if split is None:
            return self._tokenizer.encode("".join(pieces))
        ids: list[int] = []
        for piece in pieces:
            ids += self._tokenizer.encode(piece) if piece in _TAGS else self._split(piece, split)
        text = self._tokenizer.decode(ids)
        if text != "".join(pieces):
            raise InvalidRequest(f"this tokenizer cannot write a text in {split}: it came out as {text!r}.")
        return ids

    def _split(self, text: str, split: Literal["bytes", "chars"]) -> list[int]:
        if split == "chars":
            return [token_id for char in text for token_id in self._tokenizer.encode(char)]
        if self._byte_ids is None:
            self._byte_ids = _learn_byte_ids(self._tokenizer)
        known = self._byte_ids
        return [known[byte] for byte in text.encode() if byte in known]


def _end_of_turn(tokenizer: ChatTokenizer) -> int:
    """The id with which the template closes an assistant turn."""
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    rendered = tokenizer.render(turns, add_generation_prompt=False)
    closing = [token_id for token_id in rendered if token_id in tokenizer.eos_ids]
    return closing[-1] if closing else min(tokenizer.eos_ids)


def _learn_byte_ids(tokenizer: ChatTokenizer) -> dict[int, int]:
    """Byte -> id of a byte-level vocabulary, found by decoding ids.

    ASCII encodes to itself. Of the other bytes the second halves are read off two-byte characters that nobody
    merges, and each first byte is then the id that completes a character before known second halves.
    """
    known: dict[int, int] = {}
    for char in map(chr, range(0x800)):
        ids, spelled = tokenizer.encode(char), char.encode()
        if len(ids) == len(spelled):
            for byte, token_id in zip(spelled, ids, strict=True):
                known.setdefault(byte, token_id)
    rests = [[known[byte]] * length for byte in (0x80, 0x90, 0xA0) if byte in known for length in (1, 2, 3)]
    for token_id in range(_NUM_BYTE_CANDIDATES):
        if tokenizer.decode([token_id]) != "\ufffd":
            continue
        for text in (tokenizer.decode([token_id, *rest]) for rest in rests):
            if len(text) == 1 and text != "\ufffd":
                known.setdefault(text.encode()[0], token_id)
    return known
