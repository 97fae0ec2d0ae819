"""Ids out of JSON: fast where the list is plain, strict everywhere."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.errors import EngineUnavailable
from gangline.models.engines.replies import CUT_OUT, NO_IDS, cut_out_ids, ids_from_json


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


def test_a_negative_id_is_refused() -> None:
    with pytest.raises(EngineUnavailable, match="no token ids"):
        ids_from_json(msgspec.Raw(b"[-1, 4]"))


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.sampled_from([",", ", "]))
def test_a_long_list_is_read_as_a_short_one_is(ids: list[int], comma: str) -> None:
    text = json.dumps(ids * (40_000 // len(ids)), separators=(comma, ":")).encode()
    found = ids_from_json(msgspec.Raw(text))
    assert found is not None
    assert found.dtype.name == "int32"
    assert found.tolist() == json.loads(text)


@pytest.mark.parametrize(
    "odd",
    [
        "1.5",
        "-1",
        "123456789",
        "2147483647",
        " 7",
        "1e3",
        "null",
        "[]",
        '"8"',
        "2147483648",
        "",
        "01",
        "true",
        "9" * 19,
        "1" + "0" * 30,
    ],
)
@pytest.mark.parametrize("place", [0, 15_000, 30_000])
def test_a_long_list_with_one_oddity_is_read_or_refused_as_a_short_one_is(odd: str, place: int) -> None:
    numbers = ["54321"] * 30_000
    numbers.insert(place, odd)
    answers: list[object] = []
    for text in (f"[{','.join(numbers)}]", f"[{odd}]" if odd else "[,]"):
        try:
            found = ids_from_json(msgspec.Raw(text.encode()))
        except EngineUnavailable:
            answers.append("refused")
        else:
            assert found is not None
            answers.append(int(found[place] if len(found) > 1 else found[0]))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("num_ids", range(131_060 // 2, 131_090 // 2))
def test_a_list_that_ends_with_a_comma_is_refused_wherever_it_is_cut(num_ids: int) -> None:
    """Lengths around the one from which on a list is parsed in pieces."""
    with pytest.raises(EngineUnavailable, match="no token ids"):
        ids_from_json(msgspec.Raw(b"[" + b"1," * num_ids + b"]"))


@pytest.mark.parametrize("space", ["", " "])
def test_the_one_list_of_the_name_is_cut_out(space: str) -> None:
    body = b'{"a": "\\"ids\\":[7]", "ids":%b[1,2], "b": [3]}' % space.encode()
    assert cut_out_ids(body, "ids") == (
        b'{"a": "\\"ids\\":[7]", "ids":%b%b, "b": [3]}' % (space.encode(), CUT_OUT),
        b"[1,2]",
    )


@pytest.mark.parametrize("body", [b'{"ids": null}', b'{"a": {"ids":[1]}, "ids":[2]}', b'{"ids":[1', b"{}", b""])
def test_nothing_is_cut_out_where_it_is_not_certain_what(body: bytes) -> None:
    assert cut_out_ids(body, "ids") == (body, b"")
