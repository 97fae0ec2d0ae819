"""Starts a server that an environment needs, as a separate process, and sends requests to it."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import HTTPCookieProcessor, ProxyHandler, Request, build_opener

_POLL_S = 0.1
_END_S = 5.0
_NOT_YET = (502, 503, 504)
"""Statuses of a gateway whose server is not up yet."""


class Answer(NamedTuple):
    status: int
    text: str


class Http:
    """An HTTP client that keeps the server's cookies and uses no proxy.

    patience_s: limit for the server's start, and for each answer.
    """

    def __init__(self, url: str, patience_s: float) -> None:
        self._url = url.rstrip("/")
        self._patience_s = patience_s
        self._opener = build_opener(ProxyHandler({}), HTTPCookieProcessor())

    def ask(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """GET, or POST with a JSON body. Raises: URLError, HTTPException, TimeoutError."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data, {"Content-Type": "application/json", **(headers or {})})
        try:
            with self._opener.open(request, timeout=self._patience_s) as answer:
                return Answer(answer.status, answer.read().decode())
        except HTTPError as error:
            return Answer(error.code, error.read().decode(errors="replace"))

    def ask_first(self, path: str, body: Any = None) -> Any:
        """Retries until the server is up, then returns its JSON. Raises: URLError, RuntimeError if it refuses the
        request.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            is_late = time.monotonic() > deadline
            try:
                answer = self.ask(path, body)
                if answer.status not in _NOT_YET or is_late:
                    return read(path, answer)
            except (URLError, HTTPException, TimeoutError):
                if is_late:
                    raise
            time.sleep(_POLL_S)


def read(path: str, answer: Answer) -> Any:
    """The answer's JSON. Raises: RuntimeError for an error status."""
    if answer.status >= 400:
        raise RuntimeError(f"{path} was answered with {answer.status}: {answer.text[:2000]}")
    return json.loads(answer.text)


def start(command: list[str]) -> None:
    """Raises: OSError."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr)

    def end() -> None:
        server.terminate()
        try:
            server.wait(_END_S)
        except subprocess.TimeoutExpired:
            server.kill()

    atexit.register(end)
