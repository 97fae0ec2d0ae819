"""The client of the rollout server, for users, trainers and nodes.

    async with ServerClient("http://127.0.0.1:8700", token) as client:
        submitted = await client.submit(task)
        task = await client.wait(submitted.task_id)
        results = await client.result(submitted.task_id)

The server's errors are raised as the classes of `gangline.domain.errors`, by their code. If the server does not answer,
`ServerUnavailable` is raised and the call may be repeated (a submit only if its task has an id).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from gangline.domain.errors import GanglineError, ServerUnavailable, StoreError
from gangline.domain.lifecycle import Outcome, SessionState, TaskState
from gangline.domain.session import Grading, Heartbeat, HeartbeatReply, KeptTurns, Lease, SessionResult, Turns
from gangline.domain.task import EvaluatorSpec, SamplingPolicy, TaskRequest
from gangline.domain.tenancy import NewToken, TenantList, TenantView, TokenList, TokenView, UsageRow
from gangline.domain.tokens import encode_msgpack
from gangline.domain.views import (
    Annotation,
    AnnotationPage,
    Event,
    ForkTree,
    PageLink,
    ResultReceipt,
    ResultReference,
    ServiceStatus,
    SessionPage,
    SessionView,
    Submitted,
    TaskPage,
    TaskView,
    TurnsReceipt,
    Verdict,
)
from gangline.wire.client.base import GRADING_WAIT_S, MSGPACK, error_of
from gangline.wire.client.sessions import CallerSessions

_POLL_S = 60.0
_RETRY_S = 0.5


def _nobody(_error: GanglineError | None) -> None:
    return None


class ServerClient(CallerSessions):
    """Calls the rollout server.

    Long because it has every route of a user and a node.
    """

    # Calls for users.

    async def health(self) -> dict[str, Any]:
        return await self.request_json("GET", "/health", dict[str, Any])

    async def submit(self, task: TaskRequest | Mapping[str, Any]) -> Submitted:
        """Raises: InvalidRequest, UnknownPlugin, Conflict if another task has the id."""
        return await self.request_json("POST", "/v1/tasks", Submitted, body=_task_json(task))

    async def submit_many(self, tasks: Sequence[TaskRequest | Mapping[str, Any]]) -> list[Submitted]:
        """Submits all tasks or none at all. Raises: as `submit`."""
        body = b"[" + b",".join(map(_task_json, tasks)) + b"]"
        return await self.request_json("POST", "/v1/tasks:batch", list[Submitted], body=body)

    async def task(self, task_id: str, wait_s: float = 0.0) -> TaskView:
        """The task now, when it has ended, or after `wait_s`. Raises: NotFound."""
        params = {"wait_s": f"{wait_s:g}"} if wait_s > 0 else None
        return await self.request_json("GET", f"/v1/tasks/{task_id}", TaskView, params=params, wait_s=wait_s)

    async def wait(self, task_id: str, timeout_s: float | None = None) -> TaskView:
        """The task when it has ended; survives restarts of the server and of its database.

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
        """Yields the task every `poll_s`, the last time when it has ended; survives restarts of the server and its
        database.

        Raises: NotFound; ServerUnavailable, StoreError if there was no answer for longer than `patience_s`.
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
        """Newest first. before: the `next` of the previous page."""
        params = _params(limit=limit, before=before, status=status, submitter=submitter)
        return await self.request_json("GET", "/v1/tasks", TaskPage, params=params)

    async def sessions(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        state: SessionState | None = None,
        outcome: Outcome | None = None,
        task_id: str | None = None,
        node_id: str | None = None,
        submitter: str | None = None,
    ) -> SessionPage:
        """Newest first. before: the `next` of the previous page. node_id: the node that holds the session or held it
        last. Raises: NotFound if there is no such task.
        """
        wanted = {"outcome": outcome, "task_id": task_id, "node_id": node_id, "submitter": submitter}
        params = _params(limit=limit, before=before, state=state, **wanted)
        return await self.request_json("GET", "/v1/sessions", SessionPage, params=params)

    async def result(self, task_id: str, *, partial: bool = False) -> list[SessionResult]:
        """Results of the group by sample index; with `partial`, only of the sessions that have ended.

        Raises: NotFound, Conflict if the task has not ended and `partial` is not set.
        """
        params = {"partial": "1"} if partial else None
        return await self.request_msgpack(f"/v1/tasks/{task_id}/result", list[SessionResult], params)

    async def references(self, task_id: str, *, partial: bool = False) -> list[ResultReference]:
        """Storage locations of the results, for callers that fetch large ones directly. Raises: as `result`."""
        params = {"partial": "1"} if partial else None
        return await self.request_json("GET", f"/v1/tasks/{task_id}/references", list[ResultReference], params=params)

    async def session(self, session_id: str) -> SessionView:
        """Raises: NotFound."""
        return await self.request_json("GET", f"/v1/sessions/{session_id}", SessionView)

    async def session_result(self, session_id: str, attempt: int | None = None) -> SessionResult:
        """Raises: NotFound, Conflict if the session has not ended and no attempt is given."""
        params = None if attempt is None else {"attempt": str(attempt)}
        return await self.request_msgpack(f"/v1/sessions/{session_id}/result", SessionResult, params)

    async def regrade(self, session_id: str, evaluator: EvaluatorSpec | None = None) -> Grading:
        """Grade an ended session again, by default with its task's own evaluator. Its result is not changed.

        A verdict `infra_error` contains the reason why it could not be graded. Raises: NotFound, Conflict if the
        session ended before it was graded, InvalidRequest, UnknownPlugin, ServerUnavailable if there is no node.
        """
        fields = {} if evaluator is None else {"evaluator": evaluator.model_dump(mode="json")}
        path = f"/v1/sessions/{session_id}/regrade"
        return await self.request_json("POST", path, Grading, body=msgspec.json.encode(fields), wait_s=GRADING_WAIT_S)

    async def fork(
        self,
        session_id: str,
        turn: int,
        *,
        samples: int = 1,
        sampling: SamplingPolicy | None = None,
        edit: str | None = None,
        engine: str | None = None,
        task_id: str | None = None,
    ) -> Submitted:
        """Submit a task whose sessions continue an ended session after its model call `turn`.

        sampling: for the calls after it; None: the task's own. edit: replaces the newest message before them. engine: a
        role whose own engines answer them; None: the policy's. Raises: NotFound, Conflict if the session has not ended
        or cannot be forked there.
        """
        fields: dict[str, Any] = {"turn": turn, "samples": samples, "edit": edit, "engine": engine, "task_id": task_id}
        if sampling is not None:
            fields["sampling"] = sampling.model_dump(mode="json")
        path = f"/v1/sessions/{session_id}/forks"
        return await self.request_json("POST", path, Submitted, body=msgspec.json.encode(fields))

    async def forks(self, session_id: str) -> ForkTree:
        """The tree of forks that contains a session. Raises: NotFound."""
        return await self.request_json("GET", f"/v1/sessions/{session_id}/forks", ForkTree)

    async def cancel(self, task_id: str) -> TaskView:
        """End a task's unfinished sessions. Raises: NotFound."""
        return await self.request_json("DELETE", f"/v1/tasks/{task_id}", TaskView)

    async def cancel_session(self, session_id: str) -> SessionView:
        """Raises: NotFound."""
        return await self.request_json("DELETE", f"/v1/sessions/{session_id}", SessionView)

    async def annotate(
        self,
        session_id: str,
        *,
        verdict: Verdict | None = None,
        note: str = "",
        call: int | None = None,
        dataset: str = "",
    ) -> Annotation:
        """Annotate a session or one of its calls. Raises: NotFound, InvalidRequest."""
        body = msgspec.json.encode({"verdict": verdict, "note": note, "call": call, "dataset": dataset})
        return await self.request_json("POST", f"/v1/sessions/{session_id}/annotations", Annotation, body=body)

    async def annotations(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        session_id: str | None = None,
        dataset: str | None = None,
        verdict: Verdict | None = None,
    ) -> AnnotationPage:
        """Newest first. before: the `next` of the previous page. dataset: "" selects annotations without a dataset."""
        params = _params(limit=limit, before=before, session_id=session_id, dataset=dataset, verdict=verdict)
        return await self.request_json("GET", "/v1/annotations", AnnotationPage, params=params)

    async def status(self) -> ServiceStatus:
        return await self.request_json("GET", "/v1/status", ServiceStatus)

    async def create_token(self, **fields: Any) -> NewToken:
        """fields: as in the body of `POST /v1/tokens`."""
        return await self.request_json("POST", "/v1/tokens", NewToken, body=msgspec.json.encode(fields))

    async def tokens(self) -> tuple[TokenView, ...]:
        return (await self.request_json("GET", "/v1/tokens", TokenList)).tokens

    async def rotate_token(self, token_id: str, grace_s: float = 0.0, expires_in_s: float | None = None) -> NewToken:
        """grace_s: how long the present secret stays valid. expires_in_s: None leaves the expiry as it is."""
        body = msgspec.json.encode({"grace_s": grace_s, "expires_in_s": expires_in_s})
        return await self.request_json("POST", f"/v1/tokens/{token_id}/rotate", NewToken, body=body)

    async def revoke_token(self, token_id: str) -> TokenView:
        return await self.request_json("DELETE", f"/v1/tokens/{token_id}", TokenView)

    async def tenants(self) -> tuple[TenantView, ...]:
        return (await self.request_json("GET", "/v1/tenants", TenantList)).tenants

    async def set_tenant(self, name: str, **changes: Any) -> TenantView:
        """changes: as in the body of `POST /v1/tenants/{tenant}`."""
        body = msgspec.json.encode(changes)
        return await self.request_json("POST", f"/v1/tenants/{name}", TenantView, body=body)

    async def usage(self, **params: Any) -> list[UsageRow]:
        """params: as in the query of `GET /v1/usage`."""
        return await self.request_json("GET", "/v1/usage", list[UsageRow], params=params)

    async def page_link(self, *, read_only: bool = False) -> PageLink:
        """A link that signs one browser in to the web page. read_only: it cannot change anything. Raises: TooMany."""
        body = msgspec.json.encode({"read_only": read_only})
        return await self.request_json("POST", "/v1/page/links", PageLink, body=body)

    async def events(
        self,
        *,
        after: int | None = None,
        task_id: str | None = None,
        retry_s: float = 1.0,
        on_connection: Callable[[GanglineError | None], None] = _nobody,
    ) -> AsyncGenerator[Event]:
        """Events as they happen, without end. Lost connections are resumed at the same event.

        after: only events after this one; 0: from the beginning, None: from now on.
        on_connection: called with None when the server begins to answer, and with the reason while it does not.
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

    # Calls for nodes.

    async def lease(
        self, node_id: str, *, url: str, max_sessions: int, wait_s: float = 0.0, identity: str = ""
    ) -> list[Lease]:
        """Up to `max_sessions` sessions, waiting up to `wait_s` for the first; may be empty.

        identity: see `Heartbeat`. Raises: NodeIdTaken.
        """
        body = msgspec.json.encode({"url": url, "max_sessions": max_sessions, "wait_s": wait_s, "identity": identity})
        return await self.request_json("POST", f"/v1/nodes/{node_id}/lease", list[Lease], body=body, wait_s=wait_s)

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Raises: NodeIdTaken."""
        path = f"/v1/nodes/{beat.node_id}/heartbeat"
        return await self.request_json("POST", path, HeartbeatReply, body=msgspec.json.encode(beat))

    async def release(self, node_id: str, *, session_id: str, fence: int, has_run: bool = False) -> None:
        """Give a session back. Its attempt counts if its agent has started. Raises: NotFound, LeaseLost."""
        body = msgspec.json.encode({"session_id": session_id, "fence": fence, "has_run": has_run})
        await self.request_json("POST", f"/v1/nodes/{node_id}/release", dict[str, Any], body=body)

    async def post_result(self, result: SessionResult, data: bytes | None = None) -> ResultReceipt:
        """Report the end of an attempt; it is stored on return. Raises: NotFound, LeaseLost, DiskFull.

        data: the result as MessagePack, if the caller has already encoded it.
        """
        body = await asyncio.to_thread(encode_msgpack, result) if data is None else data
        path = f"/v1/sessions/{result.session_id}/result"
        return await self.request_json(
            "POST", path, ResultReceipt, body=body, content_type=MSGPACK, wait_s=9 * self.timeout_s
        )

    async def post_turns(self, node_id: str, turns: Sequence[Turns]) -> TurnsReceipt:
        """Store records of running sessions; they are durable on return. Raises: DiskFull."""
        body = await asyncio.to_thread(encode_msgpack, turns)
        path = f"/v1/nodes/{node_id}/turns"
        return await self.request_json("POST", path, TurnsReceipt, body=body, content_type=MSGPACK)

    async def kept_turns(self, session_id: str, fence: int) -> KeptTurns:
        """Records of an earlier lease of a session, the one with the most. `fence`: the current lease's."""
        return await self.request_msgpack(f"/v1/sessions/{session_id}/turns", KeptTurns, {"fence": str(fence)})

    async def begin_anew(self, node_id: str, *, session_id: str, fence: int) -> None:
        """Delete the records of a session's earlier leases. Raises: LeaseLost."""
        body = msgspec.json.encode({"session_id": session_id, "fence": fence})
        await self.request_json("POST", f"/v1/nodes/{node_id}/turns:begin-anew", dict[str, Any], body=body)

    async def _event_stream(
        self, params: Mapping[str, str], place: _Place, on_connection: Callable[[GanglineError | None], None]
    ) -> AsyncGenerator[Event]:
        """One connection's events. Raises: ServerUnavailable if it broke or ended."""
        headers = {"Accept": "text/event-stream"}
        if place.last is not None:
            headers["Last-Event-ID"] = str(place.last)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout_s, sock_read=self.timeout_s)
        try:
            async with self.opened().get(
                f"{self.url}/v1/events", params=params, headers=headers, timeout=timeout
            ) as response:
                if response.status >= 400:
                    raise error_of(response.status, await response.read(), self.url)
                on_connection(None)
                async for line in response.content:
                    event = place.take(line)
                    if event is not None:
                        yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.unavailable(error) from error
        raise ServerUnavailable(f"the server at {self.url} ended the event stream.")


class _Place:
    """The client's position in the event stream. Parses server-sent events line by line."""

    def __init__(self, last: int | None) -> None:
        self.last = last

    def take(self, line: bytes) -> Event | None:
        """Parse a line. Returns the event that it completes, if any. The position is updated before the event is
        returned.
        """
        name, _, value = line.rstrip(b"\r\n").partition(b": ")
        if name == b"data":
            event = msgspec.json.decode(value, type=Event)
            self.last = event.seq
            return event
        # An id without data sets the position (a stream begins with one); with data, the event contains it.
        if name == b"id" and self.last is None:
            self.last = int(value)
        return None


def _params(**wanted: object) -> dict[str, str]:
    return {name: str(value) for name, value in wanted.items() if value is not None}


def _task_json(task: TaskRequest | Mapping[str, Any]) -> bytes:
    if isinstance(task, TaskRequest):
        return task.model_dump_json(exclude_unset=True).encode()
    return msgspec.json.encode(task)
