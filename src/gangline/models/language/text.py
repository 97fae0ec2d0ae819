"""Converts ids to text, token by token: detokenisation at character boundaries, and stop strings.

Both are independent of the division of the stream: for any chunks, the pieces add up to the same text. Ids are
authoritative and never changed here.
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline.models.language.contract import ChatTokenizer
from gangline.models.language.parsing.events import held_length

_REPLACEMENT = "�"


class IncrementalText:
    """Text of a growing list of ids, emitted only when it can no longer change.

    A token may end inside a UTF-8 character; its text then waits for the tokens that complete it. Text that is still
    incomplete at the end is returned by `flush` as U+FFFD.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # Decoding starts one settled piece early: some decoders treat the first token of a text differently.
        self._context_ids: list[int] = []
        self._open_ids: list[int] = []

    def feed(self, token_id: int) -> str:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        self._open_ids.append(token_id)
        text = self._open_text()
        if text.endswith(_REPLACEMENT):
            return ""
        self._context_ids, self._open_ids = self._open_ids, []
        return text

    def flush(self) -> str:
        text = self._open_text() if self._open_ids else ""
        self._open_ids = []
        return text

    def _open_text(self) -> str:
        settled = self._tokenizer.decode(self._context_ids) if self._context_ids else ""
        return self._tokenizer.decode([*self._context_ids, *self._open_ids])[len(settled) :]


class StopStrings:
    """Cuts a text stream at the first completed stop string; the longest one if several end at the same position."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._held = ""

    def feed(self, delta: str) -> tuple[str, str | None]:
        """Returns `(text to emit, matched stop string or None)`. A possible beginning of a stop string is held back."""
        text = self._held + delta
        self._held = ""
        matches = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            end, _, stop = min(matches)
            return text[: end if self._include else end - len(stop)], stop
        keep = held_length(text, self._stops)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text
