"""Web search providers over HTTP: Tavily, Brave, SearXNG.

A provider is a table of functions: the request for a query, and the hits in an answer. Its key is sent only to its own
base URL, and redirects are not followed.

Source: docs.tavily.com (POST /search), api-dashboard.search.brave.com (GET /res/v1/web/search), docs.searxng.org
(GET /search, format=json).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from gangline.agents.tools.contract import ToolFailed
from gangline.agents.tools.search.provider import Hit, Page
from gangline.domain.errors import ToolUnavailable
from gangline.domain.search_source import SearchSource
from gangline.settings.machine import read_secret

if TYPE_CHECKING:  # it needs the extra `search`
    from gangline.agents.tools.search.pages import PageReader

_TRIES = 4
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_MAX_ANSWER_BYTES = 4 << 20
_MAX_SHOWN_CHARS = 300
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which a request is retried."""
_QUERYS_FAULT = frozenset({400, 414, 422})


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str
    headers: Mapping[str, str] = {}
    params: Mapping[str, str] = {}
    body: Mapping[str, Any] | None = None


class _Kind(msgspec.Struct, frozen=True):
    """Description of one provider's API."""

    url: str
    """Base URL; empty: each instance has its own."""
    key_env: str | None
    max_query_chars: int
    request: Callable[[str, int, str], _Request]
    """Called with a query, a number of results, and the key."""
    results: Callable[[Any], list[Any]]
    excerpt: str
    """Name of a result's excerpt field; `title` and `url` are fixed."""


def _tavily(query: str, max_results: int, key: str) -> _Request:
    body = {"query": query, "max_results": min(max_results, 20), "search_depth": "basic"}
    return _Request(method="POST", path="/search", headers={"Authorization": f"Bearer {key}"}, body=body)


def _brave(query: str, max_results: int, key: str) -> _Request:
    headers = {"X-Subscription-Token": key, "Accept": "application/json"}
    params = {"q": query, "count": str(min(max_results, 20)), "text_decorations": "false"}
    return _Request(method="GET", path="/web/search", headers=headers, params=params)


def _searxng(query: str, max_results: int, key: str) -> _Request:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return _Request(method="GET", path="/search", headers=headers, params={"q": query, "format": "json"})


_KINDS = {
    "tavily": _Kind("https://api.tavily.com", "TAVILY_API_KEY", 400, _tavily, lambda a: a["results"], "content"),
    "brave": _Kind(
        "https://api.search.brave.com/res/v1",
        "BRAVE_API_KEY",
        400,
        _brave,
        lambda a: a.get("web", {}).get("results", []),
        "description",
    ),
    "searxng": _Kind("", None, 2000, _searxng, lambda a: a["results"], "content"),
}


class WebProvider:
    """One provider. Call `close` at the end."""

    def __init__(self, source: SearchSource, *, timeout_s: float = 30.0, pages: PageReader | None = None) -> None:
        """timeout_s: for one attempt.
        pages: reads web pages; None: this source cannot.

        Raises: InvalidRequest if the key's variable is not set.
        """
        self._kind = _KINDS[source.kind]
        self._url = (source.url or self._kind.url).rstrip("/")
        name = source.key_env or self._kind.key_env
        self._key = "" if name is None else read_secret(name)
        self._name = source.kind
        self._pages = pages
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout_s), cookie_jar=aiohttp.DummyCookieJar()
        )

    async def search(self, query: str, max_results: int) -> Sequence[Hit]:
        words = " ".join(query.encode(errors="replace").decode().split())
        if not 0 < len(words) <= self._kind.max_query_chars:
            raise ToolFailed(f"a query has 1 to {self._kind.max_query_chars} characters; this one has {len(words)}")
        answer = await self._asked(self._kind.request(words, max_results, self._key))
        try:
            results = [msgspec.convert(each, dict[str, Any]) for each in self._kind.results(answer)]
        except (msgspec.ValidationError, KeyError, TypeError, AttributeError):
            shown = str(answer)[:_MAX_SHOWN_CHARS]
            raise ToolUnavailable(f"{self._name} answered in an unknown form: {shown}") from None
        hits = [
            Hit(str(each.get("title") or ""), str(each.get("url") or ""), str(each.get(self._kind.excerpt) or ""))
            for each in results
        ]
        return [hit for hit in hits if hit.address][:max_results]

    async def page(self, address: str) -> Page:
        if self._pages is None:
            raise ToolFailed("pages cannot be read here: work with the excerpts that a search returns")
        return await self._pages.read(address)

    async def close(self) -> None:
        await self._http.close()
        if self._pages is not None:
            await self._pages.close()

    async def _asked(self, request: _Request) -> Any:
        """The JSON answer. Raises: ToolFailed for a rejected query; ToolUnavailable."""
        why = ""
        for number in range(_TRIES):
            pause_s = _FIRST_PAUSE_S * 2**number * random.uniform(0.5, 1.0)
            try:
                async with self._http.request(
                    request.method,
                    self._url + request.path,
                    headers=request.headers,
                    params=request.params,
                    json=request.body,
                    allow_redirects=False,
                ) as answer:
                    return await self._read(answer)
            except _Again as error:
                why, pause_s = str(error), max(pause_s, error.after_s)
            except TimeoutError:
                why = "it gave no answer in time"
            except aiohttp.ClientError as error:
                why = f"{type(error).__name__}: {error}"
            if number + 1 < _TRIES:
                await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))
        raise ToolUnavailable(f"{self._name} failed {_TRIES} times; the last time: {why}")

    async def _read(self, answer: aiohttp.ClientResponse) -> Any:
        data = bytearray()
        async for piece in answer.content.iter_chunked(1 << 16):
            data += piece
            if len(data) > _MAX_ANSWER_BYTES:
                raise ToolUnavailable(f"{self._name} answered more than {_MAX_ANSWER_BYTES} bytes")
        shown = data[:_MAX_SHOWN_CHARS].decode(errors="replace")
        if answer.status in _BUSY:
            raise _Again(f"status {answer.status}: {shown}", _after_s(answer.headers))
        if answer.status in _QUERYS_FAULT:
            raise ToolFailed(f"the search was refused: {shown}")
        if answer.status != 200:
            raise ToolUnavailable(f"{self._name} refused the request with status {answer.status}: {shown}")
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _Again(f"its answer is not JSON: {shown}") from None


class _Again(Exception):
    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


def _after_s(headers: Mapping[str, str]) -> float:
    """Seconds to wait, from the provider's headers. Brave gives values for a second and a month; the first one
    applies.
    """
    after = headers.get("Retry-After") or headers.get("X-RateLimit-Reset", "").partition(",")[0].strip()
    return float(after) if after.isascii() and after.isdecimal() else 0.0
