"""A scripted reply as token ids, in the format of the served tokenizer's models.

Uses Hermes's format, unless the chat template writes calls in another known format: then the reply is the turn as
written by the template.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from gangline.domain.errors import InvalidRequest
from gangline.domain.tokens import common_prefix_len, token_ids
from gangline.models.language.contract import ChatTokenizer
from gangline.models.language.parsing.detect import detect_parsers, opens_thinking
from gangline.models.language.parsing.parser import Parsers
from gangline.models.language.parsing.thinking import THINK_TAGS
from gangline.serving.scripted.script import CallTool, Reply

_NUM_BYTE_CANDIDATES = 1024
"""Byte-level vocabularies have their bytes among the first ids, after a few special tokens."""

_HERMES = Parsers(tools="hermes", thinking="qwen3")
_USER = {"role": "user", "content": "x"}
_TAGS = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})


def scripted_logprob(position: int, token_id: int) -> float:
    """Log-prob of the id at `position` of a reply: finite, negative, and always the same."""
    return -(1 + zlib.crc32(f"{position}:{token_id}".encode()) % 3000) / 1000


class ReplyEncoder:
    """Writes replies with one tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        detected = detect_parsers(tokenizer)
        self.parsers = _HERMES if detected.tools in (None, "hermes") else detected
        """The formats in which replies are written."""
        self.end_of_turn_id = _end_of_turn(tokenizer)
        self._byte_ids: dict[int, int] | None = None

    def encode(self, reply: Reply, calls: Sequence[CallTool], prompt_ids: Sequence[int]) -> list[int]:
        """Ids of the whole reply, including the end of turn unless the reply ends for length."""
        turn = None if reply.split or self.parsers is _HERMES else self._turn(reply, calls, prompt_ids)
        ids, end = turn or (self._ids(self._pieces(reply, calls, prompt_ids), reply.split), self.end_of_turn_id)
        return ids if ids and reply.finish == "length" else [*ids, end]

    def _turn(self, reply: Reply, calls: Sequence[CallTool], prompt_ids: Sequence[int]) -> tuple[list[int], int] | None:
        """The turn as written by the chat template, and its end. None if the template refuses it."""
        tools, message, after = _as_messages(reply, calls)
        try:
            prompt = self._tokenizer.render([_USER], tools=tools)
            written = self._tokenizer.render([_USER, message], tools=tools, add_generation_prompt=False)
        except InvalidRequest:
            return None
        text = self._tokenizer.decode(written[common_prefix_len(token_ids(prompt), token_ids(written)) :])
        if self.parsers.thinking in THINK_TAGS:
            opens, closes = THINK_TAGS[self.parsers.thinking]
            shown = self._tokenizer.decode(prompt_ids[-8:]).rstrip()
            if shown.endswith((opens.rstrip(), closes.rstrip())):
                text = text.partition(closes)[2].lstrip() or text
            if shown.endswith(opens.rstrip()):
                text = f"{reply.thinking or ''}\n{closes}\n\n{text}"
        ids = self._tokenizer.encode(text)
        ends = [at for at, token_id in enumerate(ids) if token_id in self._tokenizer.eos_ids]
        return (
            (ids[: ends[-1]], ids[ends[-1]]) if ends else (ids, self._opener(written, [_USER, message, after], tools))
        )

    def _opener(
        self, written: Sequence[int], messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> int:
        """In some families, the token that opens the next message ends the turn."""
        with suppress(InvalidRequest):
            longer = self._tokenizer.render(messages, tools=tools, add_generation_prompt=False)
            if len(longer) > len(written) and longer[len(written)] in self._tokenizer.eos_ids:
                return longer[len(written)]
        return self.end_of_turn_id

    def _pieces(self, reply: Reply, calls: Sequence[CallTool], prompt_ids: Sequence[int]) -> list[str]:
        pieces = [*self._thinking(reply.thinking, prompt_ids), reply.text]
        for number, call in enumerate(calls):
            body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
            pieces += ["\n" if number or reply.text else "", "<tool_call>", f"\n{body}\n", "</tool_call>"]
        return pieces

    def _thinking(self, thinking: str | None, prompt_ids: Sequence[int]) -> list[str]:
        if opens_thinking(self._tokenizer, prompt_ids):
            return [f"{thinking or ''}\n", "</think>", "\n\n"]
        closed = self._tokenizer.decode(prompt_ids[-8:]).rstrip().endswith("</think>")
        return [] if thinking is None or closed else ["<think>", f"\n{thinking}\n", "</think>", "\n\n"]

    def _ids(self, pieces: Sequence[str], split: Literal["bytes", "chars"] | None) -> list[int]:
        """Tags stay whole in a split text, because they are always separate tokens."""
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


def _as_messages(
    reply: Reply, calls: Sequence[CallTool]
) -> tuple[list[dict[str, Any]] | None, dict[str, Any], dict[str, Any]]:
    """The called tools, the reply, and a possible next message, in the format of chat templates."""
    names = {call.name: None for call in calls}
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": n, "description": n, "parameters": parameters}} for n in names
    ]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if not calls:
        return None, message, _USER
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    message["tool_calls"] = [
        {"id": f"call{at:05d}", "type": "function", "function": one} for at, one in enumerate(functions)
    ]
    return tools, message, {"role": "tool", "tool_call_id": "call00000", "name": calls[0].name, "content": "x"}


def _end_of_turn(tokenizer: ChatTokenizer) -> int:
    """The id with which the template closes an assistant turn."""
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    rendered = tokenizer.render(turns, add_generation_prompt=False)
    closing = [token_id for token_id in rendered if token_id in tokenizer.eos_ids]
    return closing[-1] if closing else min(tokenizer.eos_ids)


def _learn_byte_ids(tokenizer: ChatTokenizer) -> dict[int, int]:
    """Byte -> id of a byte-level vocabulary, found by decoding ids.

    ASCII encodes to itself. Second bytes are read from two-byte characters that are not merged. Each first byte is then
    the id that forms a character with known second bytes.
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
