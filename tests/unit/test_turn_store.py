"""Records of turns off their node: whatever is sent twice or cut off, a beginning without holes is read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.completion import Completion
from gangline.domain.errors import InvalidRequest
from gangline.domain.session import KeptTurns, Turns
from gangline.domain.tokens import encode_msgpack
from gangline.server.service.durable_turns import TurnRecords
from gangline.store.journal.entries import Appended
from gangline.store.journal.object_turns import ObjectTurns
from gangline.store.journal.turns import TurnStore
from support.store.completions import completion


def records(number: int) -> list[Completion]:
    return [completion(one) for one in range(number)]


def raw(completions: Iterable[Completion]) -> tuple[msgspec.Raw, ...]:
    return tuple(msgspec.Raw(encode_msgpack(Appended.of([one]))) for one in completions)


def turns(fence: int, first: int, *completions: Completion) -> Turns:
    return Turns(session_id="s", fence=fence, first=first, calls=raw(completions))


def opened(kind: str, folder: Path) -> TurnRecords:
    return TurnStore(folder) if kind == "folder" else ObjectTurns(f"{kind}://{folder}/bucket")


KINDS = pytest.mark.parametrize("kind", ["folder", "file", "memory"])


@KINDS
@given(st.integers(1, 8), st.data())
def test_records_that_come_again_count_once(kind: str, number: int, data: st.DataObject) -> None:
    sent = records(number)
    with tempfile.TemporaryDirectory() as folder:
        store, done = opened(kind, Path(folder)), 0
        while done < number:
            first = data.draw(st.integers(0, done), label="first")  # a node that did not hear sends them again
            end = data.draw(st.integers(done + 1, number), label="end")
            store.append(turns(3, first, *sent[first:end]))
            done = end
        found = store.latest("s", 4)
        store.forget("s")
    assert found.fence == 3
    assert encode_msgpack(found.completions) == encode_msgpack(tuple(sent))


@KINDS
def test_all_choices_of_a_call_come_back_whole_though_their_prompt_is_kept_once(kind: str, tmp_path: Path) -> None:
    first = completion(0)
    choices = [msgspec.structs.replace(first, completion_id=name) for name in ("first", "second")]
    call = Appended.of(choices)
    assert call.one_prompt
    store = opened(kind, tmp_path)
    store.append(Turns(session_id="s", fence=1, first=0, calls=(msgspec.Raw(encode_msgpack(call)),)))
    assert encode_msgpack(store.latest("s", 2).completions) == encode_msgpack(tuple(choices))


@KINDS
def test_of_earlier_leases_the_one_with_the_most_records_is_read(kind: str, tmp_path: Path) -> None:
    store = opened(kind, tmp_path)
    for fence, number in ((1, 2), (2, 4), (3, 4), (4, 1), (7, 9)):
        store.append(turns(fence, 0, *records(number)))
    assert [store.latest("s", before).fence for before in (1, 2, 3, 4, 5, 7, 8)] == [0, 1, 2, 3, 3, 3, 7]
    assert store.latest("another", 9) == KeptTurns()


def test_a_hole_ends_what_is_read(tmp_path: Path) -> None:
    store = TurnStore(tmp_path)
    one, two, three = records(3)
    store.append(turns(1, 0, one))
    store.append(turns(1, 2, three))
    assert [found.completion_id for found in store.latest("s", 2).completions] == [one.completion_id]
    store.append(turns(1, 1, two))
    store.append(turns(1, 2, three))
    assert len(store.latest("s", 2).completions) == 1, "what follows damage is not trusted"


@pytest.mark.parametrize("cut", [1, 10, 200])
def test_what_a_crash_cut_off_is_left_out_and_later_records_are_read(tmp_path: Path, cut: int) -> None:
    store = TurnStore(tmp_path)
    one, two = records(2)
    store.append(turns(1, 0, one))
    path = tmp_path / "s" / "1.turns"
    whole = path.read_bytes()
    store.append(turns(1, 1, two))
    path.write_bytes(path.read_bytes()[: len(whole) + cut])
    assert len(store.latest("s", 2).completions) == 1
    store.append(turns(1, 1, two))
    assert [found.completion_id for found in store.latest("s", 2).completions] == [one.completion_id, two.completion_id]


@KINDS
def test_a_session_is_forgotten_with_all_its_leases(kind: str, tmp_path: Path) -> None:
    store = opened(kind, tmp_path)
    store.append(turns(1, 0, *records(1)))
    store.append(msgspec.structs.replace(turns(1, 0, *records(1)), session_id="t"))
    assert store.sessions() == ["s", "t"]
    store.forget("s")
    store.forget("s")
    assert store.sessions() == ["t"]
    with pytest.raises(InvalidRequest):
        store.forget("../t")


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_hole_ends_what_is_read_and_posts_that_are_cut_otherwise_fill_it(kind: str, tmp_path: Path) -> None:
    store, sent = opened(kind, tmp_path), records(6)
    store.append(turns(1, 0, *sent[:2]))
    store.append(turns(1, 3, *sent[3:4]))
    store.append(turns(2, 0, *sent[:1]))
    found = store.latest("s", 3)
    assert (found.fence, len(found.completions)) == (1, 2)
    store.append(turns(1, 1, *sent[1:3]))
    store.append(turns(1, 3, *sent[3:]))
    assert encode_msgpack(store.latest("s", 3).completions) == encode_msgpack(tuple(sent))


def test_an_object_that_is_damaged_ends_what_is_read(tmp_path: Path) -> None:
    store = ObjectTurns(f"file://{tmp_path}")
    for number, one in enumerate(records(3)):
        store.append(turns(1, number, one))
    path = tmp_path / "s" / "1" / "000000001-000000002"
    path.write_bytes(path.read_bytes()[:-20])
    assert len(store.latest("s", 2).completions) == 1
