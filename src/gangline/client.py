"""A client of the rollout server, for users, trainers and nodes.

    async with ServerClient("http://127.0.0.1:8700", token) as client:
        submitted = await client.submit(task)
        task = await client.wait(submitted.task_id)
        results = await client.result(submitted.task_id)

The server's errors come back as the classes of `gangline.domain.errors`, by their code; a server that does not answer
is `ServerUnavailable`, which is worth another try: every call may be sent again (a submit, when its task has an id).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from gangline.domain.errors import GanglineError, InvalidRequest, ServerUnavailable, StoreError
from gangline.domain.lifecycle import Outcome, SessionState, TaskState
from gangline.domain.session import Heartbeat, HeartbeatReply, Lease, SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.domain.views import (
    Event,
    ResultReceipt,
    ResultReference,
    ServiceStatus,
    SessionPage,
    SessionView,
    Submitted,
    TaskPage,
    TaskView,
)

__all__ = ["NodeClient", "ServerClient"]

T = TypeVar("T")

_MSGPACK = "application/msgpack"
_POLL_S = 60.0
_DRAIN_POLL_S = 30.0
_RETRY_S = 0.5


def _nobody(_error: GanglineError | None) -> None:
    return None


class _HttpClient:
    """Calls one server or node. Enter it before use.

    token: the control token, if there is one.
    timeout_s: for a call's answer, long polls excepted; results have ten times as long.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None

    def twin(self, *, timeout_s: float) -> Self:
        """The same server by the same token, over connections of its own; for another event loop."""
        return type(self)(self.url, self._token, timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        # No limit of connections: a long poll must not keep a heartbeat waiting.
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(headers=headers, connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    # How calls are made.

    async def _json(self, method: str, path: str, kind: type[T], **call: Any) -> T:
        data = await self._call(method, path, **call)
        with _readable(self.url):
            return msgspec.json.decode(data, type=kind)

    async def _msgpack(self, path: str, kind: type[T], params: Mapping[str, str] | None, *, method: str = "GET") -> T:
        data = await self._call(method, path, params=params, accept=_MSGPACK, wait_s=9 * self._timeout_s)
        with _readable(self.url):
            return await asyncio.to_thread(decode_msgpack, data, kind)

    async def _call(
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
        timeout = aiohttp.ClientTimeout(total=self._timeout_s + wait_s)
        try:
            async with self._open().request(
                method,
                self.url + path,
                data=None if body is None else BytesIO(body),
                params=params,
                headers=headers,
                timeout=timeout,
            ) as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unavailable(error) from error
        if response.status >= 400:
            raise _error_of(response.status, data, self.url)
        return data

    def _open(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RuntimeError("enter the client first: `async with ServerClient(...) as client:`")
        return self._http

    def _unavailable(self, error: Exception) -> ServerUnavailable:
        why = str(error) or type(error).__name__
        return ServerUnavailable(f"the server at {self.url} does not answer ({why}); is it running? `gangline up`.")


class _CallerSessions(_HttpClient):
    """Sessions of agents that Gangline does not run; a server hands them on to its nodes."""

    async def open_session(self, **request: Any) -> dict[str, Any]:
        """`session_id`, `api_key` and `base_urls`. Fields of `request`: docs/guides/external-sessions.md.

        Raises: InvalidRequest, Conflict when the id is taken, TooMany.
        """
        return await self._json("POST", "/v1/sessions", dict[str, Any], body=msgspec.json.encode(request))

    async def wait_session(self, session_id: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """The session once its agent is done, or after `timeout_s` (at most 300). Raises: NotFound."""
        params = {"timeout_s": f"{timeout_s:g}"}
        path = f"/v1/sessions/{session_id}/wait"
        return await self._json("GET", path, dict[str, Any], params=params, wait_s=timeout_s)

    async def finalize(self, session_id: str, *, completions: bool = False) -> SessionResult:
        """The same result every time. Raises: NotFound, Conflict when it was aborted."""
        params = {"completions": "1"} if completions else None
        return await self._msgpack(f"/v1/sessions/{session_id}/finalize", SessionResult, params, method="POST")

    async def abort_session(self, session_id: str) -> dict[str, Any]:
        """Raises: NotFound, Conflict when it was finalized."""
        return await self._json("POST", f"/v1/sessions/{session_id}/abort", dict[str, Any])


class ServerClient(_CallerSessions):
    """Calls the rollout server."""

    # The user's side.

    async def health(self) -> dict[str, Any]:
        return await self._json("GET", "/health", dict[str, Any])

    async def submit(self, task: TaskRequest | Mapping[str, Any]) -> Submitted:
        """Raises: InvalidRequest, UnknownPlugin, Conflict when the id is taken by another task."""
        return await self._json("POST", "/v1/tasks", Submitted, body=_task_json(task))

    async def submit_many(self, tasks: Sequence[TaskRequest | Mapping[str, Any]]) -> list[Submitted]:
        """All of them or none. Raises: as `submit`."""
        body = b"[" + b",".join(map(_task_json, tasks)) + b"]"
        return await self._json("POST", "/v1/tasks:batch", list[Submitted], body=body)

    async def task(self, task_id: str, wait_s: float = 0.0) -> TaskView:
        """The task now, or when it has ended, or after `wait_s`. Raises: NotFound."""
        params = {"wait_s": f"{wait_s:g}"} if wait_s > 0 else None
        return await self._json("GET", f"/v1/tasks/{task_id}", TaskView, params=params, wait_s=wait_s)

    async def wait(self, task_id: str, timeout_s: float | None = None) -> TaskView:
        """The task when it has ended, through restarts of the server and of its database.

        Raises: NotFound, TimeoutError after `timeout_s`.
        """
        async with asyncio.timeout(timeout_s):
            async for task in self.progress(task_id):
                if task.ended:
                    return task
        raise AssertionError("progress ends with the task")

    async def progress(
        self, task_id: str, *, poll_s: float = _POLL_S, patience_s: float | None = None
    ) -> AsyncGenerator[TaskView]:
        """The task each `poll_s`, and last when it has ended; through restarts of the server and of its database.

        Raises: NotFound; ServerUnavailable, StoreError when none answers for longer than `patience_s`.
        """
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        while True:
            try:
                task = await self.task(task_id, wait_s=poll_s)
            except (ServerUnavailable, StoreError):
                if patience_s is not None and loop.time() - heard_at > patience_s:
                    raise
                await asyncio.sleep(_RETRY_S)
                continue
            heard_at = loop.time()
            yield task
            if task.ended:
                return

    async def tasks(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        status: TaskState | None = None,
        submitter: str | None = None,
    ) -> TaskPage:
        """Newest first. before: the `next` of the page above."""
        params = _params(limit=limit, before=before, status=status, submitter=submitter)
        return await self._json("GET", "/v1/tasks", TaskPage, params=params)

    async def sessions(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        state: SessionState | None = None,
        outcome: Outcome | None = None,
        node_id: str | None = None,
        submitter: str | None = None,
    ) -> SessionPage:
        """Newest first. before: the `next` of the page above. node_id: that holds it, or that held it last."""
        params = _params(limit=limit, before=before, state=state, outcome=outcome, node_id=node_id, submitter=submitter)
        return await self._json("GET", "/v1/sessions", SessionPage, params=params)

    async def result(self, task_id: str, *, partial: bool = False) -> list[SessionResult]:
        """Results of the group by sample index; with `partial`, of the sessions that have ended.

        Raises: NotFound, Conflict when the task has not ended and `partial` is not asked for.
        """
        params = {"partial": "1"} if partial else None
        return await self._msgpack(f"/v1/tasks/{task_id}/result", list[SessionResult], params)

    async def references(self, task_id: str, *, partial: bool = False) -> list[ResultReference]:
        """Where the results lie, for who fetches large ones there. Raises: as `result`."""
        params = {"partial": "1"} if partial else None
        return await self._json("GET", f"/v1/tasks/{task_id}/references", list[ResultReference], params=params)

    async def session(self, session_id: str) -> SessionView:
        """Raises: NotFound."""
        return await self._json("GET", f"/v1/sessions/{session_id}", SessionView)

    async def session_result(self, session_id: str, attempt: int | None = None) -> SessionResult:
        """Raises: NotFound, Conflict when the session has not ended and no attempt is named."""
        params = None if attempt is None else {"attempt": str(attempt)}
        return await self._msgpack(f"/v1/sessions/{session_id}/result", SessionResult, params)

    async def cancel(self, task_id: str) -> TaskView:
        """End what has not ended of a task. Raises: NotFound."""
        return await self._json("DELETE", f"/v1/tasks/{task_id}", TaskView)

    async def cancel_session(self, session_id: str) -> SessionView:
        """Raises: NotFound."""
        return await self._json("DELETE", f"/v1/sessions/{session_id}", SessionView)

    async def status(self) -> ServiceStatus:
        return await self._json("GET", "/v1/status", ServiceStatus)

    async def events(
        self,
        *,
        after: int | None = None,
        task_id: str | None = None,
        retry_s: float = 1.0,
        on_connection: Callable[[GanglineError | None], None] = _nobody,
    ) -> AsyncGenerator[Event]:
        """Events as they happen, without end; lost connections are resumed where they broke.

        after: from after this event; 0 is from the beginning, None from now on.
        on_connection: told None when the server begins to answer, and why it does not.
        """
        params = {} if task_id is None else {"task_id": task_id}
        place = _Place(after)
        while True:
            try:
                async for event in self._event_stream(params, place, on_connection):
                    yield event
            except (ServerUnavailable, StoreError) as error:
                on_connection(error)
                await asyncio.sleep(retry_s)

    # The node's side.

    async def lease(
        self, node_id: str, *, url: str, max_sessions: int, wait_s: float = 0.0, identity: str = ""
    ) -> list[Lease]:
        """Up to `max_sessions` sessions: at once when some are queued, else when some come, else none.

        identity: see `Heartbeat`. Raises: NodeIdTaken.
        """
        body = msgspec.json.encode({"url": url, "max_sessions": max_sessions, "wait_s": wait_s, "identity": identity})
        return await self._json("POST", f"/v1/nodes/{node_id}/lease", list[Lease], body=body, wait_s=wait_s)

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Raises: NodeIdTaken."""
        path = f"/v1/nodes/{beat.node_id}/heartbeat"
        return await self._json("POST", path, HeartbeatReply, body=msgspec.json.encode(beat))

    async def release(self, node_id: str, *, session_id: str, fence: int) -> None:
        """Give a session back unharmed; its attempt is not spent. Raises: NotFound, LeaseLost."""
        body = msgspec.json.encode({"session_id": session_id, "fence": fence})
        await self._json("POST", f"/v1/nodes/{node_id}/release", dict[str, Any], body=body)

    async def post_result(self, result: SessionResult, data: bytes | None = None) -> ResultReceipt:
        """Report the end of an attempt; stored on return. Raises: NotFound, LeaseLost, DiskFull.

        data: the result's own MessagePack where the caller has it already.
        """
        body = await asyncio.to_thread(encode_msgpack, result) if data is None else data
        path = f"/v1/sessions/{result.session_id}/result"
        return await self._json(
            "POST", path, ResultReceipt, body=body, content_type=_MSGPACK, wait_s=9 * self._timeout_s
        )

    async def _event_stream(
        self, params: Mapping[str, str], place: _Place, on_connection: Callable[[GanglineError | None], None]
    ) -> AsyncGenerator[Event]:
        """One connection's events. Raises: ServerUnavailable when it broke or ended."""
        headers = {"Accept": "text/event-stream"}
        if place.last is not None:
            headers["Last-Event-ID"] = str(place.last)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s, sock_read=self._timeout_s)
        try:
            async with self._open().get(
                f"{self.url}/v1/events", params=params, headers=headers, timeout=timeout
            ) as response:
                if response.status >= 400:
                    raise _error_of(response.status, await response.read(), self.url)
                on_connection(None)
                async for line in response.content:
                    event = place.take(line)
                    if event is not None:
                        yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unavailable(error) from error
        raise ServerUnavailable(f"the server at {self.url} ended the event stream.")


class NodeClient(_CallerSessions):
    """Calls one node: sessions of your own agents, its engines, its gate.

    opened = await node.open_session(max_turns=20)
    run_my_agent(base_url=opened["base_urls"]["openai"], api_key=opened["api_key"])
    result = await node.finalize(opened["session_id"])
    """

    async def status(self) -> dict[str, Any]:
        return await self._json("GET", "/v1/status", dict[str, Any])

    async def drain(self) -> dict[str, Any]:
        """The node takes no more sessions, and ends with those that it has. Returns its status."""
        return await self._json("POST", "/v1/drain", dict[str, Any])

    async def session(self, session_id: str) -> dict[str, Any]:
        """Raises: NotFound."""
        return await self._json("GET", f"/v1/sessions/{session_id}", dict[str, Any])

    # The gate, and the engines behind it.

    async def gate(self) -> dict[str, Any]:
        return await self._json("GET", "/v1/gate", dict[str, Any])

    async def pause(self, mode: str = "drain", lease_s: float = 600.0) -> dict[str, Any]:
        """Let model calls wait; with `drain`, returns when none is in flight, or when the lease is over: see
        `is_drained`. Asks again every half minute, without renewing the lease. Raises: InvalidRequest.
        """
        ends_at = asyncio.get_running_loop().time() + lease_s
        while True:
            fields = {"mode": mode, "lease_s": lease_s, "wait_s": _DRAIN_POLL_S}
            state = await self._json(
                *("POST", "/v1/gate/pause", dict[str, Any]), body=msgspec.json.encode(fields), wait_s=_DRAIN_POLL_S
            )
            lease_s = ends_at - asyncio.get_running_loop().time()
            if mode != "drain" or state["is_drained"] or not state["is_paused"]:
                return state
            if lease_s <= 0:
                return await self.gate()

    async def resume(self) -> dict[str, Any]:
        return await self._json("POST", "/v1/gate/resume", dict[str, Any])

    async def hold(self, mode: str, lease_s: float, wait_s: float = 0.0) -> dict[str, Any]:
        """Close the gate, or renew the lease of a closed one. A drain is waited for `wait_s` at most."""
        body = msgspec.json.encode({"mode": mode, "lease_s": lease_s, "wait_s": wait_s})
        return await self._json("POST", "/v1/gate/pause", dict[str, Any], body=body, wait_s=wait_s)

    async def set_version(self, version: int, unknown: Sequence[str] = ()) -> dict[str, Any]:
        """Policy version of what is sampled from now on; `unknown`: URLs of engines that may have other weights.

        Raises: InvalidRequest when it would go back.
        """
        body = msgspec.json.encode({"version": version, "unknown": unknown})
        return await self._json("POST", "/v1/gate/version", dict[str, Any], body=body)

    async def backends(self) -> list[dict[str, Any]]:
        return await self._json("GET", "/v1/backends", list[dict[str, Any]])

    async def add_backend(
        self,
        url: str,
        *,
        kind: str = "auto",
        label: str | None = None,
        api_key_env: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """`api_key_env`: names the node's environment variable with the engine's key. `options`: of the plug-in.

        Raises: EngineUnavailable, EngineIncapable, InvalidRequest, Conflict when it serves another model than others.
        """
        named = {"url": url, "kind": kind, "label": label, "api_key_env": api_key_env}
        body = msgspec.json.encode(named | {"options": dict(options or {})})
        return await self._json("POST", "/v1/backends", dict[str, Any], body=body)

    async def remove_backend(self, backend_id: str, *, drain: bool = True) -> None:
        """Raises: NotFound."""
        params = {"drain": "1" if drain else "0"}
        await self._json("DELETE", f"/v1/backends/{backend_id}", dict[str, Any], params=params, wait_s=3600.0)

    async def clear_backends(self) -> None:
        await self._json("DELETE", "/v1/backends", dict[str, Any], wait_s=3600.0)


class _Place:
    """Where in the stream of events a client is. Reads server-sent events line by line."""

    def __init__(self, last: int | None) -> None:
        self.last = last

    def take(self, line: bytes) -> Event | None:
        """One line; the event that it completes. The place moves before the event is handed out."""
        name, _, value = line.rstrip(b"\r\n").partition(b": ")
        if name == b"data":
            event = msgspec.json.decode(value, type=Event)
            self.last = event.seq
            return event
        # An id alone moves the place (a stream begins with one); with data, the event carries it.
        if name == b"id" and self.last is None:
            self.last = int(value)
        return None


def _params(**wanted: object) -> dict[str, str]:
    return {name: str(value) for name, value in wanted.items() if value is not None}


def _task_json(task: TaskRequest | Mapping[str, Any]) -> bytes:
    if isinstance(task, TaskRequest):
        return task.model_dump_json(exclude_unset=True).encode()
    return msgspec.json.encode(task)


class _Problem(msgspec.Struct):
    detail: str = ""
    code: str = "internal_error"
    retryable: bool = False
    details: dict[str, str | int | float | None] = {}


def _error_classes(root: type[GanglineError] = GanglineError) -> Iterator[type[GanglineError]]:
    yield root
    for child in root.__subclasses__():
        yield from _error_classes(child)


def _error_of(status: int, data: bytes, url: str) -> GanglineError:
    """The error that the server raised, as one of ours: by its code, else by its status."""
    try:
        problem = msgspec.json.decode(data, type=_Problem)
    except msgspec.MsgspecError:
        text = data[:200].decode(errors="replace")
        kind = ServerUnavailable if status >= 500 else InvalidRequest
        return kind(f"{url} answered HTTP {status}, and not as a Gangline server would: {text}")
    known = {kind.code: kind for kind in _error_classes() if kind.__module__.startswith("gangline.")}
    kind = known.get(problem.code, InvalidRequest if status < 500 else ServerUnavailable)
    return kind(problem.detail, **problem.details)


@contextlib.contextmanager
def _readable(url: str) -> Generator[None]:
    try:
        yield
    except msgspec.MsgspecError as error:
        raise ServerUnavailable(f"the answer of {url} cannot be read ({error}); is it a Gangline server?") from error
