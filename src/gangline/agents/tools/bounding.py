"""Limits the size of observations: a long text keeps its head and tail, with a count of the omitted bytes."""

from __future__ import annotations

from gangline.agents.tools.answers import Captured


def head_and_tail(text: str, max_bytes: int) -> str:
    """The text, cut to at most `max_bytes` bytes of UTF-8 plus a notice in place of the omitted ones."""
    return _bounded(text, "", 0, max_bytes)


def captured(output: Captured, max_bytes: int) -> str:
    """The same for a program's output, whose middle may already be missing."""
    if output.is_whole:
        return head_and_tail((output.head + output.tail).decode(errors="replace"), max_bytes)
    head, tail = output.head.decode(errors="replace"), output.tail.decode(errors="replace")
    return _bounded(head, tail, output.omitted_bytes, max_bytes)


def _bounded(head: str, tail: str, omitted: int, max_bytes: int) -> str:
    front, back = head.encode(errors="replace"), tail.encode(errors="replace")
    max_bytes = max(0, max_bytes)
    if len(front) + len(back) <= max_bytes:
        return _joined(front, back, omitted)
    if not omitted:
        front, back = front + back, b""
    half = max_bytes // 2
    kept_back = (back or front)[-(max_bytes - half) :] if max_bytes > half else b""
    kept_front = front[:half]
    # The cut may be inside a character, whose other bytes are then omitted too.
    kept_front = kept_front.decode(errors="ignore").encode()
    kept_back = kept_back.decode(errors="ignore").encode()
    return _joined(kept_front, kept_back, omitted + len(front) + len(back) - len(kept_front) - len(kept_back))


def _joined(front: bytes, back: bytes, omitted: int) -> str:
    notice = f"\n[{omitted} bytes left out]\n" if omitted else ""
    return front.decode() + notice + back.decode()
