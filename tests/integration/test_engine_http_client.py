"""The client of engines against servers that say exactly what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from gangline.engines import http_client
from gangline.engines.http_client import HttpBroken, HttpClient

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CLOSE = b""
"""In a script: the server closes the connection."""


@dataclass
class Said:
    """A server that answers the requests of each connection with what its script says, piece by piece."""

    port: int = 0
    requests: list[bytes] = field(default_factory=list[bytes])
    connections: list[asyncio.StreamWriter] = field(default_factory=list[asyncio.StreamWriter])
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client has left."""


@asynccontextmanager
async def server(*answers: Sequence[bytes]) -> AsyncGenerator[Said]:
    """`answers[i]` is for the i-th request, whichever connection it comes on; behind the last there is silence."""
    said = Said()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said.connections.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")), 0)
                said.requests.append(head + await reader.readexactly(length))
                number = len(said.requests) - 1
                for piece in answers[number] if number < len(answers) else ():
                    if piece == CLOSE:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            said.gone.set()
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    said.port = listening.sockets[0].getsockname()[1]
    try:
        yield said
    finally:
        listening.close()
        for writer in said.connections:
            writer.close()


@asynccontextmanager
async def client_of(said: Said, *, prefix: str = "", timeout_s: float = 20.0) -> AsyncGenerator[HttpClient]:
    url = f"http://us%40er:pw@127.0.0.1:{said.port}{prefix}"
    client = HttpClient(url, headers={"X-One": "1"}, timeout_s=timeout_s, connect_timeout_s=5.0)
    try:
        yield client
    finally:
        await client.close()


async def ask(client: HttpClient, body: bytes | None = b"{}") -> tuple[int, bytes]:
    async with client.request("GET" if body is None else "POST", "/path?q=1", body) as answer:
        return answer.status, await answer.read()


async def test_a_request_is_whole_and_a_connection_is_asked_again() -> None:
    chunked = b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    async with server([OK], [chunked[:50], chunked[50:]], [OK]) as said, client_of(said, prefix="/base/") as client:
        assert await ask(client, b'{"a": 1}') == (200, b"ok")
        assert await ask(client) == (201, b"abc")
        assert await ask(client, None) == (200, b"ok")
        assert len(said.connections) == 1
    head, _, body = said.requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/path?q=1 HTTP/1.1"
    assert b"Host: 127.0.0.1:%d" % said.port in lines
    assert b"X-One: 1" in lines
    assert b"Accept-Encoding: identity" in lines
    assert b"Authorization: Basic dXNAZXI6cHc=" in lines
    assert b"Content-Length: 8" in lines
    assert body == b'{"a": 1}'
    assert b"Content-" not in said.requests[2]


async def test_a_connection_that_was_idle_for_long_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server([OK], [OK]) as said, client_of(said) as client:
        assert await ask(client) == (200, b"ok")
        monkeypatch.setattr(http_client, "_MAX_IDLE_S", 0.0)
        assert await ask(client) == (200, b"ok")
        await said.gone.wait()
        assert len(said.connections) == 2


async def test_requests_at_once_have_connections_of_their_own() -> None:
    async with server(*[[OK]] * 8) as said, client_of(said) as client:
        assert await asyncio.gather(*(ask(client) for _ in range(8))) == [(200, b"ok")] * 8
        assert len(said.connections) == 8


async def test_a_body_is_given_as_it_comes() -> None:
    async with (
        server([CHUNKED, b"1\r\na\r\n"]) as said,
        client_of(said) as client,
        client.request("POST", "/", b"") as answer,
    ):
        pieces = answer.pieces()
        assert await anext(pieces) == b"a"
        said.connections[0].write(b"1\r\nb\r\n0\r\n\r\n")
        assert [piece async for piece in pieces] == [b"b"]


async def test_who_leaves_early_closes_the_connection_and_the_next_has_a_new_one() -> None:
    async with server([CHUNKED + b"1\r\na\r\n"], [OK]) as said, client_of(said) as client:
        async with client.request("POST", "/", b"") as answer:
            assert await anext(answer.pieces()) == b"a"
        await said.gone.wait()
        assert await ask(client) == (200, b"ok")
        assert len(said.connections) == 2


async def test_a_cancelled_request_closes_the_connection() -> None:
    async with server() as said, client_of(said) as client:
        asking = asyncio.create_task(ask(client))
        while not said.requests:
            await asyncio.sleep(0)
        asking.cancel()
        await said.gone.wait()


@pytest.mark.parametrize("answer", [[OK, CLOSE], [b"HTTP/1.0 200 OK\r\n\r\nok", CLOSE]])
async def test_a_connection_that_cannot_be_trusted_is_not_asked_again(answer: list[bytes]) -> None:
    async with server(answer, [OK]) as said, client_of(said) as client:
        assert await ask(client) == (200, b"ok")
        while not said.connections[0].is_closing():
            await asyncio.sleep(0)
        for _ in range(10):  # the end of the connection is on its way
            await asyncio.sleep(0)
        assert await ask(client) == (200, b"ok")
        assert len(said.connections) == 2


async def test_what_comes_before_the_answer_is_passed_over() -> None:
    hints = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nA: b\r\n\r\n"
    async with server([hints, OK]) as said, client_of(said) as client:
        assert await ask(client) == (200, b"ok")


@pytest.mark.parametrize(
    ("pieces", "error", "says"),
    [
        ([CLOSE], ConnectionError, "closed the connection"),
        ([OK[:-1], CLOSE], ConnectionError, "before it was whole"),
        ([b"HTTP/1.1 200", CLOSE], ConnectionError, "before it was whole"),
        (
            [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na", CLOSE],
            ConnectionError,
            "before it was whole",
        ),
        ([OK + b"x"], HttpBroken, "more than it said"),
        ([b"SSH-2.0\r\n\r\n"], HttpBroken, "HTTP/1.1"),
        ([CHUNKED + b"zz\r\n"], HttpBroken, "size of a chunk"),
        ([b"a" * 70_000], HttpBroken, "no end"),
    ],
)
async def test_a_broken_answer_says_how(pieces: list[bytes], error: type[Exception], says: str) -> None:
    async with server(pieces) as said, client_of(said) as client:
        with pytest.raises(error, match=says):
            await ask(client)


@pytest.mark.parametrize("pieces", [[], [OK[:-1]]])
async def test_silence_ends_a_request(pieces: list[bytes]) -> None:
    async with server(pieces) as said, client_of(said, timeout_s=0.05) as client:
        with pytest.raises(TimeoutError, match=r"nothing came for 0\.05 s"):
            await ask(client)
        await said.gone.wait()


async def test_closing_the_client_ends_what_is_in_flight() -> None:
    async with server() as said, client_of(said) as client:
        asking = asyncio.create_task(ask(client))
        while not said.requests:
            await asyncio.sleep(0)
        await client.close()
        with pytest.raises(ConnectionError):
            await asking


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - urllib's words
        HttpClient(url, headers={}, timeout_s=1.0, connect_timeout_s=1.0)
