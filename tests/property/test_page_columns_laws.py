"""Columns are read back as they were written, and lie where typed arrays may lie."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gangline.server.web.columns import decode_columns, encode_columns

columns = st.dictionaries(
    st.text(min_size=1, max_size=12),
    st.sampled_from(["i1", "u1", "<i4", "<f4"]).flatmap(lambda kind: arrays.arrays(kind, st.integers(0, 300))),
    max_size=8,
)


@given(columns)
def test_columns_are_read_back(written: dict[str, np.ndarray]) -> None:
    body = encode_columns(written)
    read = decode_columns(body)
    assert list(read) == list(written)
    for name, column in written.items():
        assert read[name].dtype == column.dtype
        np.testing.assert_array_equal(read[name], column)


@given(columns)
def test_each_column_begins_at_a_multiple_of_eight(written: dict[str, np.ndarray]) -> None:
    body = encode_columns(written)
    header = msgspec.json.decode(body[8 : 8 + int.from_bytes(body[4:8], "little")])
    assert all(offset % 8 == 0 for _, _, offset, _ in header)


def test_other_types_are_refused() -> None:
    with pytest.raises(KeyError):
        encode_columns({"a": np.zeros(2, np.float64)})
    with pytest.raises(ValueError, match="no columns"):
        decode_columns(b"other bytes")
