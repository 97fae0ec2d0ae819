"""The forward proxy of network `list`, one for each sandbox, with only that sandbox's rules.

It serves a socket opened inside the sandbox's network, which is unreachable from outside, and speaks HTTP: `CONNECT`,
and plain requests for `http://...`. See docs/adr/0017.

Laws
- A connection goes to an address that was checked, never to a name, which could resolve to another address by then.
- The dialled address is the one of the request's target. The `Host` header is always replaced by the target.
- One connection carries one request or one tunnel: there is no second request to smuggle.
- Each rejection is counted and answered with the entry to add to `runtime.network_allow`.

Some functions only transform HTTP messages, which h11 reads and writes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import SupportsIndex, cast

import h11

from gangline.domain.network import NetworkRule, is_named, may_dial, normal_host, split_host_port
from gangline.sandbox.network.relay import MAX_CONNECTIONS
from gangline.sandbox.shared.accounts import Traffic

log = logging.getLogger("gangline.network")

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port -> addresses, best first. Raises: OSError."""

MAX_HEAD_BYTES = 32 << 10
HEAD_S = 30.0
"""Seconds for reading a request's head."""
_DIAL_S = 15.0
"""Seconds for resolving a host, and for dialling each address."""
_LINGER_S = 2.0
"""Seconds for reading the rest of a refused request."""
_PIECE_BYTES = 1 << 16
_MAX_REFUSALS_LOGGED = 50
"""Per sandbox, each host once; all are counted."""

_OF_ONE_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"upgrade",
}
"""Transfer-Encoding is one too, but h11 uses it to frame its output."""


