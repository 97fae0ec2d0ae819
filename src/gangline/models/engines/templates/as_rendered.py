"""Compares a stitched prompt with the template's rendering of the whole conversation.

A stitched prompt is the first prompt of its chain, followed after each sampled turn by the ids that the template writes
there. All of these must occur in the template's rendering of the whole conversation, in that order: the first at its
beginning, the last at its end. The model's own turns, with their generation prompts, may differ there: stitching keeps
them as they were. So stripped thinking and other tokenisation do not count as a difference, but a number, a flag or a
system text that the template writes in another place does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gangline.domain.tokens import TokenIds, common_prefix_len

_ID_BYTES = 4


def difference(whole: TokenIds, front: TokenIds, added: Sequence[TokenIds], opening: TokenIds) -> str | None:
    """Describes how the rendering differs; None if it does not.

    whole: the rendering of all messages [T]. added: the ids after each sampled turn, oldest first, at least one.
    opening: the ids of a generation prompt after a user's message. `front` and all of `added` end with it, or with the
    part that the template writes there (some write no opening after tool results).
    """
    front = _without_opening(front, opening)
    if common_prefix_len(whole, front) < len(front):
        return "it writes what stands before the model's first turn otherwise"
    *earlier, last = added
    end = len(whole) - len(last)
    if end < 0 or not _same(whole[end:], last):
        return "it writes the new messages otherwise, or what stands before them as well"
    at = len(front)
    for number, piece in enumerate(earlier, start=1):
        kept = _without_opening(piece, opening)
        found = _find(whole, kept, at + 1, end)  # the turn in between must be present
        if found is None:
            return f"it writes the messages after the model's turn {number} of {len(added)} otherwise"
        at = found + len(kept)
    return None if at < end else f"it leaves out the model's turn {len(added)}"


def _without_opening(piece: TokenIds, opening: TokenIds) -> TokenIds:
    """The piece without trailing ids that belong to the opening."""
    foreign = np.flatnonzero(~np.isin(piece[max(len(piece) - len(opening), 0) :], opening))
    num_kept = max(len(piece) - len(opening), 0) + (int(foreign[-1]) + 1 if len(foreign) else 0)
    return piece[:num_kept]


def _same(a: TokenIds, b: TokenIds) -> bool:
    return len(a) == len(b) and common_prefix_len(a, b) == len(b)


def _find(whole: TokenIds, piece: TokenIds, start: int, end: int) -> int | None:
    """The first place of `piece` in `whole[start:end]`."""
    data, wanted = whole[start:end].tobytes(), piece.tobytes()
    at = data.find(wanted)
    while at > 0 and at % _ID_BYTES:
        at = data.find(wanted, at + 1)
    return None if at < 0 else start + at // _ID_BYTES
