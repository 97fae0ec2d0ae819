"""A pickled text of LiveCodeBench is read without running it, and no other pickle is."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Iterator
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.tasks.presets.rows.livecodebench import text_of

PROTOCOLS = st.integers(0, pickle.HIGHEST_PROTOCOL)
TEXTS = st.one_of(st.text(), st.text(min_size=1, max_size=3).map(lambda piece: piece * 70_000))
"""Of more than 64 KiB, and of more than 255 bytes, pickles are written in another way."""
NO_TEXTS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.binary(), st.just(print), st.just(ValueError)),
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, st.text()), st.dictionaries(st.text(), inner), st.frozensets(st.text())
    ),
)


@given(TEXTS, PROTOCOLS)
def test_a_pickled_text_is_read_as_it_was(text: str, protocol: int) -> None:
    data = pickle.dumps(text, protocol)
    assert text_of(data) == text
    assert text_of(pickletools.optimize(data)) == text


@given(NO_TEXTS, PROTOCOLS)
def test_whatever_else_is_pickled_is_refused(value: Any, protocol: int) -> None:
    with pytest.raises(ValueError, match="not one text alone"):
        text_of(pickle.dumps(value, protocol))


@given(st.text(), PROTOCOLS, st.binary(min_size=1))
def test_nothing_may_follow_it(text: str, protocol: int, more: bytes) -> None:
    with pytest.raises(ValueError, match="not one text alone"):
        text_of(pickle.dumps(text, protocol) + more)


@given(st.text(max_size=20), PROTOCOLS, st.data())
def test_of_a_changed_pickle_either_nothing_is_read_or_what_pickle_reads(
    text: str, protocol: int, data: st.DataObject
) -> None:
    whole = bytearray(pickle.dumps(text, protocol))
    at = data.draw(st.integers(0, len(whole)))
    whole[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        found = text_of(bytes(whole))
    except ValueError:
        return
    try:
        expected = pickle.loads(whole)
    except (EOFError, ValueError, pickle.UnpicklingError):
        return  # such as a frame of another length
    assert found == expected


def test_a_pickle_of_many_opcodes_is_given_up_after_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    read, genops = list[Any](), pickletools.genops

    def counted(file: BinaryIO) -> Iterator[Any]:
        for one in genops(file):
            read.append(one)
            yield one

    monkeypatch.setattr(pickletools, "genops", counted)
    with pytest.raises(ValueError, match="not one text alone"):
        text_of(b"\x80\x02" + b"N0" * 10_000 + pickle.dumps("x", 2)[2:])
    assert len(read) < 10
