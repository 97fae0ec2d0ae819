"""Whether a stitched prompt is what the template writes for the whole conversation.

A stitched prompt is the first prompt of its chain, then after each sampled turn the ids that the template was found to
write there. All of these must stand in the template's rendering of the whole conversation, in that order: the first at
its front, the last at its end. The model's own turns, with the generation prompts that they were given, may be written
otherwise there: stitching keeps them as they were. So thinking that a template strips and ids that tokenise otherwise
are no difference; a number, a flag or a system text that a template writes at another place is.
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline.domain.tokens import TokenIds, common_prefix_len

__all__ = ["difference"]

_ID_BYTES = 4


def difference(whole: TokenIds, front: TokenIds, added: Sequence[TokenIds], opening_len: int) -> str | None:
    """What the rendering has otherwise, in words; None: nothing.

    whole: the rendering of all messages [T]. added: the ids after each sampled turn, oldest first, at least one.
    opening_len: ids of a generation prompt, with which `front` and all of `added` end.
    """
    if not _begins(whole, front, opening_len):
        return "it writes what stands before the model's first turn otherwise"
    *earlier, last = added
    end = len(whole) - len(last)
    if end < 0 or not _same(whole[end:], last):
        return "it writes the new messages otherwise, or what stands before them as well"
    at = max(len(front) - opening_len, 0)
    for number, piece in enumerate(earlier, start=1):
        kept = piece[: max(len(piece) - opening_len, 0)]
        found = _find(whole, kept, at + 1, end)  # the turn between left something
        if found is None:
            return f"it writes the messages after the model's turn {number} of {len(added)} otherwise"
        at = found + len(kept)
    return None if at < end else f"it leaves out the model's turn {len(added)}"


def _begins(whole: TokenIds, front: TokenIds, opening_len: int) -> bool:
    return common_prefix_len(whole, front) >= len(front) - opening_len


def _same(a: TokenIds, b: TokenIds) -> bool:
    return len(a) == len(b) and common_prefix_len(a, b) == len(b)


def _find(whole: TokenIds, piece: TokenIds, start: int, end: int) -> int | None:
    """The first place of `piece` in `whole[start:end]`."""
    data, wanted = whole[start:end].tobytes(), piece.tobytes()
    at = data.find(wanted)
    while at > 0 and at % _ID_BYTES:
        at = data.find(wanted, at + 1)
    return None if at < 0 else start + at // _ID_BYTES
