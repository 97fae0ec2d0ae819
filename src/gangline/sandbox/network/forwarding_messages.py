"""The forward proxy's changes to HTTP messages; h11 reads and writes them. Dials nothing."""

from __future__ import annotations

import asyncio

import h11

__all__ = ["Refused", "next_event", "request_onward", "response_back", "split_url"]

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
_PIECE_BYTES = 1 << 16


class Refused(Exception):
    """A request that is not carried. `status`: status of the answer; the text gives the reason and the remedy."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


async def next_event(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Event:
    """The next part of a message. Raises: OSError, h11.RemoteProtocolError, EOFError when there is none to come."""
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
    """As the host is asked: its own Host, nothing that was meant for this hop. Raises: Refused."""
    names = {name for name, _ in request.headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise Refused(400, "a request has a Content-Length or a Transfer-Encoding, not both")
    authority = f"[{host}]" if ":" in host else host
    own = [(b"Host", (authority if port == 80 else f"{authority}:{port}").encode()), (b"Connection", b"close")]
    kept = [(name, value) for name, value in _carried(request) if name.lower() != b"host"]
    return h11.Request(method=request.method, target=path, headers=own + kept)


def response_back(response: h11.Response | h11.InformationalResponse) -> h11.Response | h11.InformationalResponse:
    """As the sandbox is answered: each connection carries one."""
    headers = _carried(response)
    if isinstance(response, h11.InformationalResponse):
        return h11.InformationalResponse(headers=headers, status_code=response.status_code, reason=response.reason)
    headers.append((b"Connection", b"close"))
    return h11.Response(headers=headers, status_code=response.status_code, reason=response.reason)


def _carried(message: h11.Request | h11.Response | h11.InformationalResponse) -> list[tuple[bytes, bytes]]:
    """Headers that go on, in the case that they were sent in."""
    listed = b",".join(value for name, value in message.headers if name == b"connection").lower().split(b",")
    dropped = _OF_ONE_HOP | {name.strip() for name in listed} - {b"content-length", b"transfer-encoding", b"host"}
    return [(name, value) for name, value in message.headers.raw_items() if name.lower() not in dropped]
