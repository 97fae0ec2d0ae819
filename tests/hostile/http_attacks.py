"""Attacks on whatever answers HTTP, as bytes: a library would not send most of them.

An attack gives requests for a surface, each sent on its own connection. One that must be refused succeeds with any
answer of 2xx or 3xx; one that must be survived with a 5xx, with silence, or when the service is not healthy after it.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

__all__ = ["ATTACKS", "HttpAttack", "Surface", "succeeded"]

_PATIENCE_S = 20.0
_LARGE_BYTES = 10_000
_EVERY = 5
_BUSY = 503
"""An honest answer: no node takes sessions."""
Need = Literal["listener", "token", "json", "proxy"]


@dataclass(frozen=True)
class Surface:
    """One address that answers, and all that there is to attack at it."""

    name: str
    url: str
    health: str
    """A path that answers 200 to everyone."""
    token: str | None = None
    """What opens `closed`."""
    closed: tuple[tuple[str, str], ...] = ()
    """Method and path of what opens to the token only."""
    posts: tuple[str, ...] = ()
    """Paths that read a JSON body."""
    calls: tuple[str, ...] = ()
    """Paths of a live session's model calls, of every dialect."""
    key: str = ""
    """Of that session."""
    other_calls: tuple[str, ...] = ()
    """The same of another live session."""
    outside: str = ""
    """URL of a service that nobody was asked to fetch from."""
    read_only: str = "gangline-000000000000=r.9999999999.00.00"
    """The cookie of a browser that was signed in with a read-only link, where the surface signs browsers in."""
    password_too: tuple[tuple[str, str], ...] = ()
    """Those of `closed` to which it opens as a password also."""

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc


@dataclass(frozen=True)
class HttpAttack:
    name: str
    against: Need
    must: Literal["be refused", "be survived"]
    requests: Callable[[Surface], Iterator[bytes]]


ATTACKS: list[HttpAttack] = []
Requests = Callable[[Surface], Iterator[bytes]]


def refused(against: Need) -> Callable[[Requests], Requests]:
    def add(requests: Requests) -> Requests:
        ATTACKS.append(HttpAttack(requests.__name__, against, "be refused", requests))
        return requests

    return add


def survived(against: Need) -> Callable[[Requests], Requests]:
    def add(requests: Requests) -> Requests:
        ATTACKS.append(HttpAttack(requests.__name__, against, "be survived", requests))
        return requests

    return add


async def succeeded(attack: HttpAttack, surface: Surface) -> str | None:
    """Evidence of the attack's success."""
    for request in attack.requests(surface):
        shown = request[:200]
        answer = await _answer(surface, request)
        if answer is None:
            return f"no answer in {_PATIENCE_S:g} s to {shown!r}"
        statuses = [int(status) for status in re.findall(rb"^HTTP/1\.[01] (\d{3})", answer, re.MULTILINE)]
        if attack.must == "be refused" and any(status < 400 for status in statuses if status != 100):
            return f"{answer[:200]!r} to {shown!r}"
        if any(status >= 500 and status != _BUSY for status in statuses):
            return f"{answer[:200]!r} to {shown!r}"
    healthy = await _answer(surface, _request(surface, "GET", surface.health))
    return None if healthy is not None and b" 200 " in healthy[:20] else f"not healthy any more: {healthy!r}"


