"""Clients for code without an event loop of its own, and for notebooks, which run one already.

    with SyncServerClient("http://127.0.0.1:8700", token) as client:
        task = client.wait(client.submit(task).task_id)
        results = client.result(task.task_id)

Each call is the asynchronous client's, made on a loop in a background thread; errors are the same. Ctrl-C cancels it.
Enter a client before use. One thread at a time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Generic, Self, TypeVar

from gangline.domain.completion import RecordedCalls
from gangline.domain.lifecycle import Outcome, SessionState, TaskState
from gangline.domain.node_views import (
    BackendView,
    ExternalView,
    GateMode,
    GateState,
    NodeStatus,
    OpenedSession,
)
from gangline.domain.session import Grading, SessionResult
from gangline.domain.task import EvaluatorSpec, SamplingPolicy, TaskRequest
from gangline.domain.views import (
    Annotation,
    AnnotationPage,
    ForkTree,
    PageLink,
    ServiceStatus,
    SessionPage,
    SessionView,
    Submitted,
    TaskPage,
    TaskView,
    Verdict,
)
from gangline.domain.weight_updates import GateUpdate
from gangline.wire.client.background import InBackground
from gangline.wire.client.node import NodeClient
from gangline.wire.client.server import ServerClient
from gangline.wire.client.sessions import CallerSessions

__all__ = ["SyncNodeClient", "SyncServerClient"]

C = TypeVar("C", bound=CallerSessions)
T = TypeVar("T")

_POLL_S = 60.0


class _SyncSessions(Generic[C]):
    """Sessions of agents that Gangline does not run, on a server or a node."""

    def __init__(self, client: Callable[[], C]) -> None:
        self._background = InBackground(client)
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        self._entered.enter_context(self._background)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._entered.close()

    def _run(self, call: Callable[[C], Coroutine[Any, Any, T]]) -> T:
        return self._background.run(call)

    def open_session(self, **request: Any) -> OpenedSession:
        """Open a session. Fields of `request`: docs/guides/external-sessions.md.

        Raises: InvalidRequest, Conflict when the id is taken, TooMany.
        """
        return self._run(lambda client: client.open_session(**request))

    def wait_session(self, session_id: str, timeout_s: float = 60.0) -> ExternalView:
        """The session once its agent is done, or after `timeout_s` (at most 300). Raises: NotFound."""
        return self._run(lambda client: client.wait_session(session_id, timeout_s))

    def finalize(self, session_id: str, *, completions: bool = False) -> SessionResult:
        """The same result every time. Raises: NotFound, Conflict when it was aborted."""
        return self._run(lambda client: client.finalize(session_id, completions=completions))

    def abort_session(self, session_id: str) -> ExternalView:
        """Raises: NotFound, Conflict when it was finalized."""
        return self._run(lambda client: client.abort_session(session_id))


class SyncServerClient(_SyncSessions[ServerClient]):
    """Calls the rollout server.

    token: the control token, if there is one. timeout_s: for a call's answer, long polls excepted; results have ten
    times as long.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 60.0) -> None:
        super().__init__(lambda: ServerClient(url, token, timeout_s=timeout_s))

    def submit(self, task: TaskRequest | Mapping[str, Any]) -> Submitted:
        """Raises: InvalidRequest, UnknownPlugin, Conflict when the id is taken by another task."""
        return self._run(lambda client: client.submit(task))

    def submit_many(self, tasks: Sequence[TaskRequest | Mapping[str, Any]]) -> list[Submitted]:
        """Submit all of them or none. Raises: as `submit`."""
        return self._run(lambda client: client.submit_many(tasks))

    def task(self, task_id: str, wait_s: float = 0.0) -> TaskView:
        """The task now, or when it has ended, or after `wait_s`. Raises: NotFound."""
        return self._run(lambda client: client.task(task_id, wait_s))

    def wait(self, task_id: str, timeout_s: float | None = None) -> TaskView:
        """The task when it has ended, through restarts of the server. Raises: NotFound, TimeoutError."""
        return self._run(lambda client: client.wait(task_id, timeout_s))

    def progress(
        self, task_id: str, *, poll_s: float = _POLL_S, patience_s: float | None = None
    ) -> Generator[TaskView]:
        """Yield the task each `poll_s`, and last when it has ended, through restarts of the server.

        Raises: NotFound; ServerUnavailable, StoreError when none answers for longer than `patience_s`.
        """
        updates: AsyncGenerator[TaskView] | None = None

        async def following(client: ServerClient) -> TaskView | None:
            nonlocal updates
            updates = updates or client.progress(task_id, poll_s=poll_s, patience_s=patience_s)
            return await anext(updates, None)

        while (task := self._run(following)) is not None:
            yield task

    def tasks(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        status: TaskState | None = None,
        submitter: str | None = None,
    ) -> TaskPage:
        """Newest first. before: the `next` of the page above."""
        return self._run(lambda client: client.tasks(limit=limit, before=before, status=status, submitter=submitter))

    def sessions(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        state: SessionState | None = None,
        outcome: Outcome | None = None,
        node_id: str | None = None,
        submitter: str | None = None,
    ) -> SessionPage:
        """Newest first. before: the `next` of the page above. node_id: the node that has or had it."""
        return self._run(
            lambda client: client.sessions(
                limit=limit, before=before, state=state, outcome=outcome, node_id=node_id, submitter=submitter
            )
        )

    def session(self, session_id: str) -> SessionView:
        """Raises: NotFound."""
        return self._run(lambda client: client.session(session_id))

    def result(self, task_id: str, *, partial: bool = False) -> list[SessionResult]:
        """Results of the group by sample index; with `partial`, of the sessions that have ended.

        Raises: NotFound, Conflict when the task has not ended and `partial` is not asked for.
        """
        return self._run(lambda client: client.result(task_id, partial=partial))

    def fork(
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
        """Submit a task whose sessions continue an ended session behind its model call `turn`.

        sampling: of the calls behind it; None: the task's own. edit: text in the place of the newest message before
        them. engine: a role whose own engines answer them; None: the policy's. Raises: NotFound, Conflict when the
        session has not ended or is not forkable there.
        """
        return self._run(
            lambda client: client.fork(
                session_id, turn, samples=samples, sampling=sampling, edit=edit, engine=engine, task_id=task_id
            )
        )

    def forks(self, session_id: str) -> ForkTree:
        """The tree of forks that a session is in. Raises: NotFound."""
        return self._run(lambda client: client.forks(session_id))

    def session_result(self, session_id: str, attempt: int | None = None) -> SessionResult:
        """Raises: NotFound, Conflict when the session has not ended and no attempt is named."""
        return self._run(lambda client: client.session_result(session_id, attempt))

    def regrade(self, session_id: str, evaluator: EvaluatorSpec | None = None) -> Grading:
        """Grade an ended session again, by its task's own evaluator where none is given. Its result stays as it is.

        A verdict `infra_error` has the reason why it could not be graded. Raises: NotFound, Conflict when it was not
        to be graded, InvalidRequest, UnknownPlugin, ServerUnavailable when there is no node.
        """
        return self._run(lambda client: client.regrade(session_id, evaluator))

    def cancel(self, task_id: str) -> TaskView:
        """End the sessions of a task that have not ended. Raises: NotFound."""
        return self._run(lambda client: client.cancel(task_id))

    def cancel_session(self, session_id: str) -> SessionView:
        """Raises: NotFound."""
        return self._run(lambda client: client.cancel_session(session_id))

    def annotate(
        self,
        session_id: str,
        *,
        verdict: Verdict | None = None,
        note: str = "",
        call: int | None = None,
        dataset: str = "",
    ) -> Annotation:
        """Say something of a session, or of one of its calls. Raises: NotFound, InvalidRequest."""
        return self._run(
            lambda client: client.annotate(session_id, verdict=verdict, note=note, call=call, dataset=dataset)
        )

    def annotations(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        session_id: str | None = None,
        dataset: str | None = None,
        verdict: Verdict | None = None,
    ) -> AnnotationPage:
        """Newest first. before: the `next` of the page above. dataset: the empty name selects those of none."""
        return self._run(
            lambda client: client.annotations(
                limit=limit, before=before, session_id=session_id, dataset=dataset, verdict=verdict
            )
        )

    def page_link(self, *, read_only: bool = False) -> PageLink:
        """A link to the page, which signs one browser in. read_only: it can change nothing. Raises: TooMany."""
        return self._run(lambda client: client.page_link(read_only=read_only))

    def status(self) -> ServiceStatus:
        return self._run(lambda client: client.status())


class SyncNodeClient(_SyncSessions[NodeClient]):
    """Calls one node: sessions of your own agents, its engines, its gate. Arguments as of `SyncServerClient`."""

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 60.0) -> None:
        super().__init__(lambda: NodeClient(url, token, timeout_s=timeout_s))

    def status(self) -> NodeStatus:
        return self._run(lambda client: client.status())

    def drain(self) -> NodeStatus:
        """Take no more sessions, and end with those that it has."""
        return self._run(lambda client: client.drain())

    def sessions(self) -> list[ExternalView]:
        """Sessions that callers opened."""
        return self._run(lambda client: client.sessions())

    def session(self, session_id: str) -> ExternalView:
        """Raises: NotFound."""
        return self._run(lambda client: client.session(session_id))

    def recorded_calls(self, session_id: str, *, after: int = 0, wait_s: float = 0.0) -> RecordedCalls:
        """Calls of an open session behind the first `after`: at once where there are some, else after `wait_s` at most.

        Raises: NotFound when the session has not begun, or is over.
        """
        return self._run(lambda client: client.recorded_calls(session_id, after=after, wait_s=wait_s))

    def gate(self) -> GateState:
        return self._run(lambda client: client.gate())

    def pause(self, mode: GateMode = "drain", lease_s: float = 600.0) -> GateState:
        """Let model calls wait; with `drain`, returns when none is in flight, or when the lease is over: see
        `is_drained`. Raises: InvalidRequest.
        """
        return self._run(lambda client: client.pause(mode, lease_s))

    def resume(self) -> GateState:
        return self._run(lambda client: client.resume())

    def hold(self, mode: GateMode, lease_s: float, wait_s: float = 0.0) -> GateState:
        """Close the gate, or renew the lease of a closed one. A drain is waited for `wait_s` at most."""
        return self._run(lambda client: client.hold(mode, lease_s, wait_s))

    def set_version(self, version: int, unknown: Sequence[str] = ()) -> GateState:
        """Set the policy version of tokens sampled from now on; `unknown`: URLs of engines that may have other weights.

        Raises: InvalidRequest when it would go back.
        """
        return self._run(lambda client: client.set_version(version, unknown))

    def updates(self) -> list[GateUpdate]:
        """The last weight updates by phase, the newest last."""
        return self._run(lambda client: client.updates())

    def report_phases(self, phases: Mapping[str, float]) -> GateState:
        """As `NodeClient.report_phases`. Raises: InvalidRequest, Conflict."""
        return self._run(lambda client: client.report_phases(phases))

    def backends(self, *, times: bool = False) -> list[BackendView]:
        """times: with the engines' own, for which the node asks each."""
        return self._run(lambda client: client.backends(times=times))

    def add_backend(
        self,
        url: str,
        *,
        kind: str = "auto",
        label: str | None = None,
        api_key_env: str | None = None,
        options: Mapping[str, Any] | None = None,
        role: str | None = None,
    ) -> BackendView:
        """As `NodeClient.add_backend`. Raises: EngineUnavailable, EngineIncapable, InvalidRequest, Conflict."""
        return self._run(
            lambda client: client.add_backend(
                url, kind=kind, label=label, api_key_env=api_key_env, options=options, role=role
            )
        )

    def remove_backend(self, backend_id: str, *, drain: bool = True) -> None:
        """Raises: NotFound."""
        return self._run(lambda client: client.remove_backend(backend_id, drain=drain))

    def clear_backends(self, role: str | None = None) -> None:
        """As `NodeClient.clear_backends`. Raises: NotFound."""
        return self._run(lambda client: client.clear_backends(role))
