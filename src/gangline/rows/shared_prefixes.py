"""Converts a session's traces to a prefix tree and back: a prompt that begins like an earlier trace refers to it.

`share_prefixes` cuts the part of each prompt that an earlier trace contains, and `with_whole_prompts` restores it, id
for id. No context id is stored twice. Sampled ids are never shared with another trace's sampled ids, even if equal:
each was drawn once, and is trained on once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np

from gangline.domain.errors import InvalidRequest
from gangline.domain.tokens import TokenIds, common_prefix_len
from gangline.domain.trajectory import SharedPrefix, Trace
from gangline.rows.rows import Row

T = TypeVar("T", Trace, Row)

_FIRST_LOOK = 64


@dataclass(slots=True)
class _Branch:
    """The part that a trace adds to the tree."""

    trace_id: str
    host: _Branch | None
    """The branch with the previous id; None where a conversation begins."""
    start: int
    """How many ids are before its own."""
    own_ids: TokenIds
    doubled_at: set[int] = field(default_factory=set[int])
    """Where another branch leaves with the same id that this one continues with: equal ids, sampled twice."""
    has_twin: bool = False
    """Whether another branch begins at the same place with the same id."""


_Place = tuple[str, int]
"""Trace with the previous id, and how many ids are before in all; `("", 0)` where conversations begin."""


class _PrefixTree:
    def __init__(self) -> None:
        self._branches: dict[str, _Branch] = {}
        self._beginning: dict[_Place, dict[int, list[_Branch]]] = {}
        """place -> first id -> branches."""

    def find(self, ids: TokenIds, known: SharedPrefix | None = None) -> SharedPrefix | None:
        """Returns the longest prefix of `ids` that is in the tree.

        known: a prefix that is in the tree. Only the rest is compared, so that a long history costs nothing.
        """
        best, places = (None, [("", 0)]) if known is None else self._where(ids, known)
        while places:
            place = places.pop()
            for branch in self._leaving(place, ids):
                end = place[1] + _num_equal(branch.own_ids, ids[place[1] :])
                if best is None or end > best.num_ids:
                    best = SharedPrefix(branch.trace_id, end)
                places += [(branch.trace_id, num) for num in branch.doubled_at if num < end]
                places.append((branch.trace_id, end))
        return best

    def _where(self, ids: TokenIds, known: SharedPrefix) -> tuple[SharedPrefix, list[_Place]]:
        """Returns the match up to the end of the branch with the last known id, and the places where longer prefixes
        may leave."""
        branch, end = self._branches[known.trace_id], known.num_ids
        while end <= branch.start and branch.host is not None:
            branch = branch.host
        end += _num_equal(branch.own_ids[end - branch.start :], ids[end:])
        best = SharedPrefix(branch.trace_id, end)
        places: list[_Place] = []
        above: _Branch | None = branch
        while above is not None:
            places += [(above.trace_id, num) for num in above.doubled_at if num < end]
            if above.has_twin:
                places.append(_place_after(above.host, above.start))
            end, above = above.start, above.host
        return best, [*places, (best.trace_id, best.num_ids)]

    def _leaving(self, place: _Place, ids: TokenIds) -> Sequence[_Branch]:
        """Returns branches at `place` that continue like `ids`."""
        num = place[1]
        return self._beginning.get(place, {}).get(int(ids[num]), ()) if num < len(ids) else ()

    def add(self, trace_id: str, own_ids: TokenIds, after: SharedPrefix | None) -> None:
        host, start = (None, 0) if after is None else (self._branches[after.trace_id], after.num_ids)
        branch = _Branch(trace_id, host, start, own_ids)
        self._branches[trace_id] = branch
        if len(own_ids) == 0:
            return
        alike = self._beginning.setdefault(_place_after(host, start), {}).setdefault(int(own_ids[0]), [])
        alike.append(branch)
        for twin in alike if len(alike) > 1 else ():
            twin.has_twin = True
        if host is not None and host.own_ids[start - host.start : start - host.start + 1].tolist() == [own_ids[0]]:
            host.doubled_at.add(start)


def _place_after(host: _Branch | None, num: int) -> _Place:
    return ("", 0) if host is None else (host.trace_id, num)


def _num_equal(a: TokenIds, b: TokenIds) -> int:
    """Like `common_prefix_len`, but fast if the arrays differ early."""
    num, look = 0, _FIRST_LOOK
    while (found := common_prefix_len(a[num : num + look], b[num : num + look])) == look:
        num, look = num + look, look * 2
    return num + found


def share_prefixes(traces: Iterable[Trace]) -> Iterator[Trace]:
    """Yields the traces, each `prompt_ids` without the part that earlier ones contain. All prompts must be whole."""
    tree = _PrefixTree()
    before: dict[str, Trace] = {}
    for trace in traces:
        parent = before.get(trace.parent_trace_id or "")
        shared = tree.find(trace.prompt_ids, None if parent is None else _shared_with(parent, trace.prompt_ids))
        rest = trace.prompt_ids if shared is None else trace.prompt_ids[shared.num_ids :]
        tree.add(trace.trace_id, np.concatenate([rest, trace.response_ids]), shared)
        before[trace.trace_id] = trace
        yield msgspec.structs.replace(trace, prompt_ids=rest, shared_prefix=shared)


def _shared_with(trace: Trace, ids: TokenIds) -> SharedPrefix | None:
    num = common_prefix_len(trace.prompt_ids, ids)
    if num == len(trace.prompt_ids):
        num += common_prefix_len(trace.response_ids, ids[num:])
    return SharedPrefix(trace.trace_id, num) if num else None


def with_whole_prompts(traces: Iterable[T]) -> Iterator[T]:
    """Yields the traces, or rows, with every prompt written out. Whole ones are passed through.

    Rows of a session must be together and in order, as exports write them; one session at a time is kept in memory.
    Raises: InvalidRequest when a row shares a prefix with a row that did not come before it.
    """
    streams: dict[str, TokenIds] = {}
    session: tuple[str, int] | None = None
    for trace in traces:
        if session != (session := _session(trace)):
            streams.clear()
        whole = _written_out(trace, streams)
        streams[trace.trace_id] = np.concatenate([whole.prompt_ids, whole.response_ids])
        yield whole


def _session(trace: Trace | Row) -> tuple[str, int]:
    return trace.session_id, trace.attempt if isinstance(trace, Row) else 0


def _written_out(trace: T, streams: dict[str, TokenIds]) -> T:
    shared = trace.shared_prefix
    if shared is None:
        return trace
    held = streams.get(shared.trace_id, np.empty(0, np.int32))
    if len(held) < shared.num_ids:
        raise InvalidRequest(
            f"{trace.trace_id} begins with {shared.num_ids} ids of {shared.trace_id}, of which {len(held)} are here: "
            "keep the rows of a session together and in order."
        )
    prompt_ids = np.concatenate([held[: shared.num_ids], trace.prompt_ids])
    return msgspec.structs.replace(trace, prompt_ids=prompt_ids, shared_prefix=None)
