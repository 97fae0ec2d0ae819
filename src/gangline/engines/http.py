"""What all engine clients share: one pool of HTTP connections, and how an engine's refusals are named."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec

from gangline.domain.errors import ContextOverflow, EngineError, EngineRefused, EngineUnavailable
from gangline.engines.chat_replies import ModelCard, ModelList, decode
from gangline.engines.http_client import HttpAnswer, HttpBroken, HttpClient

__all__ = ["EngineHttp"]

_OVERFLOW = re.compile(
    # vLLM, old and new; the engines that Gangline starts
    r"maximum context length"
    r"|maximum model length"
    r"|max_model_len"
    # SGLang
    r"|longer than the model'?s context length"
    r"|exceeds the maximum allowed length"
    r"|exceeds the context length"
    # llama.cpp and providers
    r"|exceeds the available context size"
    r"|prompt is too long",
    re.IGNORECASE,
)


class EngineHttp:
    """One engine at `url` (without `/v1`)."""

    def __init__(
        self, url: str, *, timeout_s: float = 1800.0, connect_timeout_s: float = 10.0, api_key: str | None = None
    ) -> None:
        """timeout_s: longest silence of the engine within one call."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        self._headers = {"Accept": "*/*"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._client: HttpClient | None = None

    async def get(self, path: str) -> bytes:
        async with self.request("GET", path, None) as answer:
            return await answer.read()

    async def post(self, path: str, body: bytes) -> bytes:
        async with self.request("POST", path, body) as answer:
            return await answer.read()

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes | None) -> AsyncGenerator[HttpAnswer]:
        """Raises: EngineUnavailable when nobody answers or the line breaks; what `refusal` says for a status."""
        client = self._opened()
        try:
            async with client.request(method, path, body) as answer:
                if answer.status >= 300:
                    raise self.refusal(answer.status, await answer.read())
                yield answer
        except (OSError, HttpBroken) as error:
            why = str(error) or type(error).__name__
            raise EngineUnavailable(f"engine {self.url} did not answer {method} {path}: {why}") from error

    def _opened(self) -> HttpClient:
        """Raises: EngineUnavailable when the URL is none."""
        if self._client is None:
            times: dict[str, float] = {"timeout_s": self._timeout_s, "connect_timeout_s": self._connect_timeout_s}
            try:
                self._client = HttpClient(self.url, headers=self._headers, **times)
            except ValueError as error:
                raise EngineUnavailable(f"engine {self.url} cannot be asked: {error}") from error
        return self._client

    async def check_health(self, timeout_s: float) -> None:
        """Raises: EngineUnavailable when the engine is down, or does not answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    await self.get("/health")
                except EngineRefused:
                    # Not every server has the route; all of them list their models.
                    await self.get("/v1/models")
        except EngineRefused as refused:
            raise EngineUnavailable(refused.message) from refused
        except TimeoutError as late:
            raise EngineUnavailable(f"engine {self.url} did not answer a health check in {timeout_s:g} s") from late

    async def served_model(self, wanted: str | None) -> ModelCard:
        """What the engine says of the model `wanted`, or of the first that it lists.

        Raises: EngineRefused when the engine does not serve it.
        """
        cards = decode(await self.get("/v1/models"), ModelList, self.url).data
        found = [card for card in cards if wanted in (None, card.id)]
        if not found:
            known = ", ".join(card.id for card in cards) or "none"
            raise EngineRefused(f"engine {self.url} does not serve {wanted!r}; it serves: {known}.", status=404)
        return found[0]

    def refusal(self, status: int, body: bytes) -> EngineError:
        """The error behind a body that is no reply."""
        message, code = _error_fields(body)
        text = f"engine {self.url} answered {status}: {message}"
        if code == "context_length_exceeded" or _OVERFLOW.search(message):
            return ContextOverflow(message)
        if status >= 500 or status in (408, 425, 429):
            return EngineUnavailable(text, status=status)
        return EngineRefused(text, status=status)

    async def close(self) -> None:
        """Calls that are still open fail as EngineUnavailable."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()


def _error_fields(body: bytes) -> tuple[str, str]:
    """(message, code) of an error body in OpenAI's shape, vLLM's older flat one, or none."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return body[:500].decode("utf-8", "replace"), ""
    inner: object = fields.get("error")
    if isinstance(inner, dict):
        fields = cast("dict[str, Any]", inner)
    elif isinstance(inner, str):
        return inner, ""
    return str(fields.get("message") or fields.get("detail") or body[:500].decode("utf-8", "replace")), str(
        fields.get("code") or ""
    )
