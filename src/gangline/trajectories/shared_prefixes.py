"""Traces of a session as a prefix tree, and back: a prompt that begins like an earlier trace names it instead.

`share_prefixes` cuts from each prompt what an earlier trace holds already, `with_whole_prompts` writes it out again;
one undoes the other, id for id. No context id is held twice. Sampled ids are never shared with another trace's sampled
ids, equal or not: each was drawn once, and is trained on once.
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
from gangline.trajectories.export import Row

__all__ = ["share_prefixes", "with_whole_prompts"]

T = TypeVar("T", Trace, Row)

_FIRST_LOOK = 64


@dataclass(slots=True)
class _Branch:
    """What a trace adds to the tree."""

    trace_id: str
    start: int
    """Ids before its own."""
    own_ids: TokenIds
    doubled_at: set[int] = field(default_factory=set[int])
    """Where another branch leaves with the very id that this one goes on with: equal ids, sampled twice."""

    def goes_on_with(self, next_id: np.int32, num_before: int) -> bool:
        at = num_before - self.start
        return at < len(self.own_ids) and bool(self.own_ids[at] == next_id)


_Place = tuple[str, int]
"""Trace that holds the id before, how many ids are before in all; `("", 0)` where conversations begin."""


class _PrefixTree:
    def __init__(self) -> None:
        self._branches: dict[str, _Branch] = {}
        self._beginning: dict[_Place, dict[int, list[_Branch]]] = {}
        """place -> first id -> branches."""

    def find(self, ids: TokenIds) -> SharedPrefix | None:
        """The longest prefix of `ids` that is in the tree."""
        best: SharedPrefix | None = None
        places: list[_Place] = [("", 0)]
        while places:
            place = places.pop()
            for branch in self._leaving(place, ids):
                end = place[1] + _num_equal(branch.own_ids, ids[place[1] :])
                if best is None or end > best.num_ids:
                    best = SharedPrefix(branch.trace_id, end)
                places += [(branch.trace_id, num) for num in branch.doubled_at if num < end]
                places.append((branch.trace_id, end))
        return best

    def _leaving(self, place: _Place, ids: TokenIds) -> Sequence[_Branch]:
        """Branches at `place` that go on as `ids` does."""
        num = place[1]
        return self._beginning.get(place, {}).get(int(ids[num]), ()) if num < len(ids) else ()

    def add(self, trace_id: str, own_ids: TokenIds, after: SharedPrefix | None) -> None:
        place = ("", 0) if after is None else (after.trace_id, after.num_ids)
        branch = _Branch(trace_id, place[1], own_ids)
        self._branches[trace_id] = branch
        if len(own_ids) == 0:
            return
        self._beginning.setdefault(place, {}).setdefault(int(own_ids[0]), []).append(branch)
        if (host := self._branches.get(place[0])) is not None and host.goes_on_with(own_ids[0], place[1]):
            host.doubled_at.add(place[1])


def _num_equal(a: TokenIds, b: TokenIds) -> int:
    """`common_prefix_len`, but short where the arrays soon differ."""
    num, look = 0, _FIRST_LOOK
    while (found := common_prefix_len(a[num : num + look], b[num : num + look])) == look:
        num, look = num + look, look * 2
    return num + found


def share_prefixes(traces: Iterable[Trace]) -> Iterator[Trace]:
    """The same traces, each `prompt_ids` without what earlier ones hold. All prompts must be whole."""
    tree = _PrefixTree()
    for trace in traces:
        shared = tree.find(trace.prompt_ids)
        rest = trace.prompt_ids if shared is None else trace.prompt_ids[shared.num_ids :]
        tree.add(trace.trace_id, np.concatenate([rest, trace.response_ids]), shared)
        yield msgspec.structs.replace(trace, prompt_ids=rest, shared_prefix=shared)


def with_whole_prompts(traces: Iterable[T]) -> Iterator[T]:
    """The same traces, or rows, with every prompt written out. Whole ones pass as they are.

    Rows of a session must come together and in order, as exports write them; one session at a time is kept in memory.
    Raises: InvalidRequest when a row shares a prefix with one that did not come before it.
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
