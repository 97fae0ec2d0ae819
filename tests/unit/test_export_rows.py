"""Rows: what they hold, what a reader without Gangline sees, what goes wrong."""

from __future__ import annotations

import json
import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gangline.domain.errors import InvalidRequest
from gangline.domain.trajectory import Trace
from gangline.rows.parquet import read_parquet, write_parquet
from gangline.rows.rows import Row, read_jsonl, read_msgpack, rows_of, write_jsonl, write_msgpack
from gangline.settings.installation import extra_command
from support.strategies import session_result

RESULT = session_result()


def test_a_row_holds_its_trace_and_its_session() -> None:
    row, *others = rows_of(RESULT)
    assert len(others) == 3
    assert (row.task_id, row.session_id, row.outcome, row.attempt) == ("task-1", "session-1", "completed", 1)
    assert (row.reward, row.session_reward) == (0.5, 0.5)
    assert (row.first_completion_id, row.last_completion_id) == ("c0000", "c0003")
    assert [certificate.context for certificate in row.certificates] == ["first", "exact", "exact"]


def test_a_session_without_a_trajectory_has_no_rows() -> None:
    assert rows_of(session_result(trajectory=None)) == []


def test_a_stranger_reads_the_parquet_file_as_lists_of_numbers(tmp_path: Path) -> None:
    write_parquet(rows_of(RESULT), tmp_path / "rows.parquet")
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.schema.field("prompt_ids").type == pa.list_(pa.int32())
    assert table.schema.field("response_logprobs").type == pa.list_(pa.float32())
    first = table.to_pylist()[0]
    assert first["loss_mask"] == [1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert first["spans"][1] == {
        "completion_id": "c0001",
        "start": 5,
        "end": 7,
        "role": "main",
        "score": None,
        "agent_role": None,
        "model": "model",
    }
    assert json.loads(first["certificates"])[0]["context"] == "first"


def test_a_stranger_reads_the_json_lines(tmp_path: Path) -> None:
    write_jsonl(rows_of(RESULT), tmp_path / "rows.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert lines[0]["response_ids"][:3] == [10, 11, 2]
    assert lines[0]["prompt_messages"][0]["role"] == "user"


def test_an_export_that_fails_leaves_no_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    def failing() -> Iterator[Row]:
        yield from rows_of(RESULT)
        raise RuntimeError("the source broke")

    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="the source broke"):
        write_jsonl(failing(), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_row_holds_all_that_its_trace_does() -> None:
    assert set(Trace.__struct_fields__) <= set(Row.__struct_fields__)
    trace = RESULT.trajectory.traces[0]
    row = rows_of(RESULT)[0]
    for name in Trace.__struct_fields__:
        assert getattr(row, name) is getattr(trace, name)


@pytest.mark.parametrize(
    ("write", "read"), [(write_jsonl, read_jsonl), (write_msgpack, read_msgpack), (write_parquet, read_parquet)]
)
def test_texts_of_tokens_come_back_with_what_has_none(write, read, tmp_path: Path) -> None:
    row = msgspec.structs.replace(rows_of(RESULT)[0], response_texts=("a", None, "", "\ufffd", "🙂"))
    plain = msgspec.structs.replace(row, response_texts=())
    write([row, plain], tmp_path / "rows")
    assert [back.response_texts for back in read(tmp_path / "rows")] == [row.response_texts, ()]


@pytest.mark.parametrize(
    ("write", "read", "most"),
    [(write_jsonl, read_jsonl, 2), (write_msgpack, read_msgpack, 2), (write_parquet, read_parquet, 8)],
)
def test_a_large_export_is_never_in_memory_whole(write, read, most: int, tmp_path: Path) -> None:
    """Rows of 300,000 ids; Parquet keeps a group of 2 million."""
    path, num, alive = tmp_path / "rows", 20, Alive()

    def rows() -> Iterator[Row]:
        for _ in range(num):
            yield alive.watched(
                msgspec.structs.replace(rows_of(RESULT)[0], prompt_ids=np.zeros(300_000, np.int32)), "prompt_ids"
            )

    assert write(rows(), path) == num
    assert 0 < alive.most <= most
    alive.most = 0
    assert sum(len(alive.watched(row, "prompt_ids").prompt_ids) for row in read(path)) == num * 300_000
    assert 0 < alive.most <= most


class Alive:
    """How many of the watched rows' arrays there are at once."""

    def __init__(self) -> None:
        self._num = self.most = 0

    def watched(self, row: Row, name: str) -> Row:
        self._num += 1
        self.most = max(self.most, self._num)
        weakref.finalize(getattr(row, name), self._gone)
        return row

    def _gone(self) -> None:
        self._num -= 1


@pytest.mark.parametrize("read", [read_jsonl, read_msgpack, read_parquet])
@pytest.mark.parametrize("content", ['{"hello": 1}\n', "[]]", "\x93"])
def test_a_file_of_something_else_is_refused(read, content: str, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match="rows"):
        list(read(path))


def test_without_pyarrow_parquet_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "gangline.rows.parquet")
    with pytest.raises(InvalidRequest, match=re.escape(extra_command("parquet"))):
        __import__("gangline.rows.parquet")
