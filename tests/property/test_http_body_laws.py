"""However an answer's bytes are cut, its body is the same; what is no HTTP/1.1 is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.engines.http_body import body_reader_of

_pieces = st.lists(st.binary(min_size=1, max_size=40), max_size=8)
_cuts = st.lists(st.integers(0, 400), max_size=12)


def _read(head: bytes, data: bytes, cuts: list[int]) -> tuple[bytes, bool]:
    """(the body, whether it is whole)"""
    _, _, reader = body_reader_of(head)
    taken: list[bytes] = []
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        reader.feed(data[start:end])
        taken.append(reader.take())
    return b"".join(taken), reader.is_whole


@given(_pieces, _cuts, st.sampled_from([b"", b";name=value"]), st.sampled_from([b"", b"Expires: never\r\n"]))
def test_the_cuts_of_a_chunked_body_change_nothing(
    pieces: list[bytes], cuts: list[int], extension: bytes, trailer: bytes
) -> None:
    chunks = [b"%X%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces]
    data = b"".join(chunks) + b"0\r\n" + trailer + b"\r\n"
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked"
    assert _read(head, data, cuts) == (b"".join(pieces), True)
    assert _read(head, data[:-1], cuts)[1] is False


@given(st.binary(max_size=60), _cuts)
def test_the_cuts_of_a_sized_body_change_nothing(body: bytes, cuts: list[int]) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d" % len(body)
    assert _read(head, body, cuts) == (body, True)
    with pytest.raises(ValueError, match="more than it said"):
        _read(head, body + b"x", cuts)
    _, _, unsized = body_reader_of(b"HTTP/1.0 200 OK")
    unsized.feed(body)
    assert not unsized.is_whole
    unsized.feed_end()
    assert (unsized.take(), unsized.is_whole) == (body, True)


@pytest.mark.parametrize(
    "data", [b"x\r\n", b"-1\r\n", b"1_0\r\n", b"\r\n", b"1\r\nab\r\n", b"0\r\n\r\n1", b"1" * 20_000]
)
def test_what_is_no_chunk_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"chunk"):
        _read(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", data, [])


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/2 200",
        b"HTTP/1.1 abc",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: br",
    ],
)
def test_a_header_that_nothing_can_be_read_by_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each says something else
        body_reader_of(head)


@pytest.mark.parametrize(
    ("head", "is_kept"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0", True),
        (b"HTTP/1.1 204 No Content", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: Keep-Alive", True),
        (b"HTTP/1.1 200 OK", False),
    ],
)
def test_whether_a_connection_is_kept_is_told_by_the_header(head: bytes, is_kept: bool) -> None:
    assert body_reader_of(head)[1] is is_kept
