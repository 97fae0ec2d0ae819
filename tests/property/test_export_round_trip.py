"""Every format gives back the rows that were written."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.domain.session import SessionResult
from gangline.domain.tokens import encode_msgpack
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.parquet import read_parquet, write_parquet
from gangline.rows.rows import Row, read_jsonl, read_msgpack, rows_of, write_jsonl, write_msgpack
from support.strategies import Sample, completion_trees

FORMATS = {
    "parquet": (write_parquet, read_parquet),
    "jsonl": (write_jsonl, read_jsonl),
    "msgpack": (write_msgpack, read_msgpack),
}
rewards = st.none() | st.floats(-1e6, 1e6)
metadata = st.dictionaries(st.text(max_size=4), st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4))


def result_of(sample: Sample, reward: float | None, extra: dict[str, object]) -> SessionResult:
    builder = PrefixMergingBuilder(PrefixMergingConfig(on_divergence="splice"))
    trajectory = builder.build(sample.tree, session_id="session-1", task_id="task-1")
    traces = tuple(msgspec.structs.replace(trace, reward=reward, metadata=extra) for trace in trajectory.traces)
    return SessionResult(
        session_id="session-1",
        task_id="task-1",
        node_id="node-1",
        attempt=2,
        fence=3,
        outcome="completed",
        reward=reward,
        trajectory=msgspec.structs.replace(trajectory, traces=traces),
    )


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None)
@given(sample=completion_trees(), reward=rewards, extra=metadata)
def test_rows_read_back_equal(name: str, sample: Sample, reward: float | None, extra: dict[str, object]) -> None:
    write: Callable[[Iterable[Row], Path], int]
    write, read = FORMATS[name]
    rows = rows_of(result_of(sample, reward, extra))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deep" / "rows"
        assert write(iter(rows), path) == len(rows)
        assert [encode_msgpack(row) for row in read(path)] == [encode_msgpack(row) for row in rows]
        assert [file.name for file in path.parent.iterdir()] == ["rows"]
