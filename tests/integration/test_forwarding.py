"""The forward proxy of network `list`, with a sandbox that does its worst. All hosts are on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import pytest

from gangline.domain.network import NetworkRule
from gangline.sandbox.network.forwarding import MAX_HEAD_BYTES, Forwarder


class Upstream:
    """An HTTP host that keeps what it was asked, and answers with as many bytes of body as it got."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[bytes] = []
        self.answer: bytes | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(head)
            body = b""
            if b"chunked" in head.lower():
                body = await reader.readuntil(b"0\r\n\r\n")
            elif b"content-length: " in head.lower():
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                body = await reader.readexactly(size)
            self.asked.append(body)
            said = str(len(body)).encode()
            writer.write(self.answer or b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said))
            await writer.drain()
        writer.close()


@pytest.fixture
async def upstream() -> AsyncGenerator[Upstream]:
    host = Upstream()
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0, limit=1 << 20)
    host.port = server.sockets[0].getsockname()[1]
    yield host
    server.close()


@contextlib.asynccontextmanager
async def _echo(greeting: bytes = b"") -> AsyncGenerator[int]:
    """Greets, then sends back what it gets until its end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(greeting)
            while piece := await reader.read(65536):
                writer.write(piece)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class Names:
    """A resolver with its own answers."""

    def __init__(self, **known: Sequence[str]) -> None:
        self.known = {name.replace("_", "."): addresses for name, addresses in known.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host not in self.known:
            raise OSError("unknown name")
        return self.known[host]


@dataclass(frozen=True)
class Served:
    forwarder: Forwarder
    port: int


@contextlib.asynccontextmanager
async def _forwarder(*lines: str, names: Names | None = None, head_s: float = 30.0) -> AsyncGenerator[Served]:
    rules = [NetworkRule.parse(line) for line in lines]
    names = names or Names(good_test=["127.0.0.1"], other_test=["127.0.0.1"])
    forwarder = Forwarder(rules, "runtime-1", resolve=names, head_s=head_s)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    at = Served(forwarder, int(listening.getsockname()[1]))
    await forwarder.serve(listening)
    try:
        yield at
    finally:
        await forwarder.close()


async def _said(at: Served, sent: bytes) -> bytes:
    """The whole answer to `sent`, until the forwarder ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
    writer.write(sent)
    async with asyncio.timeout(20):
        answer = await reader.read(-1)
    writer.close()
    return answer


async def test_a_plain_request_for_a_named_host_is_carried(upstream: Upstream) -> None:
    async with _forwarder(f"good.test:{upstream.port}", f"127.0.0.1:{upstream.port}") as at:
        answer = await _said(
            at, b"GET http://GOOD.test:%d/a?b=c HTTP/1.1\r\nHost: good.test\r\nX-Kept: 1\r\n\r\n" % upstream.port
        )
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"\r\n\r\n0")
    assert upstream.asked[0].startswith(b"GET /a?b=c HTTP/1.1\r\n")
    assert b"X-Kept: 1" in upstream.asked[0]
    assert (at.forwarder.num_opened, at.forwarder.num_refused) == (1, 0)


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_bodies_are_carried_both_ways(upstream: Upstream, framing: str) -> None:
    data = b"x" * 300_000
    head = b"POST http://good.test:%d/ HTTP/1.1\r\nHost: good.test\r\n" % upstream.port
    if framing == "length":
        sent = head + b"Content-Length: %d\r\n\r\n" % len(data) + data
    else:
        sent = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    upstream.answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    async with _forwarder(f"good.test:{upstream.port}", f"127.0.0.1:{upstream.port}") as at:
        answer = await _said(at, sent)
    assert b"hello" in answer
    assert upstream.asked[1].count(b"x") == len(data)


