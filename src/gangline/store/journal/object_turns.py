"""Records of running sessions as objects, for servers that share a results URL and no folder:
`{session}/{fence}/{first}-{end}`, the calls from number `first` to before `end`.

Objects are never appended to, so each post of a node is one. Posts that come again, cut otherwise perhaps, say the same
of the same calls: a beginning without holes is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from gangline.domain.ids import validated_id
from gangline.domain.session import KeptTurns, Turns
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.store.journal.entries import Appended
from gangline.store.objects import ObjectFolder

log = logging.getLogger("gangline.server")

_NAME = re.compile(r"(\d+)-(\d+)")


class _Part(NamedTuple):
    first: int
    end: int
    name: str


class ObjectTurns:
    """See `TurnRecords` of the server."""

    def __init__(self, url: str) -> None:
        """Raises: InvalidRequest if the URL cannot be opened."""
        self._objects = ObjectFolder(url, "records of turns")

    def append(self, turns: Turns) -> None:
        folder = f"{validated_id(turns.session_id, 'session_id')}/{int(turns.fence)}"
        end = turns.first + len(turns.calls)
        self._objects.put(f"{folder}/{int(turns.first):09d}-{end:09d}", encode_msgpack(turns.calls))

    def latest(self, session_id: str, before: int) -> KeptTurns:
        fences = [int(name) for name in self._objects.names(validated_id(session_id, "session_id")) if name.isdigit()]
        parts = {fence: self._parts(f"{session_id}/{fence}") for fence in fences if fence < before}
        if not any(parts.values()):
            return KeptTurns()
        fence = max(parts, key=lambda one: (parts[one][-1].end if parts[one] else 0, one))
        calls: list[Appended] = []
        for part in parts[fence]:
            try:
                found = decode_msgpack(self._objects.get(part.name), tuple[Appended, ...])
            except msgspec.MsgspecError as error:
                log.error("turns.unreadable file=%s message=%s", part.name, error)
                break
            calls += found[len(calls) - part.first :]
        return KeptTurns(fence=fence, completions=tuple(chain.from_iterable(call.whole() for call in calls)))

    def forget(self, session_id: str) -> None:
        self._objects.remove(validated_id(session_id, "session_id"))

    def sessions(self) -> list[str]:
        return [name for name in self._objects.names("") if not name.startswith(".")]

    def _parts(self, folder: str) -> Sequence[_Part]:
        """Parts of the beginning without holes, each with calls that the ones before it lack."""
        named = [(name, match) for name in self._objects.names(folder) if (match := _NAME.fullmatch(name))]
        kept: list[_Part] = []
        end = 0
        for part in sorted(_Part(int(match[1]), int(match[2]), f"{folder}/{name}") for name, match in named):
            if part.first <= end < part.end:
                kept.append(part)
                end = part.end
        return kept
