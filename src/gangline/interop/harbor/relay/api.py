"""Reads a Harbor server's records of rollouts: which have ended, and how Harbor graded them.

Source: Harbor 0.26.0, `server/app.py` and `server/models.py`; its `models/trial/result.py`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import aiohttp
import msgspec

from gangline.domain.errors import GanglineError, InvalidRequest, NotFound, ServerUnavailable
from gangline.interop.harbor.relay.protocol import API_VERSION

T = TypeVar("T")

_TIMEOUT_S = 60.0
_PAGE = 100
"""Most rollouts that Harbor gives at once."""

ENDED = ("finished", "cancelled")
"""States in which a rollout does not change any more."""


class TaskName(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    digest: str = ""
    source: str | None = None


class AgentName(msgspec.Struct, frozen=True, kw_only=True):
    name: str | None = None
    version: str | None = None


class ModelName(msgspec.Struct, frozen=True, kw_only=True):
    name: str | None = None
    provider: str | None = None
    reasoning_effort: str | None = None


class HarborRollout(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a task."""

    id: str
    job_id: str
    name: str
    state: str
    retry_ids: tuple[str, ...]
    """All attempts at the same sample, the newest first; this one is among them."""
    task: TaskName
    agent: AgentName
    model: ModelName
    rewards: dict[str, float | None] | None = None
    """Harbor's rewards by name; None, or None each, where they are not valid."""
    error_type: str | None = None
    lock: dict[str, Any] = {}
    """Everything that the attempt was made of: equal for samples of one group. Only if it was asked for alone."""
    result: dict[str, Any] | None = None
    """Harbor's own result. Only if it was asked for alone."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_superseded(self) -> bool:
        """Whether a later attempt stands for the sample."""
        return self.retry_ids[:1] != (self.id,)

    @property
    def error_message(self) -> str:
        info: Any = (self.result or {}).get("exception_info") or {}
        return str(info.get("exception_message", ""))


class _RolloutAnswer(msgspec.Struct):
    rollout: HarborRollout


class _RolloutPage(msgspec.Struct):
    items: list[HarborRollout]
    next_page_token: str = ""


class _HarborProblem(msgspec.Struct):
    detail: str = ""


class HarborApi:
    """Calls one Harbor server.

    http: has its key in its headers; closed by its owner. Raises (all methods): ServerUnavailable, NotFound,
    InvalidRequest.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url.rstrip("/")

    async def rollout(self, rollout_id: str) -> HarborRollout:
        """With its lock and its result."""
        return (await self._read(f"/rollouts/{rollout_id}", {}, _RolloutAnswer)).rollout

    async def rollouts(self, job_id: str) -> list[HarborRollout]:
        """Every attempt of a job, without locks and results."""
        found: list[HarborRollout] = []
        params = {"job_ids": job_id, "page_size": str(_PAGE)}
        while True:
            page = await self._read("/rollouts", params, _RolloutPage)
            found += page.items
            if not page.next_page_token:
                return found
            params["page_token"] = page.next_page_token

    async def _read(self, path: str, params: dict[str, str], kind: type[T]) -> T:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with self._http.get(self._url + path, params=params, timeout=timeout) as reply:
                data, status = await reply.read(), reply.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise unavailable(error, self._url) from error
        if status >= 400:
            raise refusal(status, _detail(data), self._url)
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"{self._url}{path} answers otherwise than Harbor 0.26 does: {error}.") from error


def unavailable(error: Exception, url: str) -> ServerUnavailable:
    why = str(error) or type(error).__name__
    return ServerUnavailable(f"Harbor at {url} does not answer ({why}); is `harbor serve` running?")


def refusal(status: int, detail: str, url: str) -> GanglineError:
    """The error for a status with which a Harbor server refuses. detail: its own words, if any."""
    said = f": {detail}" if detail else ""
    if status == 401:
        return InvalidRequest(f"Harbor at {url} refuses the key{said}. Set HARBOR_API_KEY to that of `harbor serve`.")
    if status == 403:
        return InvalidRequest(
            f"Harbor at {url} refuses the connection{said}. It relays no calls: start it with `harbor serve "
            "--relay-url URL`, where URL is how its sandboxes reach it, and with HARBOR_API_KEY."
        )
    if status == 404:
        return NotFound(f"Harbor at {url} knows nothing there{said}. Is it `harbor serve`, 0.26 or newer?")
    if status >= 500 or status == 429:
        return ServerUnavailable(f"Harbor at {url} answered HTTP {status}{said}.")
    return InvalidRequest(
        f"Harbor at {url} answered HTTP {status}{said}. This connector speaks its API of {API_VERSION}, Harbor 0.26."
    )


def _detail(data: bytes) -> str:
    try:
        return msgspec.json.decode(data, type=_HarborProblem).detail
    except msgspec.MsgspecError:
        return data[:200].decode(errors="replace")
