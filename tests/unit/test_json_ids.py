"""Ids out of JSON: fast where the list is plain, strict everywhere."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.errors import EngineUnavailable
from gangline.engines.json_ids import NO_IDS, ids_from_json


@given(st.lists(st.integers(0, 2**31 - 1)), st.sampled_from([(",", ":"), (", ", ": "), (" ,\n ", ":")]))
def test_a_list_of_ids_is_read_however_it_is_spaced(ids: list[int], separators: tuple[str, str]) -> None:
    found = ids_from_json(msgspec.Raw(json.dumps(ids, separators=separators).encode()))
    assert found is not None
    assert found.dtype.name == "int32"
    assert found.tolist() == ids


def test_ids_that_are_left_out_or_null_are_none() -> None:
    assert ids_from_json(NO_IDS) is None
    assert ids_from_json(msgspec.Raw(b"null")) is None


@pytest.mark.parametrize(
    "text", ['["1"]', "[1.5]", "[2147483648]", "[99999999999999999999]", "{}", "7", "[true]", "[[1]]"]
)
def test_what_are_no_ids_is_the_engines_fault(text: str) -> None:
    with pytest.raises(EngineUnavailable, match="no token ids"):
        ids_from_json(msgspec.Raw(text.encode()))


def test_a_negative_id_is_kept_for_the_record_to_show() -> None:
    found = ids_from_json(msgspec.Raw(b"[-1, 4]"))
    assert found is not None
    assert found.tolist() == [-1, 4]
