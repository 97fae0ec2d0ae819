"""The journal against a real file system."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gangline.domain.errors import DiskFull, StoreError
from gangline.domain.tokens import encode_msgpack
from gangline.store.journal.entries import Unframed, frame_head
from gangline.store.journal.log import AttemptKey, AttemptOpened, Journal
from support.store.completions import completion

KEY = AttemptKey("s-1", 1)


def opened(session: str = "s-1") -> AttemptOpened:
    return AttemptOpened(session, 1, "t", 1)


async def test_completions_come_back_equal_and_in_order_after_reopening(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    await journal.open_attempt(opened())
    for number in range(5):
        await journal.append(completion(number))
    await journal.close()

    again = Journal.open(tmp_path)
    found = await again.read(KEY)
    assert [c.completion_id for c in found] == [f"c{n:06d}" for n in range(5)]
    assert np.array_equal(found[3].sampled_ids, [3, 4])
    assert found[3].new_messages == completion(3).new_messages
    assert again.unclosed() == [opened()]
    await again.close()


async def test_concurrent_appends_are_all_kept_each_once(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    async with asyncio.TaskGroup() as group:
        for number in range(200):
            group.create_task(journal.append(completion(number, session=f"s-{number % 7}")))
    await journal.close()
    again = Journal.open(tmp_path)
    ids = [c.completion_id for n in range(7) for c in await again.read(AttemptKey(f"s-{n}", 1))]
    assert sorted(ids) == [f"c{n:06d}" for n in range(200)]
    await again.close()


@pytest.mark.parametrize("cut", [1, 7, 9, 40])
async def test_a_torn_tail_is_cut_and_all_before_it_is_kept(tmp_path: Path, cut: int) -> None:
    journal = Journal.open(tmp_path)
    for number in range(3):
        await journal.append(completion(number))
    await journal.close()
    (segment,) = tmp_path.glob("*.log")
    os.truncate(segment, segment.stat().st_size - cut)

    again = Journal.open(tmp_path)
    assert [c.completion_id for c in await again.read(KEY)] == ["c000000", "c000001"]
    await again.append(completion(9))
    await again.close()
    third = Journal.open(tmp_path)
    assert [c.completion_id for c in await third.read(KEY)] == ["c000000", "c000001", "c000009"]
    await third.close()


async def test_the_choices_of_one_call_are_kept_or_lost_together(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    await journal.append_all([completion(0), completion(1)])
    await journal.append_all([completion(2), completion(3), completion(4)])
    assert [c.completion_id for c in await journal.read(KEY)] == [f"c{n:06d}" for n in range(5)]
    await journal.close()
    (segment,) = tmp_path.glob("*.log")
    os.truncate(segment, segment.stat().st_size - 1)
    again = Journal.open(tmp_path)
    assert [c.completion_id for c in await again.read(KEY)] == ["c000000", "c000001"]
    with pytest.raises(ValueError, match="several attempts"):
        await again.append_all([completion(2), completion(3, session="s-2")])
    await again.close()


async def test_the_prompt_of_many_choices_is_kept_once(tmp_path: Path) -> None:
    one, many = Journal.open(tmp_path / "one"), Journal.open(tmp_path / "many")
    choices = [completion(number, size=5000) for number in range(8)]
    await one.append(choices[0])
    await many.append_all(choices)
    sizes = [(tmp_path / name / "00000001.log").stat().st_size for name in ("one", "many")]
    assert sizes[1] < 1.3 * sizes[0]
    found = await many.read(KEY)
    assert [encode_msgpack(c) for c in found] == [encode_msgpack(c) for c in choices]
    await one.close()
    await many.close()


async def test_choices_of_different_prompts_stay_different(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    choices = [completion(number, size=number) for number in range(3)]
    await journal.append_all(choices)
    assert [encode_msgpack(c) for c in await journal.read(KEY)] == [encode_msgpack(c) for c in choices]
    await journal.close()


async def test_an_id_used_again_is_a_new_session_even_where_damage_took_the_end_of_the_old_one(tmp_path: Path) -> None:
    for life, number in enumerate((0, 7)):
        folder = tmp_path / f"life{life}"
        folder.mkdir()
        (folder / "marker").write_bytes(b"8 bytes!")
        journal = Journal.open(folder, segment_bytes=1)
        await journal.open_attempt(opened())
        await journal.append(completion(number))
        await journal.close()
    for number, path in enumerate(sorted((tmp_path / "life1").glob("*.log")), start=3):
        path.rename(tmp_path / "life0" / f"{number:08d}.log")
    again = Journal.open(tmp_path / "life0")
    assert [c.completion_id for c in await again.read(KEY)] == ["c000007"]
    await again.close()


async def test_a_flipped_bit_is_never_read_as_a_completion(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    for number in range(3):
        await journal.append(completion(number, size=1000))
    await journal.close()
    (segment,) = tmp_path.glob("*.log")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1  # in the second frame
    segment.write_bytes(data)
    again = Journal.open(tmp_path)
    assert [c.completion_id for c in await again.read(KEY)] == ["c000000"]
    await again.close()


async def test_segments_of_closed_attempts_are_deleted_and_open_ones_kept(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, segment_bytes=4096)
    await journal.open_attempt(opened("s-keep"))
    await journal.append(completion(0, session="s-keep"))
    for number in range(20):
        session = f"s-{number}"
        await journal.open_attempt(opened(session))
        await journal.append(completion(number, session=session, size=500))
        await journal.close_attempt(AttemptKey(session, 1))
    assert len(list(tmp_path.glob("*.log"))) > 5, "the oldest segment holds an open attempt: nothing may go yet"
    await journal.close_attempt(AttemptKey("s-keep", 1))
    assert len(list(tmp_path.glob("*.log"))) <= 2
    assert journal.unclosed() == []
    await journal.close()


async def test_a_closing_stays_as_long_as_what_it_closes(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, segment_bytes=1)
    await journal.open_attempt(opened("s-keep"))
    async with asyncio.TaskGroup() as group:  # one segment with entries of both
        group.create_task(journal.append(completion(1, session="s-keep")))
        group.create_task(journal.open_attempt(opened("s-gone")))
    await journal.append(completion(2, session="s-gone"))
    await journal.close_attempt(AttemptKey("s-gone", 1))
    for number in range(3):
        await journal.append(completion(number, session="s-keep"))
    await journal.close()
    for _ in range(2):  # opening deletes segments too
        again = Journal.open(tmp_path)
        assert again.unclosed() == [opened("s-keep")]
        await again.close()


async def test_a_full_disk_refuses_the_call_and_keeps_the_log_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path)
    await journal.append(completion(0))
    real_write = os.write

    def half_then_full(fd: int, data: memoryview) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(DiskFull):
        await journal.append(completion(1))
    monkeypatch.undo()
    await journal.append(completion(2))
    await journal.close()
    again = Journal.open(tmp_path)
    assert [c.completion_id for c in await again.read(KEY)] == ["c000000", "c000002"]
    await again.close()


async def test_a_failed_sync_that_cannot_be_undone_at_once_is_undone_before_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path)
    await journal.append(completion(0))

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fails)
        broken.setattr(os, "ftruncate", fails)
        with pytest.raises(StoreError, match="Input/output error"):
            await journal.append(completion(1))
    await journal.append(completion(2))
    assert [c.completion_id for c in await journal.read(KEY)] == ["c000000", "c000002"]
    await journal.close()
    again = Journal.open(tmp_path)
    assert [c.completion_id for c in await again.read(KEY)] == ["c000000", "c000002"]
    await again.close()


async def test_a_segment_that_cannot_be_begun_is_begun_at_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path, segment_bytes=1)
    await journal.append(completion(0))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "open", full)
        for _ in range(2):
            with pytest.raises(DiskFull):
                await journal.append(completion(1))
    await journal.append(completion(2))
    assert [c.completion_id for c in await journal.read(KEY)] == ["c000000", "c000002"]
    assert len(list(tmp_path.glob("*.log"))) == 2
    await journal.close()


async def test_a_segment_that_cannot_be_deleted_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(tmp_path, segment_bytes=1)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refused)
        for number in range(3):
            await journal.append(completion(number))
            await journal.close_attempt(KEY)
        assert len(list(tmp_path.glob("*.log"))) == 6
    await journal.close_attempt(KEY)
    assert len(list(tmp_path.glob("*.log"))) == 1
    await journal.close()


async def test_one_journal_has_one_writer(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    with pytest.raises(StoreError, match="another process has the journal"):
        Journal.open(tmp_path)
    await journal.append(completion(0))
    await journal.close()
    await journal.close()
    again = Journal.open(tmp_path)
    assert len(await again.read(KEY)) == 1
    with pytest.raises(StoreError, match="cannot be written"):
        await journal.append(completion(1))
    await again.close()


async def test_damage_under_a_running_journal_is_told_to_whoever_reads(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    for number in range(2):
        await journal.append(completion(number, size=1000))
    (segment,) = tmp_path.glob("*.log")
    data = bytearray(segment.read_bytes())
    data[-100] ^= 1
    segment.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        await journal.read(KEY)
    segment.unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        await journal.read(KEY)
    await journal.close()


async def test_damage_between_entries_costs_its_own_entry_and_what_follows_it_in_its_attempt(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    sizes: list[int] = []
    for number in range(6):
        await journal.append(completion(number, session=f"s-{number % 2}"))
        sizes.append(next(tmp_path.glob("*.log")).stat().st_size)
    await journal.close()
    (segment,) = tmp_path.glob("*.log")
    damaged = bytearray(segment.read_bytes())
    damaged[sizes[1] + 40] ^= 1  # the second one of the first session
    segment.write_bytes(damaged)
    for _ in range(2):
        journal = Journal.open(tmp_path)
        assert [c.completion_id for c in await journal.read(AttemptKey("s-0", 1))] == ["c000000"]
        assert [c.completion_id for c in await journal.read(AttemptKey("s-1", 1))] == ["c000001", "c000003", "c000005"]
        await journal.close()
    assert segment.read_bytes() == damaged


async def test_a_frame_that_an_agent_wrote_into_its_text_is_not_taken_for_one_behind_damage(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    forged = msgspec.msgpack.encode(opened())
    frames = [frame_head(marker, Unframed(0, 0, forged)) + forged for marker in (b"8 bytes!", bytes(8))]
    text = b"".join(frames).decode("latin-1").encode().decode()
    await journal.append(msgspec.structs.replace(completion(0), metadata={"said": b"".join(frames), "text": text}))
    await journal.append(completion(1, session="s-9"))
    await journal.close()
    (segment,) = tmp_path.glob("*.log")
    damaged = bytearray(segment.read_bytes())
    damaged[30] ^= 1
    segment.write_bytes(damaged)
    again = Journal.open(tmp_path)
    assert again.unclosed() == []
    assert [c.completion_id for c in await again.read(AttemptKey("s-9", 1))] == ["c000001"]
    await again.close()


async def test_a_lost_marker_is_found_again_and_entries_without_any_are_refused(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    await journal.append(completion(0))
    await journal.close()
    for lost in (b"", b"damaged!"):
        (tmp_path / "marker").write_bytes(lost)
        journal = Journal.open(tmp_path)
        assert len(await journal.read(KEY)) == 1
        await journal.close()
    (tmp_path / "marker").unlink()
    (tmp_path / "00000001.log").write_bytes(b"of an older version")
    with pytest.raises(StoreError, match="another version of Gangline"):
        Journal.open(tmp_path)
    assert (tmp_path / "00000001.log").read_bytes() == b"of an older version"


async def test_what_was_cut_off_is_set_aside_not_thrown_away(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    for number in range(3):
        await journal.append(completion(number))
    await journal.close()
    (segment,) = tmp_path.glob("*.log")
    whole = segment.read_bytes()
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    segment.write_bytes(damaged)
    await Journal.open(tmp_path).close()
    (aside,) = tmp_path.glob("*.damaged")
    assert segment.read_bytes() + aside.read_bytes() == damaged


async def test_entries_of_a_newer_format_are_refused_not_cut(tmp_path: Path) -> None:
    payload = msgspec.msgpack.encode({"type": "of the future", "session_id": "s-1", "attempt": 1})
    (tmp_path / "00000001.log").write_bytes(frame_head(b"8 bytes!", Unframed(0, 0, payload)) + payload)
    for _ in range(2):  # it does not keep the lock either
        with pytest.raises(StoreError, match="another version of Gangline"):
            Journal.open(tmp_path)
    assert (tmp_path / "00000001.log").stat().st_size > len(payload)


async def test_a_session_id_may_be_used_again_after_its_end(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    await journal.open_attempt(opened())
    await journal.append(completion(0))
    async with asyncio.TaskGroup() as group:  # written in one batch
        group.create_task(journal.close_attempt(KEY))
        group.create_task(journal.open_attempt(opened()))
        group.create_task(journal.append(completion(1)))
    assert [c.completion_id for c in await journal.read(KEY)] == ["c000001"]
    await journal.close()
    again = Journal.open(tmp_path)
    assert [c.completion_id for c in await again.read(KEY)] == ["c000001"]
    await again.close()


async def test_an_attempt_that_is_opened_again_begins_anew(tmp_path: Path) -> None:
    """A node that gave a session back may be given the same attempt once more."""
    journal = Journal.open(tmp_path)
    await journal.open_attempt(opened())
    await journal.append(completion(0))
    await journal.open_attempt(AttemptOpened("s-1", 1, "t", 2))
    await journal.append(completion(1))
    for _ in range(2):
        assert [c.completion_id for c in await journal.read(KEY)] == ["c000001"]
        assert [again.fence for again in journal.unclosed()] == [2]
        await journal.close()
        journal = Journal.open(tmp_path)
    await journal.close_attempt(KEY)
    assert journal.unclosed() == []
    await journal.close()


_WRITER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_journal import completion
from gangline.store.journal.log import Journal
async def main():
    journal = Journal.open(Path(sys.argv[1]))
    async def one(worker):
        size = 150_000 if worker == 0 else 3  # written in pieces, between the others
        for number in range(10_000):
            await journal.append(completion(number, session=f"s-{worker}", size=size))
            print(f"s-{worker} {number}", flush=True)
    await asyncio.gather(*(one(worker) for worker in range(4)))
asyncio.run(main())
"""


async def test_kill_minus_nine_loses_no_acknowledged_completion(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    lines = [writer.stdout.readline() for _ in range(60)]
    os.kill(writer.pid, signal.SIGKILL)
    lines += writer.stdout.readlines()
    writer.stdout.close()
    writer.wait()
    acknowledged = [line.split() for line in lines if line.endswith("\n")]
    journal = Journal.open(tmp_path)
    for worker in range(4):
        kept = [c.completion_id for c in await journal.read(AttemptKey(f"s-{worker}", 1))]
        assert kept == [f"c{n:06d}" for n in range(len(kept))]
        told = [number for session, number in acknowledged if session == f"s-{worker}"]
        assert len(kept) >= len(told)
    await journal.close()
