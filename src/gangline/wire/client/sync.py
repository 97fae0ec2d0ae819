"""Clients for synchronous code, and for notebooks, where an event loop is already running.

    with SyncServerClient("http://127.0.0.1:8700", token) as client:
        task = client.wait(client.submit(task).task_id)
        results = client.result(task.task_id)

Each call is the asynchronous client's, with its arguments and errors, made on a loop in a background thread. Ctrl-C
cancels it. Enter a client before use. One thread at a time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import ExitStack
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from gangline.domain.views import TaskView
from gangline.wire.client.background import InBackground
from gangline.wire.client.node import NodeClient
from gangline.wire.client.server import ServerClient
from gangline.wire.client.sessions import CallerSessions

C = TypeVar("C", bound=CallerSessions)
P = ParamSpec("P")
T = TypeVar("T")

_POLL_S = 60.0


def _awaited(call: Callable[Concatenate[C, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The same call, which returns when it is done."""

    @wraps(call)
    def wait(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        background: InBackground[C] = self._background
        return background.run(lambda client: call(client, *args, **kwargs))

    return wait


class _SyncSessions:
    """Sessions of agents that Gangline does not run, on a server or a node."""

    def __init__(self, client: Callable[[], Any]) -> None:
        self._background = InBackground[Any](client)
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        self._entered.enter_context(self._background)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._entered.close()

    open_session = _awaited(CallerSessions.open_session)
    wait_session = _awaited(CallerSessions.wait_session)
    finalize = _awaited(CallerSessions.finalize)
    abort_session = _awaited(CallerSessions.abort_session)


class SyncServerClient(_SyncSessions):
    """Calls the rollout server: the calls of `ServerClient`, without `await`.

    token: the control token, if any. timeout_s: for an answer, except long polls; results may take ten times as long.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 60.0) -> None:
        super().__init__(lambda: ServerClient(url, token, timeout_s=timeout_s))

    submit = _awaited(ServerClient.submit)
    submit_many = _awaited(ServerClient.submit_many)
    task = _awaited(ServerClient.task)
    wait = _awaited(ServerClient.wait)
    tasks = _awaited(ServerClient.tasks)
    sessions = _awaited(ServerClient.sessions)
    session = _awaited(ServerClient.session)
    result = _awaited(ServerClient.result)
    fork = _awaited(ServerClient.fork)
    forks = _awaited(ServerClient.forks)
    session_result = _awaited(ServerClient.session_result)
    regrade = _awaited(ServerClient.regrade)
    cancel = _awaited(ServerClient.cancel)
    cancel_session = _awaited(ServerClient.cancel_session)
    annotate = _awaited(ServerClient.annotate)
    annotations = _awaited(ServerClient.annotations)
    page_link = _awaited(ServerClient.page_link)
    status = _awaited(ServerClient.status)

    def progress(
        self, task_id: str, *, poll_s: float = _POLL_S, patience_s: float | None = None
    ) -> Generator[TaskView]:
        """Yield the task every `poll_s`, the last time when it has ended; survives restarts of the server.

        Raises: NotFound; ServerUnavailable, StoreError if there was no answer for longer than `patience_s`.
        """
        updates: AsyncGenerator[TaskView] | None = None

        async def following(client: ServerClient) -> TaskView | None:
            nonlocal updates
            updates = updates or client.progress(task_id, poll_s=poll_s, patience_s=patience_s)
            return await anext(updates, None)

        while (task := self._background.run(following)) is not None:
            yield task


class SyncNodeClient(_SyncSessions):
    """Calls one node: the calls of `NodeClient`, without `await`. Arguments as of `SyncServerClient`."""

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 60.0) -> None:
        super().__init__(lambda: NodeClient(url, token, timeout_s=timeout_s))

    status = _awaited(NodeClient.status)
    drain = _awaited(NodeClient.drain)
    sessions = _awaited(NodeClient.sessions)
    session = _awaited(NodeClient.session)
    recorded_calls = _awaited(NodeClient.recorded_calls)
    prefetch = _awaited(NodeClient.prefetch)
    gate = _awaited(NodeClient.gate)
    pause = _awaited(NodeClient.pause)
    resume = _awaited(NodeClient.resume)
    hold = _awaited(NodeClient.hold)
    set_version = _awaited(NodeClient.set_version)
    updates = _awaited(NodeClient.updates)
    report_phases = _awaited(NodeClient.report_phases)
    backends = _awaited(NodeClient.backends)
    add_backend = _awaited(NodeClient.add_backend)
    remove_backend = _awaited(NodeClient.remove_backend)
    clear_backends = _awaited(NodeClient.clear_backends)
    detokenize = _awaited(NodeClient.detokenize)