async def _answer(surface: Surface, request: bytes) -> bytes | None:
    """All that comes until the connection closes; None when it stays open in silence."""
    address = urlsplit(surface.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    answer = bytearray()
    try:
        async with asyncio.timeout(_PATIENCE_S):
            writer.write(request)
            sending = asyncio.create_task(writer.drain())
            while piece := await reader.read(1 << 16):
                answer += piece
                if len(answer) > 1 << 20:
                    break
            sending.cancel()
    except TimeoutError:
        return bytes(answer) or None
    except ConnectionError:
        pass
    finally:
        writer.close()
    return bytes(answer)


def _request(
    surface: Surface,
    method: str,
    path: str,
    *headers: str,
    body: bytes = b"",
    host: str | None = None,
    kind: str | None = "application/json",
    version: str = "HTTP/1.1",
) -> bytes:
    lines = [f"{method} {path} {version}", f"Host: {surface.host if host is None else host}", "Connection: close"]
    lines += [f"Content-Type: {kind}"] if kind and (body or method == "POST") else []
    lines += [f"Content-Length: {len(body)}"] if body or method == "POST" else []
    return "\r\n".join([*lines, *headers, "", ""]).encode("utf-8", "surrogateescape") + body


def _bearer(surface: Surface) -> str:
    return f"Authorization: Bearer {surface.token or surface.key}"


def _with_keys(*keys: str) -> Requests:
    def requests(surface: Surface) -> Iterator[bytes]:
        for method, path in surface.closed:
            for key in keys:
                headers = [key.format(token=surface.token, key=surface.key)] if key else []
                yield _request(surface, method, path, *headers, body=b"{}" if method != "GET" else b"")

    return requests


_KEYS: dict[str, tuple[str, ...]] = {
    "without_a_token": ("",),
    "with_an_empty_token": ("Authorization: Bearer ", "Authorization:", "Authorization: Bearer"),
    "with_a_wrong_token": ("Authorization: Bearer wrong",),
    "with_the_beginning_of_the_token": ("Authorization: Bearer {token:.8}",),
    "with_more_than_the_token": ("Authorization: Bearer {token}x", "Authorization: Bearer {token},{token}"),
    "with_the_token_in_capitals": ("Authorization: Bearer CONTROL-TOKEN",),
    "with_the_token_of_another_scheme": ("Authorization: Basic {token}", "Authorization: Digest {token}"),
    "with_the_token_as_the_name_before_a_password": (
        "Authorization: Basic " + base64.b64encode(b"control-token:").decode(),
        "Authorization: Basic " + base64.b64encode(b"control-token").decode(),
    ),
    "with_the_token_as_a_cookie": ("Cookie: token={token}; Authorization=Bearer {token}",),
    "with_the_token_behind_a_comma": ("Authorization: Bearer wrong, Bearer {token}",),
    "with_a_wildcard_as_token": ("Authorization: Bearer *", "Authorization: Bearer null", "Authorization: Bearer true"),
    "with_a_sessions_key": ("Authorization: Bearer {key}", "X-Api-Key: {key}", "X-Goog-Api-Key: {key}"),
    "as_a_proxy_that_has_checked_already": (
        "X-Forwarded-For: 127.0.0.1",
        "X-Real-IP: 127.0.0.1",
        "Forwarded: for=127.0.0.1;host=localhost",
        "X-Forwarded-User: admin",
        "X-Original-URL: /health",
    ),
}
for _name, _keys in _KEYS.items():
    ATTACKS.append(HttpAttack(f"opens_routes_{_name}", "token", "be refused", _with_keys(*_keys)))


@refused("token")
def opens_routes_with_the_token_as_a_password(surface: Surface) -> Iterator[bytes]:
    """A browser remembers passwords, and sends them unasked."""
    password = "Authorization: Basic " + base64.b64encode(b"user:control-token").decode()
    for method, path in surface.closed:
        if (method, path) not in surface.password_too:
            yield _request(surface, method, path, password, body=b"{}" if method != "GET" else b"")


@refused("token")
def changes_things_with_a_read_only_cookie(surface: Surface) -> Iterator[bytes]:
    origin = f"Origin: http://{surface.host}"
    for method, path in surface.closed:
        if method != "GET":
            yield _request(surface, method, path, f"Cookie: {surface.read_only}", origin, body=b"{}")
            yield _request(surface, method, path, f"Cookie: {surface.read_only}", body=b"{}")


@refused("token")
def makes_a_cookie_of_a_read_only_one(surface: Surface) -> Iterator[bytes]:
    name, _, value = surface.read_only.partition("=")
    rights, *whose, expires_at, nonce, mac = value.split(".")
    bound = "".join(f".{one}" for one in whose)
    forged = (
        f"w{bound}.{expires_at}.{nonce}.{mac}",
        f"w{bound}.{expires_at}.{nonce}.",
        f"w{bound}.{expires_at}.{nonce}.{'0' * len(mac)}",
        f"{rights}{bound}.{expires_at}.{nonce}.{mac};w{bound}.{expires_at}.{nonce}.{mac}",
        f"{rights}{bound}.{int(expires_at) + 1}.{nonce}.{mac}",
        f"w.admin.default..{expires_at}.{nonce}.{mac}",
        f"w.admin.other.0.{expires_at}.{nonce}.{mac}",
        f"w.{expires_at}.{nonce}.{mac}",
    )
    for method, path in surface.closed:
        if method != "GET":
            for cookie in forged:
                yield _request(surface, method, path, f"Cookie: {name}={cookie}", f"Origin: http://{surface.host}")


@refused("token")
def a_page_of_another_port_uses_the_cookie(surface: Surface) -> Iterator[bytes]:
    """Cookies know no ports: a browser sends them for the page of any service on the same host."""
    for method, path in surface.closed:
        for header in ("Origin: http://127.0.0.1:1", "Sec-Fetch-Site: same-site", "Sec-Fetch-Site: cross-site"):
            yield _request(surface, method, path, f"Cookie: {surface.read_only}", header)


@refused("token")
def opens_links_that_were_never_made(surface: Surface) -> Iterator[bytes]:
    for code in ("link", "link-" + "A" * 32, "..", "%2e%2e", "link-x/../../", "*"):
        for method in ("GET", "POST"):
            yield _request(surface, method, f"/open/{code}")


@refused("token")
def opens_routes_with_the_token_in_the_address(surface: Surface) -> Iterator[bytes]:
    for method, path in surface.closed:
        for query in (f"token={surface.token}", f"access_token={surface.token}", f"key={surface.token}"):
            yield _request(surface, method, f"{path}?{query}")


@refused("token")
def opens_routes_by_another_spelling(surface: Surface) -> Iterator[bytes]:
    for method, path in surface.closed:
        for spelled in (f"/{path}", f"{path}/", path.upper(), f"/.{path}", f"/s/..{path}", f"/health/..{path}"):
            if spelled != path:
                yield _request(surface, method, spelled)
        yield _request(surface, method, path.replace("/", "%2f"))
        yield _request(surface, method, f"{path};/health")
        yield _request(surface, method, f"http://{surface.host}{path}")


@refused("token")
def opens_routes_by_overriding_the_method(surface: Surface) -> Iterator[bytes]:
    for method, path in surface.closed:
        for name in ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"):
            yield _request(surface, "POST", surface.health, f"{name}: {method}", f"X-Original-URL: {path}")


@refused("token")
def opens_routes_behind_another_request(surface: Surface) -> Iterator[bytes]:
    """Smuggled: what a proxy in front takes for a body would be its own request."""
    for method, path in surface.closed[:8]:
        inner = _request(surface, method, path)
        chunked = b"0\r\n\r\n" + inner
        yield _request(surface, "POST", surface.closed[0][1], "Transfer-Encoding: chunked", body=chunked)
        head = f"POST {path} HTTP/1.1\r\nHost: {surface.host}\r\nContent-Length: 0\r\n"
        yield f"{head}Content-Length: {len(inner)}\r\n\r\n".encode() + inner


# What a web page can send from the browser of somebody who may reach the service: with the right token here, so that
# only the wall against pages is asked.


def _as_pages(*, kind: str | None, host: str | None = None, headers: tuple[str, ...] = ()) -> Requests:
    def requests(surface: Surface) -> Iterator[bytes]:
        for path in surface.posts:
            yield _request(surface, "POST", path, _bearer(surface), *headers, body=b"{}", kind=kind, host=host)

    return requests


_PAGES: dict[str, Requests] = {
    "posts_plain_text": _as_pages(kind="text/plain"),
    "posts_plain_text_that_says_json": _as_pages(kind="text/plain; application/json"),
    "posts_a_form": _as_pages(kind="application/x-www-form-urlencoded"),
    "posts_a_form_of_parts": _as_pages(kind="multipart/form-data; boundary=x"),
    "posts_without_a_kind": _as_pages(kind=None),
    "posts_from_another_origin": _as_pages(kind="application/json", headers=("Origin: http://evil.test",)),
    "posts_from_no_origin": _as_pages(kind="application/json", headers=("Origin: null",)),
    "posts_from_a_subdomain": _as_pages(kind="application/json", headers=("Origin: http://127.0.0.1.evil.test",)),
    "posts_across_sites": _as_pages(kind="application/json", headers=("Sec-Fetch-Site: cross-site",)),
    "posts_to_another_name": _as_pages(kind="application/json", host="evil.test"),
    "posts_to_a_name_that_begins_right": _as_pages(kind="application/json", host="127.0.0.1.evil.test"),
    "posts_to_a_name_with_a_user": _as_pages(kind="application/json", host="127.0.0.1@evil.test"),
}
for _name, _requests in _PAGES.items():
    ATTACKS.append(HttpAttack(f"a_page_{_name}", "json", "be refused", _requests))


@refused("token")
def a_page_reads_by_another_name(surface: Surface) -> Iterator[bytes]:
    """DNS rebinding: the page's own name resolves to this address."""
    for method, path in surface.closed:
        if method == "GET":
            yield _request(surface, method, path, _bearer(surface), host="evil.test")


@refused("token")
def a_page_asks_for_permission(surface: Surface) -> Iterator[bytes]:
    for method, path in surface.closed:
        asks = (f"Access-Control-Request-Method: {method}", "Access-Control-Request-Headers: authorization")
        yield _request(surface, "OPTIONS", path, "Origin: http://evil.test", *asks)


# Requests that are none.


@refused("listener")
def names_two_lengths(surface: Surface) -> Iterator[bytes]:
    inner = _request(surface, "GET", surface.health)
    head = f"GET {surface.health} HTTP/1.1\r\nHost: {surface.host}\r\nConnection: close\r\n"
    yield f"{head}Content-Length: 0\r\nContent-Length: {len(inner)}\r\n\r\n".encode() + inner
    yield f"{head}Content-Length: {len(inner)}, 0\r\n\r\n".encode() + inner


@refused("listener")
def names_a_length_and_chunks(surface: Surface) -> Iterator[bytes]:
    inner = _request(surface, "GET", surface.health)
    head = f"GET {surface.health} HTTP/1.1\r\nHost: {surface.host}\r\nContent-Length: 4\r\n"
    yield f"{head}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode() + inner


@refused("listener")
def names_an_unknown_coding_of_chunks(surface: Surface) -> Iterator[bytes]:
    for coding in ("xchunked", "chunked, identity", "identity, chunked, chunked", "\x0bchunked"):
        yield _request(surface, "GET", surface.health, f"Transfer-Encoding: {coding}") + b"0\r\n\r\n"


@refused("listener")
def sends_a_negative_or_odd_length(surface: Surface) -> Iterator[bytes]:
    for length in ("-1", "+4", "0x4", "4_0", "9" * 40, "1e3", " "):
        yield (
            f"POST {surface.health} HTTP/1.1\r\nHost: {surface.host}\r\nConnection: close\r\n"
            f"Content-Length: {length}\r\n\r\n{{}}"
        ).encode()


@refused("listener")
def folds_a_header(surface: Surface) -> Iterator[bytes]:
    yield _request(surface, "GET", surface.health, "X-Folded: a\r\n Transfer-Encoding: chunked")


@refused("listener")
def puts_a_space_before_the_colon(surface: Surface) -> Iterator[bytes]:
    yield _request(surface, "GET", surface.health, "Content-Length : 5", "Transfer-Encoding : chunked")


@refused("listener")
def puts_control_characters_into_headers(surface: Surface) -> Iterator[bytes]:
    for value in ("a\0b", "a\rb"):
        yield _request(surface, "GET", surface.health, f"X-Odd: {value}")


@refused("listener")
def puts_control_characters_into_names_of_headers(surface: Surface) -> Iterator[bytes]:
    for name in ("X\0Odd", "X Odd", "X\x01", "", "(comment)"):
        yield _request(surface, "GET", surface.health, f"{name}: x")


@refused("listener")
def sends_a_line_without_end(surface: Surface) -> Iterator[bytes]:
    yield _request(surface, "GET", f"{surface.health}?{'x' * (1 << 20)}")


@refused("listener")
def sends_a_header_without_end(surface: Surface) -> Iterator[bytes]:
    yield _request(surface, "GET", surface.health, f"X-Long: {'x' * (1 << 20)}")


@refused("listener")
def sends_ten_thousand_headers(surface: Surface) -> Iterator[bytes]:
    yield _request(surface, "GET", surface.health, *(f"X-{number}: x" for number in range(10_000)))


@refused("listener")
def asks_it_to_fetch_from_elsewhere(surface: Surface) -> Iterator[bytes]:
    yield _request(surface, "GET", f"{surface.outside}/", host=urlsplit(surface.outside).netloc)


@refused("listener")
def asks_it_for_a_tunnel(surface: Surface) -> Iterator[bytes]:
    yield _request(surface, "CONNECT", urlsplit(surface.outside).netloc)


@refused("listener")
def asks_it_to_echo(surface: Surface) -> Iterator[bytes]:
    for method in ("TRACE", "TRACK", "DEBUG", "PROPFIND", "MOVE"):
        yield _request(surface, method, surface.health, "X-Secret: echoed")


@refused("listener")
def leaves_the_folder_of_its_paths(surface: Surface) -> Iterator[bytes]:
    for path in ("/../../../../etc/passwd", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%5c..%5cetc/passwd"):
        yield _request(surface, "GET", path)
        yield _request(surface, "GET", f"{surface.health}{path}")


@survived("listener")
def speaks_another_protocol(surface: Surface) -> Iterator[bytes]:
    yield b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64)
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(512)
    yield b"SSH-2.0-OpenSSH_9\r\n\r\n"
    yield bytes(range(256)) * 64 + b"\r\n\r\n"
    yield b"GET /\r\n\r\n"


@survived("listener")
def asks_to_change_the_protocol(surface: Surface) -> Iterator[bytes]:
    upgrades = ("Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
    yield _request(surface, "GET", surface.health, *upgrades)
    yield _request(surface, "GET", surface.health, "Upgrade: websocket", "Sec-WebSocket-Version: 13")


# Bodies.


def _bodies(surface: Surface, *bodies: bytes) -> Iterator[bytes]:
    """To every route that reads one; large ones to some, since all routes read them alike."""
    for body in bodies:
        paths = (*surface.posts, *surface.calls)
        for path in paths if len(body) < _LARGE_BYTES else paths[::_EVERY]:
            yield _request(surface, "POST", path, _bearer(surface), body=body)


def _coded(surface: Surface, coding: str, body: bytes) -> Iterator[bytes]:
    for path in (*surface.posts[:2], *surface.calls):
        yield _request(surface, "POST", path, _bearer(surface), f"Content-Encoding: {coding}", body=body)


_NESTED = b'{"metadata":' * 100_000 + b"1" + b"}" * 100_000
_BOMB = gzip.compress(b'"' + b"x" * (64 << 20) + b'"')


@survived("json")
def sends_deep_objects(surface: Surface) -> Iterator[bytes]:
    yield from _bodies(surface, _NESTED)


@survived("json")
def sends_deep_lists(surface: Surface) -> Iterator[bytes]:
    yield from _bodies(surface, b"[" * 500_000)


@survived("json")
def sends_huge_numbers(surface: Surface) -> Iterator[bytes]:
    yield from _bodies(
        surface, b'{"max_sessions": ' + b"9" * 100_000 + b"}", b'{"n": 1e99999}', b'{"n": -' + b"9" * 30 + b"}"
    )


@survived("json")
def sends_integers_of_more_than_64_bits(surface: Surface) -> Iterator[bytes]:
    names = ("num_samples", "max_tokens", "max_completion_tokens", "seed", "priority", "n", "max_sessions", "top_k")
    yield from _bodies(surface, *(json.dumps({name: 2**70, "messages": []}).encode() for name in names))


@survived("json")
def sends_numbers_that_are_none(surface: Surface) -> Iterator[bytes]:
    yield from _bodies(surface, b'{"temperature": NaN}', b'{"timeout_seconds": Infinity}', b'{"priority": -Infinity}')


@survived("json")
def sends_half_characters(surface: Surface) -> Iterator[bytes]:
    lone = '{"instruction": "\\ud800", "task_id": "\\udfff", "model": "\\ud83d", "messages": ["\\ud800"]}'
    yield from _bodies(surface, lone.encode())


@survived("json")
def sends_what_is_no_text(surface: Surface) -> Iterator[bytes]:
    yield from _bodies(surface, b'{"instruction": "\xff\xfe"}', '{"a": 1}'.encode("utf-16"), b"\xef\xbb\xbf{}", b"\0")


@survived("json")
def sends_zero_bytes_in_names(surface: Surface) -> Iterator[bytes]:
    odd = {"task_id": "a\0b", "session_id": "a\0b", "node_id": "\0", "model": "\0", "instruction": "a\0b"}
    yield from _bodies(surface, json.dumps(odd).encode())


@survived("json")
def sends_the_same_key_twice(surface: Surface) -> Iterator[bytes]:
    yield from _bodies(surface, b'{"task_id": "a", "task_id": "../b", "model": "m", "model": 7}')


@survived("json")
def sends_names_of_a_languages_own(surface: Surface) -> Iterator[bytes]:
    names = {"__proto__": {"admin": True}, "constructor": {"prototype": {}}, "__class__": "x", "py/object": "os.system"}
    yield from _bodies(
        surface, json.dumps(names).encode(), json.dumps({"metadata": names, "messages": [names]}).encode()
    )


@survived("json")
def sends_values_of_other_kinds(surface: Surface) -> Iterator[bytes]:
    yield from _bodies(
        surface, *(value.encode() for value in ("null", "true", "7", '"x"', "[]", "[[[]]]", "{}", "", " "))
    )


@survived("json")
def sends_a_hundred_thousand_keys(surface: Surface) -> Iterator[bytes]:
    yield from _bodies(surface, json.dumps({f"k{number}": number for number in range(100_000)}).encode())


@survived("json")
def sends_bodies_that_unpack_without_end(surface: Surface) -> Iterator[bytes]:
    yield from _coded(surface, "gzip", _BOMB)
    yield from _coded(surface, "deflate", zlib.compress(b"x" * (64 << 20)))


@survived("json")
def sends_bodies_that_do_not_unpack(surface: Surface) -> Iterator[bytes]:
    for coding in ("gzip", "deflate", "br", "zstd", "gzip, gzip", "identity, gzip", "compress", "x" * 100):
        yield from _coded(surface, coding, b"\x1f\x8b\x08\x00 this is none")


@refused("token")
def names_things_by_paths(surface: Surface) -> Iterator[bytes]:
    """Ids that are none, wherever a path takes one."""
    for method, path in surface.closed:
        for name in ("%2e%2e", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "a%00b", "a%0d%0aX-Injected:%201", "a%2fb", "x" * 200):
            if "/named" in path:
                named = path.replace("/named", f"/{name}", 1)
                yield _request(surface, method, named, _bearer(surface), body=b"" if method == "GET" else b"{}")


# Model calls.

_CALL = json.dumps({
    "model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "u"}], "input": "u",
    "contents": [{"role": "user", "parts": [{"text": "u"}]}],
}).encode()  # fmt: skip


def _calls_with(*headers: str, query: str = "", other: bool = False) -> Requests:
    def requests(surface: Surface) -> Iterator[bytes]:
        for path in surface.other_calls if other else surface.calls:
            for header in headers or ("X-None: 1",):
                yield _request(
                    surface, "POST", f"{path}{query.format(key=surface.key)}",
                    header.format(key=surface.key, token=surface.token), body=_CALL,
                )  # fmt: skip

    return requests


_CALLS: dict[str, Requests] = {
    "calls_without_a_key": _calls_with(),
    "calls_with_a_wrong_key": _calls_with("Authorization: Bearer wrong", "X-Api-Key: wrong", "X-Goog-Api-Key: wrong"),
    "calls_with_an_empty_key": _calls_with("Authorization: Bearer ", "X-Api-Key:", "X-Goog-Api-Key:"),
    "calls_with_the_beginning_of_the_key": _calls_with("Authorization: Bearer {key:.8}", "X-Api-Key: {key:.8}"),
    "calls_with_the_control_token": _calls_with("Authorization: Bearer {token}"),
    "calls_of_another_session": _calls_with("Authorization: Bearer {key}", other=True),
    "calls_of_another_session_by_another_slot": _calls_with("X-Api-Key: {key}", "X-Goog-Api-Key: {key}", other=True),
    "calls_of_another_session_by_the_address": _calls_with(query="?key={key}", other=True),
}
for _name, _requests in _CALLS.items():
    ATTACKS.append(HttpAttack(_name, "proxy", "be refused", _requests))


@refused("proxy")
def calls_of_another_session_by_way_of_its_own(surface: Surface) -> Iterator[bytes]:
    for own, other in zip(surface.calls, surface.other_calls, strict=True):
        here, there = own.split("/")[2], other.split("/")[2]
        for way in (
            f"{here}/../{there}",
            f"{here}%2f..%2f{there}",
            f"{here}/..;/{there}",
            f"{there}%00{here}",
            f"{there}/",
        ):
            yield _request(
                surface, "POST", own.replace(here, way, 1), f"Authorization: Bearer {surface.key}", body=_CALL
            )


@refused("proxy")
def ends_and_grades_sessions_with_a_key(surface: Surface) -> Iterator[bytes]:
    """What its own key may say of its own session is a claim: see the guide of external sessions."""
    own, other = surface.calls[0].split("/")[2], surface.other_calls[0].split("/")[2]
    key = f"Authorization: Bearer {surface.key}"
    body = b'{"reward": 1000.0, "reward_info": {"reward": 1000.0}}'
    for path in (f"/s/{other}/complete", f"/sessions/{other}/complete", f"/v1/sessions/{other}/complete"):
        yield _request(surface, "POST", path, key, body=body)
    for session in (own, other):
        yield _request(surface, "POST", f"/v1/sessions/{session}/finalize", key, body=body)
        yield _request(surface, "DELETE", f"/v1/sessions/{session}", key)


@survived("proxy")
def calls_with_two_hundred_thousand_messages(surface: Surface) -> Iterator[bytes]:
    messages = [{"role": "user", "content": "u"}] * 200_000
    body = json.dumps({"model": "m", "max_tokens": 8, "messages": messages, "input": messages}).encode()
    for path in surface.calls:
        yield _request(surface, "POST", path, f"Authorization: Bearer {surface.key}", body=body)


@survived("proxy")
def calls_with_ten_thousand_tools(surface: Surface) -> Iterator[bytes]:
    tool = {"type": "function", "name": "f", "function": {"name": "f", "parameters": {}}, "input_schema": {}}
    body = json.dumps({**json.loads(_CALL), "tools": [tool] * 10_000}).encode()
    for path in surface.calls:
        yield _request(surface, "POST", path, f"Authorization: Bearer {surface.key}", body=body)


@survived("proxy")
def streams_and_goes_away(surface: Surface) -> Iterator[bytes]:
    body = json.dumps({**json.loads(_CALL), "stream": True}).encode()
    for path in surface.calls:
        for _ in range(4):
            yield _request(surface, "POST", path, f"Authorization: Bearer {surface.key}", body=body)