class Refused(Exception):
    """A request that is not forwarded. `status`: status of the answer; the text gives the reason and the remedy."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


async def next_event(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Event:
    """The next part of a message. Raises: OSError, h11.RemoteProtocolError, EOFError at the end."""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Event):
            return event
        if event is h11.PAUSED:
            raise EOFError
        connection.receive_data(await reader.read(_PIECE_BYTES))


def split_url(target: bytes) -> tuple[str, bytes]:
    """Authority and path of an absolute `http` URL. Raises: Refused."""
    scheme, separator, rest = target.partition(b"://")
    if not separator:
        raise Refused(400, "this is a proxy: ask for http://HOST/..., or CONNECT HOST:PORT")
    if scheme.lower() != b"http":
        raise Refused(400, f"{scheme.decode('latin-1')!r} is not carried: use CONNECT for anything but http")
    end = min((rest.find(mark) for mark in (b"/", b"?", b"#") if mark in rest), default=len(rest))
    authority, path = rest[:end].decode("latin-1"), rest[end:].partition(b"#")[0]
    if "@" in authority:
        raise Refused(400, "a URL with a user in it is not carried: send an Authorization header")
    return authority, path if path.startswith(b"/") else b"/" + path


def request_onward(request: h11.Request, path: bytes, host: str, port: int) -> h11.Request:
    """The request for the host: with the right Host, and without headers for this hop. Raises: Refused."""
    names = {name for name, _ in request.headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise Refused(400, "a request has a Content-Length or a Transfer-Encoding, not both")
    authority = f"[{host}]" if ":" in host else host
    own = [(b"Host", (authority if port == 80 else f"{authority}:{port}").encode()), (b"Connection", b"close")]
    kept = [(name, value) for name, value in _carried(request) if name.lower() != b"host"]
    return h11.Request(method=request.method, target=path, headers=own + kept)


def response_back(response: h11.Response | h11.InformationalResponse) -> h11.Response | h11.InformationalResponse:
    """The response for the sandbox: the connection closes after it."""
    headers = _carried(response)
    if isinstance(response, h11.InformationalResponse):
        return h11.InformationalResponse(headers=headers, status_code=response.status_code, reason=response.reason)
    headers.append((b"Connection", b"close"))
    return h11.Response(headers=headers, status_code=response.status_code, reason=response.reason)


def _carried(message: h11.Request | h11.Response | h11.InformationalResponse) -> list[tuple[bytes, bytes]]:
    """Headers to forward, in their original case."""
    listed = b",".join(value for name, value in message.headers if name == b"connection").lower().split(b",")
    dropped = _OF_ONE_HOP | {name.strip() for name in listed} - {b"content-length", b"transfer-encoding", b"host"}
    return [(name, value) for name, value in message.headers.raw_items() if name.lower() not in dropped]


def proxy_variables(port: int) -> dict[str, str]:
    """Variables that make programs use a forward proxy on this port of their loopback. Node.js needs an extra one to
    obey them."""
    url, direct = f"http://127.0.0.1:{port}", "127.0.0.1,localhost,::1"
    variables = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "NO_PROXY": direct}
    return {**variables, **{name.lower(): value for name, value in variables.items()}, "NODE_USE_ENV_PROXY": "1"}


async def resolve_on_host(host: str, port: int) -> Sequence[str]:
    """Raises: OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Forwarder:
    """Serves one listening socket until closed."""

    def __init__(
        self,
        rules: Sequence[NetworkRule],
        runtime_id: str,
        *,
        resolve: Resolver = resolve_on_host,
        head_s: float = HEAD_S,
        traffic: Traffic | None = None,
    ) -> None:
        """`traffic`: incremented by the bytes from and to outside hosts."""
        self.num_opened = 0
        """Connections to outside hosts."""
        self.num_refused = 0
        self._rules = tuple(rules)
        self._runtime_id = runtime_id
        self._resolve = resolve
        self._head_s = head_s
        self._traffic = traffic or Traffic()
        self._logged: set[tuple[str, int, str]] = set()
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def serve(self, listening: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accepted, sock=listening, start_serving=False)
        await self._server.start_serving()

    async def take(self, connection: socket.socket) -> None:
        """Serve one more connection, accepted by the caller."""
        self._accepted(*await asyncio.open_connection(sock=connection))

    async def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in tuple(self._clients):
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        if self.num_refused:
            log.warning(
                "network.closed runtime=%s opened=%d refused=%d", self._runtime_id, self.num_opened, self.num_refused
            )

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from the sandbox, until it ends."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            await self._answer(connection, reader, writer)
            writer.close()
            await writer.wait_closed()
        except Refused as refusal:
            await self._refuse(refusal, connection, reader, writer)
        except (OSError, h11.ProtocolError, EOFError):
            pass  # one side went away or broke the protocol: the other sees the connection end
        finally:
            writer.transport.abort()

    async def _answer(
        self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Raises: Refused, OSError, h11.ProtocolError, EOFError."""
        try:
            async with asyncio.timeout(self._head_s):
                request = await next_event(connection, reader)
        except h11.RemoteProtocolError as error:
            raise Refused(error.error_status_hint, f"this is not an HTTP request: {error}") from error
        except TimeoutError:
            raise Refused(408, f"the request did not come within {self._head_s:g} s") from None
        if not isinstance(request, h11.Request):
            return
        if request.method == b"CONNECT":
            await self._tunnel(request, connection, reader, writer)
        else:
            await self._pass_on(request, connection, reader, writer)

    async def _tunnel(
        self,
        request: h11.Request,
        connection: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if {name for name, _ in request.headers} & {b"content-length", b"transfer-encoding"}:
            raise Refused(400, "CONNECT has no body")
        host, port = _target(request.target.decode("ascii"), None)
        far_reader, far_writer = await self._reach(host, port)
        try:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            connection.next_event()  # the end of a request without a body: what follows is the tunnel's
            far_writer.write(connection.trailing_data[0])
            async with asyncio.TaskGroup() as directions:
                directions.create_task(_copy(reader, far_writer))
                directions.create_task(_copy(far_reader, writer))
            far_writer.close()
            await far_writer.wait_closed()
        except* OSError:
            pass  # reset by either side
        finally:
            far_writer.transport.abort()

    async def _pass_on(
        self,
        request: h11.Request,
        connection: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        authority, path = split_url(request.target)
        host, port = _target(authority, 80)
        onward = request_onward(request, path, host, port)
        far_reader, far_writer = await self._reach(host, port)
        far = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        far_writer.write(far.send(onward) or b"")
        upload = asyncio.create_task(_send_body(connection, reader, far, far_writer))
        try:
            await _send_back(far, far_reader, connection, writer)
        finally:
            upload.cancel()
            await asyncio.gather(upload, return_exceptions=True)
            far_writer.transport.abort()

    async def _reach(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises: Refused."""
        if not is_named(self._rules, host, port):
            raise self._denied(host, port, "not_listed", f"add {_as_rule(host, port)!r}")
        try:
            async with asyncio.timeout(_DIAL_S):
                addresses = await self._resolve(host, port)
        except (OSError, TimeoutError) as error:
            raise Refused(502, f"{host} was not found: {error or 'no answer'}") from error
        allowed = [address for address in addresses if may_dial(self._rules, address, port)]
        if not allowed:
            found = addresses[0] if addresses else "nothing"
            advice = f"it is at {found}, which is not public: where that is meant, add {_as_rule(found, port)!r} too"
            raise self._denied(host, port, "not_public", advice)
        return await self._dial(host, port, allowed)

    async def _dial(
        self, host: str, port: int, addresses: Sequence[str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        complaint = ""
        for address in addresses:
            try:
                async with asyncio.timeout(_DIAL_S):
                    streams = await _counted_connection(address, port, self._traffic)
            except (OSError, TimeoutError) as error:
                complaint = str(error) or "no answer"
                continue
            self.num_opened += 1
            return streams
        raise Refused(502, f"{host}:{port} cannot be reached: {complaint}")

    def _denied(self, host: str, port: int, why: str, advice: str) -> Refused:
        refusal = (host, port, why)
        if refusal not in self._logged and len(self._logged) < _MAX_REFUSALS_LOGGED:
            self._logged.add(refusal)
            log.warning("network.refused runtime=%s host=%s port=%d why=%s", self._runtime_id, host, port, why)
        return Refused(403, f"{_as_rule(host, port)} is not open to this sandbox: {advice} to runtime.network_allow")

    async def _refuse(
        self,
        refusal: Refused,
        connection: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.num_refused += refusal.status < 500
        if connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE, h11.ERROR):
            return  # an answer has begun
        body = f"gangline: {refusal}\n".encode()
        head = (
            f"HTTP/1.1 {refusal.status} Refused\r\nContent-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                writer.write(head.encode() + body)
                writer.write_eof()
                while await reader.read(_PIECE_BYTES):
                    pass  # a connection closed with something unread loses its answer too


class _CountedReader(asyncio.StreamReader):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self._traffic.received_bytes += len(cast(bytes, data))
        super().feed_data(data)


class _CountedWriter(asyncio.StreamWriter):
    traffic: Traffic

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.traffic.sent_bytes += len(data)
        super().write(data)


async def _counted_connection(
    address: str, port: int, traffic: Traffic
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises: OSError."""
    loop = asyncio.get_running_loop()
    reader = _CountedReader(traffic)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.create_connection(lambda: protocol, address, port)
    writer = _CountedWriter(transport, protocol, reader, loop)
    writer.traffic = traffic
    return reader, writer


def _target(authority: str, usual_port: int | None) -> tuple[str, int]:
    """Raises: Refused."""
    try:
        host, port = split_host_port(authority)
        host = normal_host(host)
    except ValueError as error:
        raise Refused(400, str(error)) from error
    port = port or usual_port
    if port is None:
        raise Refused(400, f"{authority!r} has no port")
    return host, port


def _as_rule(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One direction of a tunnel. Passes its end on; the other direction continues. Raises: OSError."""
    while piece := await reader.read(_PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
    writer.write_eof()


async def _send_body(
    near: h11.Connection, reader: asyncio.StreamReader, far: h11.Connection, writer: asyncio.StreamWriter
) -> None:
    """Raises: OSError, h11.ProtocolError, EOFError."""
    while isinstance(event := await next_event(near, reader), (h11.Data, h11.EndOfMessage)):
        writer.write(far.send(event) or b"")
        await writer.drain()
        if isinstance(event, h11.EndOfMessage):
            return


async def _send_back(
    far: h11.Connection, reader: asyncio.StreamReader, near: h11.Connection, writer: asyncio.StreamWriter
) -> None:
    """Raises: Refused when there is no answer, OSError, h11.ProtocolError, EOFError."""
    while True:
        try:
            event = await next_event(far, reader)
        except h11.RemoteProtocolError as error:
            if near.our_state is h11.SEND_RESPONSE:
                raise Refused(502, f"what the host answered is not HTTP: {error}") from error
            raise
        match event:
            case h11.InformationalResponse() | h11.Response():
                writer.write(near.send(response_back(event)) or b"")
            case h11.Data() | h11.EndOfMessage():
                writer.write(near.send(event) or b"")
            case _:
                raise Refused(502, "the host ended the connection without an answer")
        await writer.drain()
        if isinstance(event, h11.EndOfMessage):
            return
