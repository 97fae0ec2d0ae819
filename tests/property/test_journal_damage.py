"""Whatever happens to a byte of the journal: what it gives back is what was written, whole calls without a hole."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.completion import Certificate, Completion
from gangline.domain.conversation import Message, Text
from gangline.domain.tokens import logprobs, token_ids
from gangline.store.journal.log import AttemptKey, AttemptOpened, Journal

SEGMENT_BYTES = 1500
MEMORY = Path("/dev/shm")


@dataclass
class Written:
    """An entry, and the bytes it takes in its segment."""

    session_id: str
    kind: str
    completion_ids: tuple[str, ...]
    number: int
    era: int
    """Of its session: another one begins with each number 0."""
    segment: str
    begin: int
    end: int


def completion(session_id: str, number: int) -> Completion:
    return Completion(
        completion_id=f"{session_id}-{number}",
        session_id=session_id,
        attempt=1,
        status="complete",
        parent_id=None,
        branch_key="k",
        dialect="chat",
        model="m",
        prompt_shared=0,
        prompt_suffix_ids=token_ids(range(number % 7)),
        sampled_ids=token_ids([number]),
        logprobs=logprobs([-0.5]),
        messages_shared=0,
        new_messages=(Message("user", (Text("hi"),)),),
        response=Message("assistant", (Text("ho"),)),
        certificate=Certificate(prompt_source="engine", context="first", logprobs="processed", finish_reason="stop"),
        started_at=1.0,
        finished_at=2.0,
    )


class Writer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: list[Written] = []
        self.num_sampled = 0
        self.journal = Journal.open(folder, segment_bytes=SEGMENT_BYTES)
        self.numbers: dict[str, int] = {}
        self.eras: Counter[str] = Counter()

    async def write(self, session_id: str, kind: str, num_choices: int) -> None:
        if kind == "opened" and session_id in self.numbers:
            return
        completions: list[Completion] = []
        before = self._end()
        if kind == "opened":
            await self.journal.open_attempt(AttemptOpened(session_id, 1, "task", 1))
        elif kind == "closed":
            await self.journal.close_attempt(AttemptKey(session_id, 1))
        else:
            for _ in range(num_choices):
                self.num_sampled += 1
                completions.append(completion(session_id, self.num_sampled))
            await self.journal.append_all(completions)
        segment, end = self._end()
        number = self.numbers.pop(session_id, 0)
        if kind != "closed":
            self.numbers[session_id] = number + 1
        begin = before[1] if before[0] == segment else 0
        ids = tuple(one.completion_id for one in completions)
        self.eras[session_id] += number == 0
        self.entries.append(Written(session_id, kind, ids, number, self.eras[session_id], segment, begin, end))

    def _end(self) -> tuple[str, int]:
        last = max(self.folder.glob("*.log"))
        return last.name, last.stat().st_size


def expected(entries: list[Written]) -> dict[str, list[str]]:
    """Of the sessions that are open: what may be read of them, given the entries that are still whole."""
    kept: dict[str, list[tuple[str, ...]]] = {}
    eras: dict[str, int] = {}
    for entry in entries:
        if entry.kind == "closed" or (entry.kind == "opened" and entry.number == 0):
            kept.pop(entry.session_id, None)
        num = len(kept.get(entry.session_id, ()))
        if entry.kind != "closed" and entry.number == num and (num == 0 or eras[entry.session_id] == entry.era):
            kept.setdefault(entry.session_id, []).append(entry.completion_ids)
            eras[entry.session_id] = entry.era
    return {session_id: [one for ids in found for one in ids] for session_id, found in kept.items()}


actions = st.lists(
    st.tuples(
        st.sampled_from(["s1", "s2", "s3"]),
        st.sampled_from(["opened", "completions", "completions", "completions", "closed"]),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=24,
)
damages = st.sampled_from(["flip", "burst", "truncate", "zeros", "noise", "none"])


def damage(path: Path, kind: str, at: int, bit: int, noise: bytes) -> tuple[int, int]:
    """Does it; returns the first byte that is no longer as it was (the size, where none is), and the end of those."""
    data = bytearray(path.read_bytes())
    size = len(data)
    if kind == "none" or not data:
        return size, size
    at %= size
    if kind == "flip":
        data[at] ^= 1 << bit
        path.write_bytes(data)
        return at, at + 1
    if kind == "truncate":
        path.write_bytes(data[:at])
        return at, size
    # What a power failure leaves: the size is there, the bytes are not; or a bad sector in the middle.
    end = min(at + 64, size) if kind == "burst" else size
    new = bytes(end - at) if kind == "zeros" else (noise * size)[: end - at]
    changed = [at + i for i, (old, now) in enumerate(zip(data[at:end], new, strict=True)) if old != now]
    data[at:end] = new
    path.write_bytes(data)
    return (changed[0], changed[-1] + 1) if changed else (size, size)


@given(actions, damages, st.data())
def test_damage_never_makes_a_wrong_record_and_takes_no_more_than_it_must(
    done: list[tuple[str, str, int]], kind: str, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        asyncio.run(_damaged(Path(folder), done, kind, data))


async def _damaged(folder: Path, done: list[tuple[str, str, int]], kind: str, data: st.DataObject) -> None:
    writer = Writer(folder)
    for action in done:
        await writer.write(*action)
    await writer.journal.close()

    segments = sorted(folder.glob("*.log"))
    hit = data.draw(st.sampled_from(segments))
    first_bad, end_of_bad = damage(
        hit, kind, data.draw(st.integers(0, 10_000)), data.draw(st.integers(0, 7)), data.draw(st.binary(min_size=1))
    )
    names = {path.name for path in segments}
    assert expected(writer.entries) == expected([e for e in writer.entries if e.segment in names]), "deleted too much"
    is_hit = [e.segment == hit.name and e.begin < end_of_bad and first_bad < e.end for e in writer.entries]
    whole = [e for e, bad in zip(writer.entries, is_hit, strict=True) if e.segment in names and not bad]
    records: list[Any] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("gangline.journal")
    logger.addHandler(handler)
    try:
        journal = Journal.open(folder, segment_bytes=SEGMENT_BYTES)
    finally:
        logger.removeHandler(handler)

    want = expected(whole)
    for session_id in ("s1", "s2", "s3"):
        found = await journal.read(AttemptKey(session_id, 1))
        assert [one.completion_id for one in found] == want.get(session_id, [])
    last_good = max((e.end for e in whole if e.segment == hit.name), default=0)
    size = max((e.end for e in writer.entries if e.segment == hit.name), default=0)
    size = min(size, first_bad) if kind == "truncate" else size
    assert any("journal.cut" in record.msg for record in records) == (last_good < size)
    is_between = kind != "truncate" and any(
        bad and e.end <= last_good for e, bad in zip(writer.entries, is_hit, strict=True)
    )
    assert any("journal.damaged" in record.msg for record in records) == is_between

    # It continues: what is appended now is there the next time, and nothing is cut again.
    session_id = next(iter(want), "s1")
    await journal.append(completion(session_id, 999))
    await journal.close()
    again = Journal.open(folder, segment_bytes=SEGMENT_BYTES)
    want.setdefault(session_id, []).append(f"{session_id}-999")
    for session_id in ("s1", "s2", "s3"):
        found = await again.read(AttemptKey(session_id, 1))
        assert [one.completion_id for one in found] == want.get(session_id, [])
    await again.close()
