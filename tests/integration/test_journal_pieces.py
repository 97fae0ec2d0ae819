"""Large entries of the journal: written in pieces, between which the small entries of other sessions go."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.completion import Completion
from gangline.domain.conversation import Message, Text
from gangline.domain.errors import DiskFull
from gangline.domain.tokens import encode_msgpack
from gangline.store.journal import log
from gangline.store.journal.entries import read_frames
from gangline.store.journal.log import AttemptKey, AttemptOpened, Journal
from support.store.completions import completion

PIECE = log.PIECE_BYTES
MEMORY = Path("/dev/shm")


def large(number: int, num_pieces: int, session: str = "s-large") -> Completion:
    """Its texts make so many pieces, and all else a little of one more."""
    messages = (Message("user", (Text("x" * (num_pieces * PIECE)),)),)
    return msgspec.structs.replace(completion(number, session=session), new_messages=messages)


async def ids(journal: Journal, session: str) -> list[str]:
    return [one.completion_id for one in await journal.read(AttemptKey(session, 1))]


class SteppedSyncs:
    """A disk whose every sync of data waits until the test allows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._allowed = threading.Semaphore(0)
        self._begun = threading.Semaphore(0)
        self._real = os.fdatasync
        self.num_done = 0
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def _sync(self, file: int) -> None:
        self._begun.release()
        self._allowed.acquire()
        self._real(file)
        self.num_done += 1

    async def begun(self) -> None:
        await asyncio.to_thread(self._begun.acquire)

    def allow(self, num: int) -> None:
        for _ in range(num):
            self._allowed.release()


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Generator[SteppedSyncs]:
    stepped = SteppedSyncs(monkeypatch)
    yield stepped
    stepped.allow(1000)


async def test_a_small_commit_is_acknowledged_while_a_large_one_of_another_session_is_not_on_the_disk(
    tmp_path: Path, syncs: SteppedSyncs
) -> None:
    journal = Journal.open(tmp_path)
    writing = asyncio.create_task(journal.append(large(0, 8)))
    await syncs.begun()  # the first piece
    small = asyncio.create_task(journal.append(completion(1, session="s-small")))
    syncs.allow(1)
    await syncs.begun()  # the second piece, and the small entry
    assert not small.done()
    syncs.allow(1)
    await small
    assert (writing.done(), syncs.num_done) == (False, 2)
    syncs.allow(100)
    await writing
    assert [await ids(journal, name) for name in ("s-large", "s-small")] == [["c000000"], ["c000001"]]
    await journal.close()


