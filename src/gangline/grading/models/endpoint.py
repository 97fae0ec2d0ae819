"""Calls from graders to a model. They do not pass the node's proxy, so they are not recorded as the session's.

A call without a usable answer raises GraderUnavailable: a failure of the evaluator, never a reward.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import msgspec
from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from gangline.domain.contracts import EvaluationContext, GraderEngine
from gangline.domain.errors import GraderUnavailable, InvalidRequest
from gangline.settings.machine import read_secret

_MAX_ANSWER_BYTES = 4 << 20
_MAX_SHOWN_CHARS = 300
_BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses after which a call is retried."""
_LONGEST_PAUSE_S = 30.0


class EngineConfig(BaseModel):
    """A model defined in the task."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    url: str = Field(pattern=r"^https?://[^\s\x00]+$")
    """Base URL, with or without `/v1`, called by the node."""
    model: str | None = None
    prompt_price: float = Field(default=0.0, ge=0)
    """Price per million prompt tokens, in any currency."""
    completion_price: float = Field(default=0.0, ge=0)
    """Price per million completion tokens."""

    @model_validator(mode="wrap")
    @classmethod
    def _names_no_variable(cls, given: Any, handler: ModelWrapValidatorHandler[EngineConfig]) -> EngineConfig:
        if isinstance(given, dict) and "key_env" in given:
            raise ValueError(
                "a task may not name a variable of the node's environment: its value would go to the task's URL. Name "
                "the engine with its key in the node's `grader_engines`, and here only by that name."
            )
        return handler(given)


class EngineUser(BaseModel):
    """Fields of evaluators that call a model."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    engine: str | EngineConfig
    """The model: a name from the node's `grader_engines`, a URL with its model, or `policy`, the engine that serves the
    agents.
    """
    call_timeout_seconds: float = Field(default=120, gt=0)
    """Timeout of one attempt of a call."""
    tries: int = Field(default=3, ge=1, le=10)
    """Attempts per call. Each waits longer than the previous one, or as long as `Retry-After` requires."""


def engine_of(context: EvaluationContext, named: str | EngineConfig) -> GraderEngine:
    """Raises: GraderUnavailable if the node has no such engine."""
    if isinstance(named, EngineConfig):
        return GraderEngine(**named.model_dump())
    if named not in context.engines:
        known = ", ".join(sorted(context.engines)) or "none"
        raise GraderUnavailable(
            f"this node has no grader engine {named!r}; known: {known}. Add it to the node's `grader_engines`."
        )
    return context.engines[named]


class Endpoint:
    """Client of one engine for graders."""

    def __init__(self, engine: GraderEngine, *, tries: int, timeout_s: float, pause_s: float = 0.5) -> None:
        """timeout_s: for one attempt. pause_s: before the second attempt; doubles for each further one."""
        self.engine = engine
        self._url = engine.url.rstrip("/")
        self._tries = tries
        self._timeout_s = timeout_s
        self._pause_s = pause_s

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer. path: appended to the base URL. Raises: GraderUnavailable."""
        base = self._url.removesuffix("/v1") if path.startswith("/v1/") else self._url
        headers = {"Content-Type": "application/json"}
        if self.engine.key_env is not None:
            try:
                headers["Authorization"] = f"Bearer {read_secret(self.engine.key_env)}"
            except InvalidRequest as error:
                raise GraderUnavailable(f"the key of the grader's engine: {error.message}") from error
        why = ""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            for number in range(self._tries):
                pause_s = self._pause_s * 2**number * random.uniform(0.5, 1.0)
                try:
                    data = msgspec.json.encode(body)
                    async with session.post(base + path, data=data, allow_redirects=False) as answer:
                        return await _read(answer)
                except _Again as error:
                    why, pause_s = str(error), max(pause_s, error.after_s)
                except TimeoutError:
                    why = f"it gave no answer within {self._timeout_s:g} s"
                except aiohttp.ClientError as error:
                    why = f"{type(error).__name__}: {error}"
                if number + 1 < self._tries:
                    await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))
        raise GraderUnavailable(f"the grader's engine at {base}{path} failed {self._tries} times; the last time: {why}")


class _Again(Exception):
    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


async def _read(answer: aiohttp.ClientResponse) -> Any:
    data = bytearray()
    async for piece in answer.content.iter_chunked(1 << 16):
        data += piece
        if len(data) > _MAX_ANSWER_BYTES:
            raise GraderUnavailable(f"the grader's engine answered more than {_MAX_ANSWER_BYTES} bytes")
    shown = data[:_MAX_SHOWN_CHARS].decode(errors="replace")
    if answer.status in _BUSY:
        after = answer.headers.get("Retry-After", "")
        raise _Again(f"status {answer.status}: {shown}", float(after) if after.isdigit() else 0.0)
    if answer.status != 200:
        raise GraderUnavailable(f"the grader's engine refused the call with status {answer.status}: {shown}")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _Again(f"its answer is not JSON: {shown}") from None
