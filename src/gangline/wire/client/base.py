"""HTTP for all clients: one connection pool, the control token, and errors by their codes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Mapping
from io import BytesIO
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from gangline.domain.errors import GanglineError, InvalidRequest, ServerUnavailable, errors_by_code
from gangline.domain.tokens import decode_msgpack

T = TypeVar("T")

MSGPACK = "application/msgpack"
GRADING_WAIT_S = 86_400.0
"""Seconds that a grading may take. Once it has a place on its node, its own budgets end it earlier."""


class HttpClient:
    """Calls one server or node. Enter it before use.

    token: the control token, if any.
    timeout_s: for an answer, except long polls; results may take ten times as long.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self.timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None

    def twin(self, *, timeout_s: float) -> Self:
        """A client of the same server with the same token but its own connections, for another event loop."""
        return type(self)(self.url, self._token, timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        # No connection limit: a long poll must not delay a heartbeat.
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(headers=headers, connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    # Requests.

    async def request_json(self, method: str, path: str, kind: type[T], **call: Any) -> T:
        data = await self.request(method, path, **call)
        with _readable(self.url):
            return msgspec.json.decode(data, type=kind)

    async def request_msgpack(
        self, path: str, kind: type[T], params: Mapping[str, str] | None, *, method: str = "GET"
    ) -> T:
        data = await self.request(method, path, params=params, accept=MSGPACK, wait_s=9 * self.timeout_s)
        with _readable(self.url):
            return await asyncio.to_thread(decode_msgpack, data, kind)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        wait_s: float = 0.0,
    ) -> bytes:
        """The body of a 2xx answer. Raises: the server's error, ServerUnavailable."""
        headers = {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = content_type
        timeout = aiohttp.ClientTimeout(total=self.timeout_s + wait_s)
        try:
            async with self.opened().request(
                method,
                self.url + path,
                data=None if body is None else BytesIO(body),
                params=params,
                headers=headers,
                timeout=timeout,
            ) as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.unavailable(error) from error
        if response.status >= 400:
            raise error_of(response.status, data, self.url)
        return data

    def opened(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RuntimeError("enter the client first: `async with ServerClient(...) as client:`")
        return self._http

    def unavailable(self, error: Exception) -> ServerUnavailable:
        why = str(error) or type(error).__name__
        return ServerUnavailable(f"the server at {self.url} does not answer ({why}); is it running? `gangline up`.")


class _Problem(msgspec.Struct):
    detail: str = ""
    code: str = "internal_error"
    retryable: bool = False
    details: dict[str, str | int | float | None] = {}


def error_of(status: int, data: bytes, url: str) -> GanglineError:
    """The server's error as one of our classes: by its code, else by its status."""
    try:
        problem = msgspec.json.decode(data, type=_Problem)
    except msgspec.MsgspecError:
        text = data[:200].decode(errors="replace")
        kind = ServerUnavailable if status >= 500 else InvalidRequest
        return kind(f"{url} answered HTTP {status}, and not as a Gangline server would: {text}")
    known = {code: kind for code, kind in errors_by_code().items() if kind.__module__.startswith("gangline.")}
    kind = known.get(problem.code, InvalidRequest if status < 500 else ServerUnavailable)
    return kind(problem.detail, **problem.details)


@contextlib.contextmanager
def _readable(url: str) -> Generator[None]:
    try:
        yield
    except msgspec.MsgspecError as error:
        raise ServerUnavailable(f"the answer of {url} cannot be read ({error}); is it a Gangline server?") from error
