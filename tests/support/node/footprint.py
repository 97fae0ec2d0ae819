"""What a process has: its descriptors by kind, its memory, its children."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Footprint", "children", "descendants", "described"]


class Footprint(NamedTuple):
    descriptors: Counter[str]
    """Kind (`socket`, `pipe`, `net` of a namespace, `file` ...) -> how many."""
    memory_bytes: int
    """Private to it."""

    @classmethod
    def of(cls, pid: int) -> Footprint:
        kinds: Counter[str] = Counter()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(descriptor)
                kinds["file" if target.startswith("/") else target.partition(":[")[0]] += 1
        return cls(kinds, _private_bytes(pid))


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def described(pid: int) -> str:
    """Number, state, parent and command line: what a failed check prints."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return f"{pid} (gone)"
    return f"{pid} ({state}, child of {parent}) {command[-200:]}"


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on, in order of their numbers."""
    below = _children()
    found: list[int] = []
    queue = [pid]
    while queue:
        found += (new := below.get(queue.pop(), []))
        queue += new
    return sorted(found)


def children(pid: int) -> list[int]:
    return sorted(_children().get(pid, []))


def _children() -> dict[int, list[int]]:
    """Of every process that has some."""
    found: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(stat.parent.name))
    return found
