"""Contents of files, in which holes are skipped: a program makes holes at once that would take hours to read."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from itertools import zip_longest

__all__ = ["copy_content", "have_equal_content"]

_PIECE_BYTES = 1 << 20


def copy_content(source: int, target: int, size: int) -> int:
    """Copy an open file of that size to an empty one. Returns the bytes that were written."""
    num_bytes = 0
    for start, end in _written(source, size):
        position = start
        while position < end:
            piece = os.pread(source, min(_PIECE_BYTES, end - position), position)
            if not piece:
                break
            os.pwrite(target, piece, position)
            position += len(piece)
            num_bytes += len(piece)
    os.ftruncate(target, size)
    return num_bytes


def have_equal_content(one: int, other: int, size: int) -> bool:
    """Whether two open files of that size have the same bytes, and their holes in the same places."""
    for mine, theirs in zip_longest(_written(one, size), _written(other, size)):
        if mine is None or mine != theirs or not _are_equal(one, other, *mine):
            return False
    return True


def _are_equal(one: int, other: int, start: int, end: int) -> bool:
    while start < end:
        pieces = [os.pread(fd, min(_PIECE_BYTES, end - start), start) for fd in (one, other)]
        if pieces[0] != pieces[1] or not pieces[0]:
            return False
        start += len(pieces[0])
    return True


def _written(fd: int, size: int) -> Generator[tuple[int, int]]:
    """Parts of a file that are no holes: (start, end)."""
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return
            raise
        position = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, position