async def test_large_entries_of_several_sessions_take_turns(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    done: list[str] = []

    async def append(one: Completion) -> None:
        await journal.append(one)
        done.append(one.session_id)

    await asyncio.gather(append(large(0, 20, "s-first")), append(large(0, 2, "s-second")), append(large(0, 5, "s-3")))
    assert done == ["s-second", "s-3", "s-first"]
    await journal.close()


async def test_one_batch_is_bounded_and_leaves_nobody_out(tmp_path: Path) -> None:
    """More sessions at once than one sync takes."""
    journal = Journal.open(tmp_path)
    names = [f"s-{number}" for number in range(40)]
    await asyncio.gather(*(journal.append(large(number, 1, name)) for name in names for number in range(2)))
    assert [await ids(journal, name) for name in names] == [["c000000", "c000001"]] * 40
    await journal.close()


async def test_entries_of_one_session_keep_their_order_behind_a_large_one(tmp_path: Path, syncs: SteppedSyncs) -> None:
    journal = Journal.open(tmp_path)
    written = [large(0, 6), completion(1, session="s-large"), completion(2, session="s-large"), large(3, 3)]
    first = asyncio.create_task(journal.append(written[0]))
    await syncs.begun()
    syncs.allow(100)
    await asyncio.gather(first, *(journal.append(one) for one in written[1:]))
    await journal.close()
    again = Journal.open(tmp_path)
    found = await again.read(AttemptKey("s-large", 1))
    assert [encode_msgpack(one) for one in found] == [encode_msgpack(one) for one in written]
    await again.close()


async def test_a_journal_that_is_closed_meanwhile_keeps_a_large_entry_that_is_being_encoded(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    writing = asyncio.create_task(journal.append(large(0, 8)))
    await asyncio.sleep(0)
    await journal.close()
    await writing
    again = Journal.open(tmp_path)
    assert await ids(again, "s-large") == ["c000000"]
    await again.close()


async def test_the_choices_of_a_large_call_are_there_after_its_last_sync_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies after each sync in turn; the session then continues."""
    folder, lives = tmp_path / "journal", list[Path]()
    journal = Journal.open(folder)
    await journal.open_attempt(AttemptOpened("s-large", 1, "t", 1))
    await journal.append(completion(0, session="s-large"))
    real = os.fdatasync

    def keep(file: int) -> None:
        real(file)
        lives.append(shutil.copytree(folder, tmp_path / f"life{len(lives)}", ignore=shutil.ignore_patterns("lock")))

    monkeypatch.setattr(os, "fdatasync", keep)
    await journal.append_all([large(1, 2), large(2, 3)])
    monkeypatch.undo()
    await journal.close()
    assert len(lives) == 6
    for life in lives:
        again = Journal.open(life)
        whole = ["c000000", "c000001", "c000002"] if life is lives[-1] else ["c000000"]
        assert await ids(again, "s-large") == whole
        await again.append(completion(8, session="s-large"))
        await again.append(large(9, 2))
        await again.close()
        third = Journal.open(life)
        assert await ids(third, "s-large") == [*whole, "c000008", "c000009"]
        await third.close()


async def test_a_disk_that_fills_up_between_two_pieces_refuses_the_call_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path)
    await journal.append(completion(0, session="s-large"))
    real, num_writes = os.write, 0

    def full_at_the_third(file: int, data: bytes) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    with monkeypatch.context() as filling:
        filling.setattr(os, "write", full_at_the_third)
        refused = asyncio.create_task(journal.append(large(1, 6)))
        behind = asyncio.create_task(journal.append(completion(2, session="s-large")))
        with pytest.raises(DiskFull):
            await refused
        await behind
    await journal.append(large(3, 2))
    assert await ids(journal, "s-large") == ["c000000", "c000002", "c000003"]
    await journal.close()
    again = Journal.open(tmp_path)
    assert await ids(again, "s-large") == ["c000000", "c000002", "c000003"]
    await again.close()


async def test_pieces_go_on_in_the_next_segment_and_go_with_their_session(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, segment_bytes=3 * PIECE)
    await journal.open_attempt(AttemptOpened("s-large", 1, "t", 1))
    await journal.append(large(0, 10))
    assert len(list(tmp_path.glob("*.log"))) > 3
    await journal.close()
    again = Journal.open(tmp_path, segment_bytes=3 * PIECE)
    assert await ids(again, "s-large") == ["c000000"]
    await again.close_attempt(AttemptKey("s-large", 1))
    assert len(list(tmp_path.glob("*.log"))) == 1
    await again.close()


@given(
    st.lists(st.tuples(st.sampled_from(["s-1", "s-2", "s-3"]), st.integers(1, 4)), min_size=1, max_size=12),
    st.integers(0, 100_000),
    st.booleans(),
)
def test_damage_to_a_piece_costs_its_entry_and_the_later_ones_of_its_session(
    writes: list[tuple[str, int]], at: int, is_cut: bool
) -> None:
    with (
        tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder,
        pytest.MonkeyPatch.context() as small,
    ):
        small.setattr(log, "PIECE_BYTES", 300)
        asyncio.run(_damaged(Path(folder), writes, at, is_cut))


async def _damaged(folder: Path, writes: list[tuple[str, int]], at: int, is_cut: bool) -> None:
    journal = Journal.open(folder, segment_bytes=2_000)
    written: dict[str, list[str]] = {}

    async def append(number: int, session: str, num_pieces: int) -> None:
        one = completion(number, session=session)
        await journal.append(msgspec.structs.replace(one, metadata={"text": "x" * (300 * num_pieces)}))

    for number, (session, _) in enumerate(writes):
        written.setdefault(session, []).append(f"c{number:06d}")
    await asyncio.gather(*(append(number, *write) for number, write in enumerate(writes)))
    await journal.close()

    segments = sorted(folder.glob("*.log"))
    hit = segments[at % len(segments)]
    data = bytearray(hit.read_bytes())
    at %= len(data)
    with hit.open("rb") as file:
        marker = (folder / "marker").read_bytes()
        frames = list(read_frames(file, len(data), marker))
    hurt = {s for f in frames if f.end > at and (is_cut or f.offset <= at) for s in written if s.encode() in f.payload}
    data[at] ^= 1
    hit.write_bytes(data[:at] if is_cut else data)
    again = Journal.open(folder, segment_bytes=2_000)
    left = {session: await ids(again, session) for session in written}
    for session, whole in written.items():
        assert left[session] == (whole[: len(left[session])] if session in hurt else whole)
        await again.append(completion(999_999, session=session))
    await again.close()
    third = Journal.open(folder, segment_bytes=2_000)
    assert [await ids(third, session) for session in written] == [[*left[session], "c999999"] for session in written]
    await third.close()
