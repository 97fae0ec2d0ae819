"""How engines are asked, against servers that say exactly what a test wants."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from gangline.domain.errors import EngineMalformed, EngineRefused, EngineUnavailable
from gangline.models.engines.http import EngineHttp

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
async def asking(said: Said, *, timeout_s: float = 20.0) -> AsyncGenerator[EngineHttp]:
    http = EngineHttp(f"http://127.0.0.1:{said.port}/base/v1", timeout_s=timeout_s, api_key="secret")
    try:
        yield http
    finally:
        await http.close()


async def test_a_request_is_whole_and_a_connection_is_asked_again() -> None:
    chunked = b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    async with server([OK], [chunked[:50], chunked[50:]], [OK]) as said, asking(said) as http:
        assert await http.post("/path?q=1", b'{"a": 1}') == b"ok"
        assert await http.post("/path", b"{}") == b"abc"
        assert await http.get("/path") == b"ok"
        assert len(said.connections) == 1
    head, _, body = said.requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/path?q=1 HTTP/1.1"
    assert b"Accept-Encoding: identity" in lines
    assert b"Authorization: Bearer secret" in lines
    assert b"Content-Length: 8" in lines
    assert body == b'{"a": 1}'


async def test_requests_at_once_have_connections_of_their_own() -> None:
    async with server(*[[OK]] * 8) as said, asking(said) as http:
        assert await asyncio.gather(*(http.post("/", b"{}") for _ in range(8))) == [b"ok"] * 8
        assert len(said.connections) == 8


async def test_a_body_is_given_as_it_comes() -> None:
    async with (
        server([CHUNKED, b"1\r\na\r\n"]) as said,
        asking(said) as http,
        http.request("POST", "/", b"") as answer,
    ):
        pieces = answer.content.iter_any()
        assert await anext(pieces) == b"a"
        said.connections[0].write(b"1\r\nb\r\n0\r\n\r\n")
        assert [piece async for piece in pieces] == [b"b"]


async def test_who_leaves_early_closes_the_connection_and_the_next_has_a_new_one() -> None:
    async with server([CHUNKED + b"1\r\na\r\n"], [OK]) as said, asking(said) as http:
        async with http.request("POST", "/", b"") as answer:
            assert await anext(answer.content.iter_any()) == b"a"
        await said.gone.wait()
        assert await http.post("/", b"{}") == b"ok"
        assert len(said.connections) == 2


async def test_a_cancelled_request_closes_the_connection() -> None:
    async with server() as said, asking(said) as http:
        request = asyncio.create_task(http.post("/", b"{}"))
        while not said.requests:
            await asyncio.sleep(0)
        request.cancel()
        await said.gone.wait()


@pytest.mark.parametrize(
    "pieces",
    [
        [CLOSE],
        [OK[:-1], CLOSE],
        [b"HTTP/1.1 200", CLOSE],
        [CHUNKED + b"1\r\na", CLOSE],
    ],
)
async def test_a_broken_answer_names_the_engine(pieces: list[bytes]) -> None:
    async with server(pieces) as said, asking(said) as http:
        with pytest.raises(EngineUnavailable, match=f"engine http://127.0.0.1:{said.port}/base did not answer"):
            await http.post("/", b"{}")


@pytest.mark.parametrize("pieces", [[b"SSH-2.0\r\n\r\n"], [CHUNKED + b"zz\r\n"]])
async def test_an_answer_that_is_not_http_is_malformed(pieces: list[bytes]) -> None:
    async with server(pieces) as said, asking(said) as http:
        with pytest.raises(EngineMalformed, match=f"engine http://127.0.0.1:{said.port}/base answered POST / with "):
            await http.post("/", b"{}")


@pytest.mark.parametrize("pieces", [[], [OK[:-1]]])
async def test_silence_ends_a_request(pieces: list[bytes]) -> None:
    async with server(pieces) as said, asking(said, timeout_s=0.05) as http:
        with pytest.raises(EngineUnavailable, match="did not answer"):
            await http.post("/", b"{}")
        await said.gone.wait()


async def test_an_engine_that_says_something_now_and_then_is_not_silent() -> None:
    async with (
        server([CHUNKED]) as said,
        asking(said, timeout_s=1.0) as http,
        http.request("POST", "/", b"") as answer,
    ):
        pieces = answer.content.iter_any()
        for _ in range(3):
            await asyncio.sleep(0.5)
            said.connections[0].write(b"1\r\na\r\n")
            assert await anext(pieces) == b"a"


def _chunks(body: bytes, size: int) -> list[bytes]:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return [CHUNKED, *(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces), b"0\r\n\r\n"]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("body", [b'{"a": "data: x\\n\\n"}', b'\n  {"a":\n\n1}'])
async def test_a_server_that_does_not_stream_answers_with_one_event(body: bytes, size: int) -> None:
    async with server(_chunks(body, size)) as said, asking(said) as http:
        found = [event async for events in http.events("/path", b"{}") for event in events]
    assert [json.loads(event) for event in found] == [json.loads(body)]


@pytest.mark.parametrize("body", [b"<html>Sign in</html>", b"[]", b"busy"])
async def test_what_is_no_stream_is_malformed_and_shown(body: bytes) -> None:
    async with server(_chunks(body, 1000)) as said, asking(said) as http:
        with pytest.raises(EngineMalformed, match=f"answered with no stream: got {re.escape(repr(body.decode()))}"):
            async for _ in http.events("/path", b"{}"):
                pass


@pytest.mark.parametrize("body", [b"", b": ping\n\n", b"data: 1", b"data: 1\n\n", b"event: a\n\n"])
async def test_a_stream_that_ends_before_it_was_done_is_unavailable(body: bytes) -> None:
    async with server(_chunks(body, 1000)) as said, asking(said) as http:
        with pytest.raises(EngineUnavailable, match="before it was done") as failed:
            async for _ in http.events("/path", b"{}"):
                pass
    assert type(failed.value) is EngineUnavailable


async def test_a_redirect_is_no_answer() -> None:
    elsewhere = b"HTTP/1.1 307 Elsewhere\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    async with server([elsewhere]) as said, asking(said) as http:
        with pytest.raises(EngineRefused, match="307"):
            await http.post("/", b"{}")


async def test_closing_ends_what_is_in_flight() -> None:
    async with server() as said, asking(said) as http:
        request = asyncio.create_task(http.post("/", b"{}"))
        while not said.requests:
            await asyncio.sleep(0)
        await http.close()
        with pytest.raises(EngineUnavailable):
            await request


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://host", "http://", "http://host:port"])
async def test_what_is_no_address_is_an_engine_that_does_not_answer(url: str) -> None:
    http = EngineHttp(url)
    with pytest.raises(EngineUnavailable, match="did not answer"):
        await http.get("/")
    await http.close()


async def test_a_long_body_arrives_whole_and_with_its_length() -> None:
    body = bytes(range(256)) * 4096
    async with server([OK]) as said:
        http = EngineHttp(f"http://127.0.0.1:{said.port}")
        assert await http.post("/v1/chat/completions", body) == b"ok"
        await http.close()
    assert len(said.requests) == 1
    assert f"Content-Length: {len(body)}".encode() in said.requests[0]
    assert said.requests[0].endswith(body)


async def test_a_large_body_gives_others_their_turn_even_where_the_socket_takes_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A socket of the same machine takes megabytes in one go, and copying them holds up the loop."""
    bodies: list[int] = []
    turns = turns_at_end = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def takes_all(self: object, chunk: bytes | memoryview, **_: object) -> None:
        nonlocal turns_at_end
        bodies.append(len(chunk))
        turns_at_end = turns

    async with server([OK]) as said:
        http = EngineHttp(f"http://127.0.0.1:{said.port}")
        counting = asyncio.create_task(count())
        monkeypatch.setattr("aiohttp.http_writer.StreamWriter.write", takes_all)
        asking = asyncio.create_task(http.post("/v1/chat/completions", b"x" * (8 << 20)))
        while sum(bodies) < 8 << 20:
            await asyncio.sleep(0.001)
        counting.cancel()
        asking.cancel()
        await asyncio.gather(counting, asking, return_exceptions=True)
        assert turns_at_end >= (8 << 20) // max(bodies) - 2
        await http.close()
