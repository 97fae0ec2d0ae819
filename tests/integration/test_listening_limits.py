"""What a stranger can take of a real server and a real node before anyone asks who he is, and what he is told then."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gangline.domain.errors import LimitExceeded, RequestTimeout, TooMany
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.server import ServerClient
from gangline.wire.http.listening import LIMITS, ListenLimits, listening, read_body
from support.node.node import TOKEN, running_node
from support.service.running import any_plugin

KEY = {"Authorization": f"Bearer {TOKEN}"}
QUICK = ListenLimits(max_connections=2, idle_s=0.2, body_idle_s=0.2, body_s=0.5)


@pytest.fixture(params=["server", "node"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "server":
        async with serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running:
            yield running.url
    else:
        async with scripted_server({"default": {"text": "x"}}) as engine, running_node(tmp_path, engine) as node:
            yield node.url


async def raw(url: str, sent: bytes) -> bytes:
    """What comes back until the other side closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


LONG = b"x" * (LIMITS.max_line_bytes + 1)
HEADS = {
    "a query": b"GET /health?q=" + LONG + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path": b"GET /" + LONG + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + LONG + b"\r\n\r\n",
    "a header's name": b"GET /health HTTP/1.1\r\nHost: x\r\n" + LONG + b": 1\r\n\r\n",
    "headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(200)) + b"\r\n",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
async def test_a_head_that_is_too_long_is_a_bad_request(url: str, head: bytes, caplog: pytest.LogCaptureFixture):
    answer = await raw(url, head)
    assert b" 400 Bad Request\r\n" in answer[:30], answer[:200]
    assert b"more than 8190 bytes" in answer or b"Too many headers" in answer
    assert b"Traceback" not in answer
    assert [record.message for record in caplog.records if record.exc_info] == [], "no stranger fills the log"
    async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as response:
        assert response.status == 200


@pytest.mark.parametrize("path", ["/v1/tasks", "/v1/sessions", "/v1/nodes/n1/heartbeat"])
async def test_a_small_body_that_unpacks_to_a_huge_one_is_too_long(url: str, path: str):
    packed = gzip.compress(b" " * (256 << 20), 9)
    assert len(packed) < 1 << 20
    headers = {**KEY, "Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url + path, data=BytesIO(packed), headers=headers) as response,
    ):
        assert response.status in (404, 405, 413), await response.text()


@asynccontextmanager
async def quick_service(limits: ListenLimits = QUICK) -> AsyncGenerator[str]:
    """Answers a body's length; 408 and 413 as their errors have it."""

    async def count(request: web.Request) -> web.Response:
        try:
            body = await read_body(request, 1000, idle_s=limits.body_idle_s, body_s=limits.body_s)
        except (LimitExceeded, RequestTimeout) as error:
            return web.Response(status=error.status, text=error.message)
        return web.Response(text=str(len(body)))

    app = web.Application()
    app.add_routes([web.post("/", count)])
    async with listening(app, shutdown_s=0.1, limits=limits, host="127.0.0.1", port=0) as (host, port):
        yield f"http://{host}:{port}"


async def test_who_sends_nothing_or_a_head_without_end_is_disconnected():
    async with quick_service() as url:
        assert await raw(url, b"") == b""
        assert await raw(url, b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ") == b""


async def drip(url: str, pieces: int, every_s: float) -> bytes:
    """A body of 10,000 bytes, of which one comes now and then."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n")
        for _ in range(pieces):
            writer.write(b" ")
            await asyncio.sleep(every_s)
            if reader.at_eof():
                break
        async with asyncio.timeout(30):
            return await reader.readuntil(b"came.") if pieces > 1 else await reader.readuntil(b"bytes")
    finally:
        writer.close()


async def test_a_body_that_stalls_is_told_so():
    async with quick_service() as url:
        answer = await drip(url, 1, 0.0)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"nothing came for 0.2 s after 1 bytes" in answer


async def test_a_body_that_drips_for_ever_is_told_so():
    async with quick_service(ListenLimits(body_idle_s=30.0, body_s=0.3)) as url:
        answer = await drip(url, 12, 0.05)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"took longer than 0.3 s" in answer


async def test_a_body_is_not_held_beyond_its_limit():
    async def endless() -> Any:
        while True:
            yield b"x" * 600

    async with (
        quick_service() as url,
        aiohttp.ClientSession() as http,
        http.post(url, data=endless()) as response,
    ):
        assert response.status == 413
        assert await response.text() == "the body has more than 1000 bytes."


async def test_one_connection_too_many_is_told_and_room_comes_with_the_end_of_others():
    limits = ListenLimits(max_connections=2)
    async with quick_service(limits) as url, aiohttp.ClientSession() as http:
        host, port = url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        for reader, writer in held:  # each has a request under way
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n")
            await reader.readuntil(b"100 Continue")
        async with http.post(url, data=b"12") as response:
            assert response.status == 503
            problem = await response.json(content_type="application/problem+json")
        assert problem["code"] == "too_many"
        assert "2 connections are open" in problem["detail"]
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(30):
            while (await post(http, url)) != 200:
                await asyncio.sleep(0.02)


async def silent(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with half a head."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    return reader, writer


async def test_those_without_a_request_give_way_to_who_has_one():
    async with quick_service(ListenLimits(max_connections=8)) as url, aiohttp.ClientSession() as known:
        assert await post(known, url) == 200  # its connection stays open
        held = [await silent(url) for _ in range(40)]
        async with aiohttp.ClientSession() as http:
            assert [await post(http, url) for _ in range(3)] == [200] * 3
        assert await post(known, url) == 200
        async with asyncio.timeout(30):
            assert [await read_to_end(reader) for reader, _ in held[:20]] == [b""] * 20
        for _, writer in held:
            writer.close()


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_a_head_that_drips_is_disconnected_within_a_bound():
    async with quick_service(ListenLimits(head_s=0.4)) as url:
        reader, writer = await silent(url)
        async with asyncio.timeout(30):
            ended = asyncio.create_task(read_to_end(reader))
            while not ended.done():
                writer.write(b"x")
                await asyncio.wait([ended], timeout=0.05)
        writer.close()


async def test_who_reads_nothing_of_an_answer_is_disconnected_within_a_bound():
    ended = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * (1 << 20))
        finally:
            ended.set()

    app = web.Application()
    app.add_routes([web.get("/", endless)])
    limits = ListenLimits(answer_idle_s=1.0)
    async with listening(app, shutdown_s=0.1, limits=limits, host="127.0.0.1", port=0) as (host, port):
        _reader, writer = await asyncio.open_connection(host, port, limit=1)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(30):
            await ended.wait()
        writer.close()


async def post(http: aiohttp.ClientSession, url: str) -> int:
    async with http.post(url, data=b"12") as response:
        return response.status


async def test_a_server_has_so_many_event_streams_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gangline.server.routes.events.MAX_STREAMS", 1)
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running,
        aiohttp.ClientSession(headers=KEY) as http,
        ServerClient(running.url, TOKEN) as client,
    ):
        async with http.get(f"{running.url}/v1/events") as response:
            assert response.status == 200
            with pytest.raises(TooMany, match="1 event streams are open"):
                await anext(client.events())
        async with asyncio.timeout(30):
            while (await status_of(http, f"{running.url}/v1/events")) != 200:
                await asyncio.sleep(0.02)


async def status_of(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(url) as response:
        return response.status


def an_application() -> AbstractAsyncContextManager[tuple[str, int]]:
    return listening(web.Application(), shutdown_s=1, host="127.0.0.1", port=0)


@asynccontextmanager
async def an_engine() -> AsyncGenerator[tuple[str, int], None]:
    async with scripted_server({"default": {"text": "x"}}) as engine:
        host, port = engine.removeprefix("http://").split(":")
        yield host, int(port)


@pytest.mark.parametrize("serves", [an_application, an_engine])
@pytest.mark.parametrize("turns", range(8))
async def test_a_connection_that_comes_at_the_last_moment_is_closed(
    serves: Callable[[], AbstractAsyncContextManager[tuple[str, int]]], turns: int
) -> None:
    async with serves() as address:
        client = socket.create_connection(address)
        for _ in range(turns):
            await asyncio.sleep(0)
    with client, suppress(ConnectionResetError):  # of one that nobody had accepted
        client.settimeout(10)
        assert client.recv(1) == b""
