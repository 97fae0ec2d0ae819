"""Reads web pages as plain text from the node. Only public addresses, also after name resolution and redirects."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable, Collection
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from selectolax.lexbor import LexborHTMLParser
from yarl import URL

from gangline.agents.tools.contract import ToolFailed
from gangline.agents.tools.search.provider import Page
from gangline.domain.network import USUAL_PORTS, is_public, normal_host

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_MAX_REDIRECTS = 5
_MAX_BYTES = 4 << 20
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHARSET = re.compile(rb"charset=[\"']?([\w-]+)")
_SKIPPED = frozenset({"script", "style", "noscript", "template", "svg", "nav", "footer", "form", "iframe", "head"})
_BLOCKS = frozenset(
    {"address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figcaption", "figure", "header"}
    | {"h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "main", "ol", "p", "pre", "section", "table", "td", "th", "tr"}
    | {"ul"}
)


class PageReader:
    """Reads pages without the node's cookies, keys or proxies. Call `close` at the end."""

    def __init__(
        self,
        *,
        timeout_s: float = 30.0,
        may_dial: Callable[[_Address], bool] = is_public,
        ports: Collection[int] | None = USUAL_PORTS,
    ) -> None:
        """may_dial: whether an address may be contacted. ports: allowed ports of URLs; None: all."""
        self._may_dial = may_dial
        self._ports = ports
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=_GuardedResolver(may_dial), use_dns_cache=False),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "gangline", "Accept": "text/html, text/plain;q=0.9, */*;q=0.1"},
        )

    async def read(self, address: str) -> Page:
        """Raises: ToolFailed for a forbidden address or an unreadable page."""
        try:
            url = self._checked(address)
            for _ in range(_MAX_REDIRECTS + 1):
                async with self._http.get(url, allow_redirects=False) as answer:
                    if answer.status not in _REDIRECTS:
                        return await self._page(answer, url)
                    url = self._checked(answer.headers.get("Location", ""), url)
        except TimeoutError:
            raise ToolFailed(f"{address} gave no answer in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ToolFailed(f"{address} cannot be read: {error}") from None
        raise ToolFailed(f"{address} redirects more than {_MAX_REDIRECTS} times")

    async def close(self) -> None:
        await self._http.close()

    def _checked(self, text: str, base: URL | None = None) -> URL:
        """Checks a URL before connecting. Host names are judged by the addresses that they resolve to.

        Raises: ToolFailed, ValueError.
        """
        url = URL(text) if base is None else base.join(URL(text))
        if url.scheme not in ("http", "https") or not url.host:
            raise ToolFailed(f"{text} is not an address of a web page: it must begin with http:// or https://")
        if self._ports is not None and url.port not in self._ports:
            raise ToolFailed(f"{text} names its own port, which is not read")
        # Refuses numbers that only some resolvers accept as addresses, such as 2130706433.
        if (literal := _literal(normal_host(url.raw_host or ""))) is not None and not self._may_dial(literal):
            raise ToolFailed(f"{text} is not on the public internet")
        return url.with_user(None).with_fragment(None)

    async def _page(self, answer: aiohttp.ClientResponse, url: URL) -> Page:
        if answer.status != 200:
            raise ToolFailed(f"{url} answered with status {answer.status}")
        kind = answer.content_type
        if not (kind.startswith("text/") or kind.endswith(("json", "xml", "xhtml+xml"))):
            raise ToolFailed(f"{url} is {kind}, not text")
        data = bytearray()
        async for piece in answer.content.iter_chunked(1 << 16):
            data += piece
            if len(data) > _MAX_BYTES:
                break
        text = _decoded(bytes(data[:_MAX_BYTES]), answer.charset)
        if "html" not in kind:
            return Page(str(url), str(url), text)
        title, body = await asyncio.to_thread(text_of_html, text)
        return Page(title or str(url), str(url), body)


class _GuardedResolver(AbstractResolver):
    """Resolves names and keeps only the addresses that may be contacted."""

    def __init__(self, may_dial: Callable[[_Address], bool]) -> None:
        self._may_dial = may_dial

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
        taken = [
            ResolveResult(
                hostname=host, host=str(place[0]), port=port, family=kind, proto=proto, flags=socket.AI_NUMERICHOST
            )
            for kind, _, proto, _, place in found
            if (address := _literal(str(place[0]))) is not None and self._may_dial(address)
        ]
        if not taken:
            raise OSError(f"{host} is not on the public internet")
        return taken

    async def close(self) -> None: ...


def _literal(host: str) -> _Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _decoded(data: bytes, charset: str | None) -> str:
    if charset is None and (named := _CHARSET.search(data[:2048])) is not None:
        charset = named[1].decode()
    try:
        return data.decode(charset or "utf-8", errors="replace")
    except LookupError:
        return data.decode(errors="replace")


def text_of_html(html: str) -> tuple[str, str]:
    """Title, and the text without scripts, styles and navigation; each block starts on a new line."""
    tree = LexborHTMLParser(html)
    title = tree.css_first("title")
    pieces: list[str] = []
    waiting: list[Any] = [tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, str):
            pieces.append(node)
        elif node is not None and node.tag == "-text":
            pieces.append(re.sub(r"\s+", " ", node.text(deep=False)))
        elif node is not None and node.tag not in _SKIPPED:
            around = ["\n"] if node.tag in _BLOCKS else []
            waiting += [*around, *reversed(list(node.iter(include_text=True))), *around]
    lines = (line.strip() for line in "".join(pieces).split("\n"))
    return (title.text().strip() if title is not None else ""), "\n".join(line for line in lines if line)
