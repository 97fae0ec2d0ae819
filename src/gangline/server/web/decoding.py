"""The bytes of token ids, found by decoding them: engines decode ids to text, and none gives the bytes of one id.

Many ids are decoded at once. A **divider** lies between them, an id whose text divides the result. A token with a part
of a character decodes to U+FFFD: the text of adjacent ones together gives the bytes of each.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache
from itertools import chain

import numpy as np

from gangline.domain.errors import NotFound
from gangline.domain.tokens import TokenIds

Decode = Callable[[Sequence[int]], Awaitable[str]]
"""Text of ids, with special tokens."""

KNOWN_MODELS = ("smollm2",)
"""Models whose tokenizer is found by name. Names in records come from harnesses, so no other name is looked up."""

_LOST = "\ufffd"
_MAX_IDS = 4096
"""Maximum number of ids to decode at once, if they can be divided."""
_MAX_PARTS = 5
"""Maximum number of adjacent tokens whose text together is used: a character has at most four bytes."""
_TRIED = 5
"""Number of ids at either end of the vocabulary, where special tokens are, and between, that are tried as divider."""


@cache
def decode_of(model: str) -> Decode | None:
    """Decodes as a known model; None if it is another one, or not installed. Blocking."""
    if model not in KNOWN_MODELS:
        return None
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - a server for other models does without these

        from gangline.models.language.models import resolve_tokenizer  # noqa: PLC0415

        tokenizer = Tokenizer.from_file(str(resolve_tokenizer(model) / "tokenizer.json"))
    except (ImportError, NotFound):
        return None

    async def decode(ids: Sequence[int]) -> str:
        return await asyncio.to_thread(tokenizer.decode, list(ids), skip_special_tokens=False)

    return decode


Divider = tuple[int, str, str]
"""An id, its text at the beginning, and its text after other ids."""


class TokenDecoder:
    """Decodes ids of one tokenizer."""

    def __init__(self, decode: Decode, divider: Divider | None = None) -> None:
        """divider: one that was found before."""
        self._decode = decode
        self.divider = divider

    async def bytes_of(self, sequences: Sequence[TokenIds]) -> dict[int, bytes]:
        """Bytes of the ids in recorded sequences. Ids are left out whose bytes the sequences do not show.

        Raises: errors of `decode`.
        """
        ids: list[int] = np.unique(np.concatenate(sequences)).tolist()
        if self.divider is None:
            tried = dict.fromkeys([*ids[:_TRIED], *ids[:: len(ids) // _TRIED + 1], *ids[-_TRIED:]])
            found = await asyncio.gather(*map(self._as_divider, tried))
            self.divider = max(filter(None, found), key=lambda divider: len(divider[2]), default=None)
        texts = {} if self.divider is None else {self.divider[0]: self.divider[2]}
        others = [one for one in ids if one not in texts]
        texts |= zip(others, await self._texts([[one] for one in others]), strict=True)
        known = {one: texts[one].encode() for one in ids if _LOST not in texts[one]}
        runs = set(_runs(sequences, [one for one in ids if one not in known]))
        for num in range(2, _MAX_PARTS + 1):
            near = {run[at : at + num] for run in runs for at in range(len(run) - num + 1)}
            parts = [one for one in near if not known.keys() >= set(one)]
            for part, whole in zip(parts, await self._texts(parts), strict=True):
                if _LOST not in whole:
                    known |= zip(part, _divided(whole.encode(), [texts[one] for one in part]), strict=False)
        return known

    async def _as_divider(self, token_id: int) -> Divider | None:
        once, twice = await asyncio.gather(self._decode([token_id]), self._decode([token_id] * 2))
        text = twice.removeprefix(once)
        # A text whose end is also its beginning could be found across a border.
        overlaps = any(text.endswith(text[:num]) for num in range(1, len(text)))
        is_fit = twice.startswith(once) and text != "" and _LOST not in text and not overlaps
        return (token_id, once, text) if is_fit else None

    async def _texts(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each as it is after other ids: some tokenizers drop a space at the beginning."""
        if not sequences:
            return []
        if self.divider is None:
            return [await self._decode(one) for one in sequences]
        divider, first, text = self.divider
        ids = [divider, *chain.from_iterable((*one, divider) for one in sequences)]
        if len(ids) <= _MAX_IDS or len(sequences) == 1:
            decoded = await self._decode(ids)
            fits = decoded.startswith(first) and decoded.endswith(text)
            if len(sequences) == 1 and not fits:
                return [await self._decode(sequences[0])]
            between = decoded[len(first) : -len(text)]
            texts = [between] if len(sequences) == 1 else between.split(text)
            if fits and len(texts) == len(sequences):
                return texts
        half = len(sequences) // 2
        return [*await self._texts(sequences[:half]), *await self._texts(sequences[half:])]


def _runs(sequences: Sequence[TokenIds], fragments: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Adjacent fragments. The characters that they are parts of end where the run does."""
    for ids in sequences:
        edges = np.flatnonzero(np.diff(np.isin(ids, fragments).astype(np.int8), prepend=0, append=0))
        for start, end in edges.reshape(-1, 2):
            yield tuple(ids[start:end].tolist())


def _divided(whole: bytes, texts: Sequence[str]) -> list[bytes]:
    """The bytes of adjacent tokens, from their bytes together and the text of each alone; empty if there are several
    ways or none.
    """
    begins: list[defaultdict[int, list[int]]] = []
    ends = [0]
    for text in texts:
        # A U+FFFD has three bytes and stands for one to three.
        most = len(text.encode())
        least = most - 2 * text.count(_LOST)
        found: defaultdict[int, list[int]] = defaultdict(list)
        for at in ends:
            for end in range(at + least, min(at + most, len(whole)) + 1):
                if whole[at:end].decode(errors="replace") == text:
                    found[end].append(at)
        begins.append(found)
        ends = list(found)
    pieces: list[bytes] = []
    end = len(whole)
    for begin in reversed(begins):
        if len(begin[end]) != 1:
            return []
        pieces.append(whole[begin[end][0] : end])
        end = begin[end][0]
    return pieces[::-1]
