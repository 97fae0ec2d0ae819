"""Sampling masks: bytes and back, and the mask of a row from the parts that its calls hold."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.evidence.masks import mask_from_json, outside_of_mask
from gangline.domain.masks import MaskEvidence, RowMask, SamplingMask
from gangline.domain.tokens import decode_msgpack, encode_json, encode_msgpack, token_ids


def mask_of(sets: list[list[int]]) -> SamplingMask:
    """As it is read from an engine's reply."""
    mask = mask_from_json(msgspec.Raw(msgspec.json.encode(sets)))
    assert mask is not None
    return mask


SETS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6, unique=True), max_size=12)


@given(SETS)
def test_bytes_give_back_the_same_sets(sets: list[list[int]]) -> None:
    mask = mask_of(sets)
    assert mask.sets() == sets
    data = mask.data()
    assert len(data) == 4 * (len(sets) + sum(map(len, sets)))
    again = SamplingMask.of_data(data, len(sets))
    assert again.sets() == sets
    assert MaskEvidence.of(mask, data).mask(data).sets() == sets


@given(SETS, st.data())
def test_a_part_of_a_mask_is_the_mask_of_that_part(sets: list[list[int]], data: st.DataObject) -> None:
    mask = mask_of(sets)
    number = data.draw(st.integers(0, len(sets)))
    assert mask.first(number).sets() == sets[:number]
    wanted = data.draw(st.lists(st.booleans(), min_size=len(sets), max_size=len(sets)))
    only = mask.only(np.asarray(wanted, np.bool_))
    assert only.sets() == [kept if asked else [] for kept, asked in zip(sets, wanted, strict=True)]
    offsets = mask.offsets.tolist()
    assert [mask.ids[offsets[t] : offsets[t + 1]].tolist() for t in range(len(sets))] == sets


@given(SETS, st.data())
def test_no_other_bytes_pass_for_the_certified_ones(sets: list[list[int]], data: st.DataObject) -> None:
    mask = mask_of([*sets, [1, 2]])
    whole = mask.data()
    evidence = MaskEvidence.of(mask, whole)
    at = data.draw(st.integers(0, len(whole) - 1))
    harmed = bytearray(whole)
    harmed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="another sampling mask"):
        evidence.mask(bytes(harmed))
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(ValueError, match=r"mask of|buffer size"):
        SamplingMask.of_data(cut, len(mask.counts))


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True), min_size=1, max_size=12), st.data())
def test_a_token_that_its_mask_does_not_keep_is_found(sets: list[list[int]], data: st.DataObject) -> None:
    mask = mask_of(sets)
    sampled = [data.draw(st.sampled_from(kept)) for kept in sets]
    assert outside_of_mask(mask, token_ids(sampled)) is None
    wrong = data.draw(st.integers(0, len(sets) - 1))
    found = outside_of_mask(mask, token_ids([*sampled[:wrong], 51, *sampled[wrong + 1 :]]))
    assert found == f"sampled token {wrong} is 51, which its mask does not keep"
    assert "were sampled" in (outside_of_mask(mask, token_ids([*sampled, 1])) or "")
    emptied = mask.only(np.arange(len(sets)) != wrong)
    assert outside_of_mask(emptied, token_ids(sampled)) is not None


@given(SETS)
def test_a_rows_mask_travels_in_both_formats(sets: list[list[int]]) -> None:
    mask = mask_of(sets)
    row = RowMask(num_tokens=len(sets), data=mask.data())
    assert decode_msgpack(encode_msgpack(row), RowMask).mask().sets() == sets
    assert msgspec.json.decode(encode_json(row), type=RowMask).mask().sets() == sets
    with pytest.raises(ValueError, match="why not"):
        RowMask(missing="why not").mask()


ODD = ("3", "{}", "[1]", "[null]", "[[1],2]", "[[[1],2]]", "[[-1]]", "[[2147483648]]", "[[1.5]]", '[["a"]]')


@pytest.mark.parametrize("text", [*ODD, "[[true]]", "[[null]]", "[[99999999999999999999]]", '{"a": [1]}'])
def test_anything_else_in_an_engines_reply_is_no_mask(text: str) -> None:
    with pytest.raises(ValueError, match=r"mask|number"):
        mask_from_json(msgspec.Raw(text.encode()))


def test_null_is_no_mask() -> None:
    assert mask_from_json(msgspec.Raw(b"null")) is None