async def test_connect_is_a_tunnel_in_both_directions() -> None:
    async with _echo(b"hi ") as port, _forwarder(f"good.test:{port}", f"127.0.0.1:{port}") as at:
        reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
        writer.write(b"CONNECT good.test:%d HTTP/1.1\r\nHost: ignored\r\n\r\nearly " % port)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 Connection established\r\n\r\n"
        big = b"z" * (4 << 20)
        writer.write(big)
        writer.write_eof()
        async with asyncio.timeout(20):
            assert await reader.read(-1) == b"hi early " + big
        writer.close()


@pytest.mark.parametrize(
    "target",
    ["evil.test", "good.test.evil.test", "xgood.test", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"],
)
async def test_what_is_not_listed_is_refused_with_what_to_write(target: str, caplog: pytest.LogCaptureFixture) -> None:
    names = Names()
    async with _forwarder("good.test:443", names=names) as at:
        answer = await _said(at, f"CONNECT {target}:443 HTTP/1.1\r\nHost: good.test\r\n\r\n".encode())
        again = await _said(at, f"GET http://{target}/ HTTP/1.1\r\nHost: good.test:443\r\n\r\n".encode())
    for one in (answer, again):
        assert one.startswith(b"HTTP/1.1 403 ")
        assert b"runtime.network_allow" in one
    assert names.asked == [], "a host that is not listed must not even be looked up"
    assert (at.forwarder.num_opened, at.forwarder.num_refused) == (0, 2)
    told = [record.getMessage().split()[0] for record in caplog.records if record.name == "gangline.network"]
    assert told == ["network.refused", "network.refused", "network.closed"]


async def test_other_ports_of_a_listed_host_are_refused(upstream: Upstream) -> None:
    async with _forwarder("good.test", f"127.0.0.1:{upstream.port}") as at:
        answer = await _said(at, b"CONNECT good.test:%d HTTP/1.1\r\nHost: x\r\n\r\n" % upstream.port)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert not upstream.asked


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1"])
async def test_a_name_that_turns_out_to_be_inside_is_refused(address: str) -> None:
    names = Names(good_test=[address])
    async with _forwarder("good.test", names=names) as at:
        answer = await _said(at, b"CONNECT good.test:443 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"not public" in answer


async def test_a_name_is_looked_up_once_and_the_checked_address_dialled(upstream: Upstream) -> None:
    """A second look-up could give another address: DNS rebinding."""
    names = Names(good_test=["10.255.255.1", "127.0.0.1"])
    async with _forwarder(f"good.test:{upstream.port}", f"127.0.0.1:{upstream.port}", names=names) as at:
        answer = await _said(at, b"GET http://good.test:%d/ HTTP/1.1\r\nHost: x\r\n\r\n" % upstream.port)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert names.asked == ["good.test"]


async def test_the_host_header_is_the_targets(upstream: Upstream) -> None:
    async with _forwarder(f"good.test:{upstream.port}", f"127.0.0.1:{upstream.port}") as at:
        await _said(at, b"GET http://good.test:%d/ HTTP/1.1\r\nHost: evil.test\r\n\r\n" % upstream.port)
    assert b"Host: good.test:%d\r\n" % upstream.port in upstream.asked[0]
    assert b"evil" not in upstream.asked[0]


async def test_what_is_meant_for_this_hop_goes_no_further(upstream: Upstream) -> None:
    sent = (
        b"GET http://good.test:%d/ HTTP/1.1\r\nHost: good.test\r\nProxy-Authorization: Basic c2VjcmV0\r\n"
        b"Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nUpgrade: websocket\r\nTE: trailers\r\n\r\n" % upstream.port
    )
    async with _forwarder(f"good.test:{upstream.port}", f"127.0.0.1:{upstream.port}") as at:
        await _said(at, sent)
    asked = upstream.asked[0].lower()
    assert b"connection: close\r\n" in asked
    assert not any(name in asked for name in (b"proxy-", b"x-hop", b"upgrade", b"te:", b"keep-alive"))


async def test_a_second_request_on_a_connection_goes_nowhere(upstream: Upstream) -> None:
    one = b"GET http://good.test:%d/1 HTTP/1.1\r\nHost: good.test\r\n\r\n" % upstream.port
    async with _forwarder(f"good.test:{upstream.port}", f"127.0.0.1:{upstream.port}") as at:
        answer = await _said(at, one + b"GET http://evil.test/2 HTTP/1.1\r\nHost: evil.test\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert len(upstream.asked) == 2, "one head, one body"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"CONNECT good.test HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT user@good.test:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT http://good.test:443/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT good.test:443:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT 2130706433:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT 0x7f.1:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT good.test%00.evil.test:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT good.test:443 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"CONNECT good.test:443 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"CONNECT evil.test:443 HTTP/1.1\r\nHost: x\r\n\r\nCONNECT good.test:443 HTTP/1.1\r\nHost: x\r\n\r\n", 403),
        (b"GET /etc/passwd HTTP/1.1\r\nHost: good.test\r\n\r\n", 400),
        (b"GET https://good.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n", 400),
        (b"GET file:///etc/passwd HTTP/1.1\r\nHost: good.test\r\n\r\n", 400),
        (b"GET http://good.test@evil.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n", 400),
        (b"GET http://evil.test\\@good.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n", 400),
        (b"GET http:/// HTTP/1.1\r\nHost: good.test\r\n\r\n", 400),
        (b"GET http://good.test/ HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (
            b"POST http://good.test/ HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"GET http://good.test/ HTTP/1.1\r\nHost: a\r\nX: " + b"y" * MAX_HEAD_BYTES * 4 + b"\r\n\r\n", 431),
        (b"GET http://good.test/" + b"a" * MAX_HEAD_BYTES * 2, 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 not http\r\n\r\n", 400),
    ],
)
async def test_what_is_malformed_or_hostile_is_refused(sent: bytes, status: int) -> None:
    names = Names()
    async with _forwarder("good.test", names=names) as at:
        answer = await _said(at, sent)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert answer.count(b"HTTP/1.1 ") == 1
    assert (names.asked, at.forwarder.num_opened, at.forwarder.num_refused) == ([], 0, 1)


async def test_a_slow_client_is_let_go() -> None:
    async with _forwarder("good.test", head_s=0.05) as at:
        answer = await _said(at, b"GET http://good.te")
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_host_that_cannot_be_reached_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    async with _forwarder(f"good.test:{port}", "gone.test", f"127.0.0.1:{port}") as at:
        refused = await _said(at, b"CONNECT good.test:%d HTTP/1.1\r\nHost: x\r\n\r\n" % port)
        unknown = await _said(at, b"CONNECT gone.test:443 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 502 ")
    assert unknown.startswith(b"HTTP/1.1 502 ")
    assert b"gone.test was not found" in unknown


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"y" * MAX_HEAD_BYTES * 2])
async def test_a_host_that_speaks_no_http_is_told(upstream: Upstream, answer: bytes) -> None:
    upstream.answer = answer or b"\r\n"
    async with _forwarder(f"good.test:{upstream.port}", f"127.0.0.1:{upstream.port}") as at:
        said = await _said(at, b"GET http://good.test:%d/ HTTP/1.1\r\nHost: x\r\n\r\n" % upstream.port)
    assert said.startswith(b"HTTP/1.1 502 ")


async def test_closing_ends_tunnels_that_are_open() -> None:
    async with _echo() as port, _forwarder(f"good.test:{port}", f"127.0.0.1:{port}") as at:
        reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
        writer.write(b"CONNECT good.test:%d HTTP/1.1\r\nHost: x\r\n\r\n" % port)
        await reader.readuntil(b"\r\n\r\n")
        await at.forwarder.close()
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                assert await reader.read(-1) == b""
        writer.close()


async def test_a_flood_of_refusals_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gangline.network")
    async with _forwarder("good.test") as at:
        for number in range(80):
            await _said(at, b"CONNECT host%d.test:443 HTTP/1.1\r\nHost: x\r\n\r\n" % number)
    lines = [record.getMessage() for record in caplog.records if record.name == "gangline.network"]
    assert len(lines) < 60
    assert lines[-1] == "network.closed runtime=runtime-1 opened=0 refused=80"
