"""Parts of a session for viewers, also while it runs: its outline, messages, tokens and files.

The parts of a large session are read by ranges of calls. Everything is available as JSON, and tokens also as columns of
numbers.
"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from aiohttp import web

from gangline.domain.errors import NotFound
from gangline.domain.tokens import encode_json, encode_msgpack
from gangline.server.access import refuse_foreign
from gangline.server.service.opened import OpenedSessions
from gangline.server.web.alignment import AlignedSamples
from gangline.server.web.columns import COLUMNS, encode_columns
from gangline.server.web.contents import CallContent, call_contents
from gangline.server.web.drift import CallDrift, call_drift
from gangline.server.web.outline import OpenedSession, SessionOutline
from gangline.server.web.tokens import token_columns
from gangline.wire.http.negotiation import JSON, MSGPACK, answer_large, path_id, prefers, prefers_msgpack
from gangline.wire.http.query import Flag, Name, Text, Whole
from gangline.wire.http.routes import Route

_MAX_CALLS = 256


class TokenColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of several calls as JSON. Returned as columns if `Accept` requests them (`gangline.server.web.tokens`)."""

    starts: list[int]
    """[calls + 1] where each call's tokens begin, and the end of the last call."""
    sampled: list[int]
    """[calls] where each call's sampled ids begin; new context precedes them."""
    ids: list[int]
    logprobs: list[float | None]
    """0.0 for context; null if not finite."""
    mask: list[int]
    """1 for trained tokens."""
    versions: list[int]
    """Policy version; -1 for context and if unknown."""
    text_ids: list[int]
    """The ids with known bytes."""
    text_starts: list[int]
    """[text_ids + 1] where each id's bytes begin in `text`."""
    text: list[int]
    """Bytes."""


class ViewRoutes:
    def __init__(self, sessions: OpenedSessions) -> None:
        self._sessions = sessions

    async def outline(self, request: web.Request) -> web.Response:
        session = await self._session(request)
        return await _answer(request, session.outline)

    async def calls(self, request: web.Request) -> web.Response:
        session = await self._session(request)
        first, limit, full = _FIRST.read(request), _LIMIT.read(request), _FULL.read(request)
        return await _answer(request, call_contents(session, first, limit, full=full))

    async def tokens(self, request: web.Request) -> web.Response:
        session = await self._session(request)
        first, limit = _FIRST.read(request), _LIMIT.read(request)
        known = await self._sessions.bytes_of_tokens(session.calls[first : first + limit])
        columns = partial(token_columns, session, first, limit, known)
        if prefers(request, COLUMNS):
            return await answer_large(request, COLUMNS, lambda: encode_columns(columns()))
        return await answer_large(request, JSON, lambda: encode_json(columns()))

    async def drift(self, request: web.Request) -> web.Response:
        session, number = await self._session(request), _CALL.read(request)
        if number >= len(session.calls):
            raise NotFound(
                f"session {session.outline.session_id} has no call {number}, but {len(session.calls)} calls."
            )
        known = await self._sessions.bytes_of_tokens((session.calls[number], *session.calls))
        return await _answer(request, await asyncio.to_thread(call_drift, session, number, known))

    async def aligned(self, request: web.Request) -> web.Response:
        first, limit = _FIRST_SAMPLE.read(request), _SAMPLES.read(request)
        return await _answer(request, await self._sessions.aligned(path_id(request, "task_id"), first, limit))

    async def beside(self, request: web.Request) -> web.Response:
        session_id, other = path_id(request, "session_id"), _OTHER.read(request)
        if not other:
            raise _OTHER.refused("must name a session")
        refuse_foreign(await self._sessions.tenant_of(other), f"session {other!r}")
        return await _answer(request, await self._sessions.beside(session_id, other))

    async def file(self, request: web.Request) -> web.Response:
        session = await self._session(request)
        name = _FILE.read(request)
        content = session.files.get(name)
        if content is None:
            listed = ", ".join(sorted(session.files))[:500] or "none"
            raise NotFound(f"session {session.outline.session_id} has no file {name[:100]!r}. Its files: {listed}.")
        response = await answer_large(request, "application/octet-stream", lambda: content)
        # The agent wrote it, so a browser must neither display it as a page nor run it.
        response.headers["Content-Disposition"] = "attachment"
        response.headers["Content-Security-Policy"] = "sandbox; default-src 'none'"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    async def _session(self, request: web.Request) -> OpenedSession:
        return await self._sessions.find(path_id(request, "session_id"), _ATTEMPT.read(request) or None)

    def routes(self) -> list[Route]:
        one, errors = "/v1/sessions/{session_id}", (400, 401, 404, 409, 503)
        return [
            Route("GET", f"{one}/outline", self.outline,
                  "A session down to its calls, without their content, also while it runs.",
                  answer=SessionOutline, query=(_ATTEMPT,), errors=errors),
            Route("GET", f"{one}/calls", self.calls, "Messages of some of its calls.", answer=list[CallContent],
                  query=(_FIRST, _LIMIT, _FULL, _ATTEMPT), errors=errors),
            Route("GET", f"{one}/tokens", self.tokens, "Tokens of some of its calls, as JSON or as columns.",
                  answer=TokenColumns, answer_types=(JSON, COLUMNS), query=(_FIRST, _LIMIT, _ATTEMPT), errors=errors),
            Route("GET", f"{one}/drift", self.drift, "How a call departs from the call that it continues from.",
                  answer=CallDrift, query=(_CALL, _ATTEMPT), errors=errors),
            Route("GET", "/v1/tasks/{task_id}/aligned", self.aligned, "Samples of a task from where they differ.",
                  answer=AlignedSamples, query=(_FIRST_SAMPLE, _SAMPLES), errors=(400, 401, 404)),
            Route("GET", f"{one}/beside", self.beside, "Two sessions from where they differ: a fork and its parent.",
                  answer=AlignedSamples, query=(_OTHER,), errors=errors),
            Route("GET", f"{one}/file", self.file, "One file that was kept with its result, byte for byte.",
                  answer_types=("application/octet-stream",), query=(_FILE, _ATTEMPT), errors=errors),
        ]  # fmt: skip


_ATTEMPT = Whole("attempt", "Number of an attempt; left out, the one that counted.", low=1, high=2**31 - 1)
_FIRST = Whole("first", "Number of the first call; 0 is the session's first.", high=2**31 - 1)
_CALL = Whole("call", "Number of the call; 0 is the session's first.", high=2**31 - 1)
_LIMIT = Whole("limit", "How many calls.", default=16, low=1, high=_MAX_CALLS)
_OTHER = Text("other", "The session to show alongside it.")
_FIRST_SAMPLE = Whole("first", "Index of the first sample.", high=2**31 - 1)
_SAMPLES = Whole("limit", "How many samples.", default=8, low=1, high=16)
_FULL = Flag("full", "1: long texts uncut.")
_FILE = Name("name", "Name of the file, as the outline lists it.")


async def _answer(request: web.Request, record: object) -> web.Response:
    if prefers_msgpack(request):
        return await answer_large(request, MSGPACK, lambda: encode_msgpack(record))
    return await answer_large(request, JSON, lambda: encode_json(record))
