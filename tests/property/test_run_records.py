"""A file of records that is read while a trainer writes it gives what reading all of it gives, at every moment."""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.train.runs.log import GrowingRecords, RunLog, read_records
from gangline.train.runs.records import StepRecord
from support.training.fakes import step_record

MOMENTS = st.tuples(st.sampled_from(["append", "cut", "resume", "remove"]), st.integers(0, 8))


@settings(max_examples=30)
@given(moments=st.lists(MOMENTS, max_size=12))
def test_what_is_read_on_is_what_is_read_anew(moments: list[tuple[str, int]]) -> None:
    """append: a whole line. cut: a part of one, as a killed trainer leaves it; the next one removes it. resume: records
    after a checkpoint's step are removed."""
    clock = count(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, log = folder / "metrics.jsonl", RunLog(folder)
        growing = GrowingRecords(path, StepRecord)
        for moment, step in moments:
            record = msgspec.structs.replace(step_record(), step=step, wall_s=float(next(clock)))
            match moment:
                case "append":
                    log.write(record)
                case "cut":
                    with path.open("ab") as file:
                        file.write(msgspec.json.encode(record)[: 10 + step])
                case "resume":
                    log = RunLog(folder, last_step=step)
                case _:
                    path.unlink(missing_ok=True)
            if step % 3:  # it does not look at every moment
                assert growing.read() == read_records(path)
            if moment == "cut":
                log = RunLog(folder, last_step=99)
        assert growing.read() == read_records(path)
