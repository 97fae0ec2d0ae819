"""One attempt at one session: the runtime starts, the harness runs, traces are built, the outcome is graded.

Laws
- Whatever happens, the runtime is stopped, the session's key is dead and the result says at which boundary it broke.
- Budgets count a stage's own time. Waiting for a pool, or being held by the gate, counts against none of them.
- When RUN ends, for whatever reason: first the key is fenced, then every process of the runtime is killed, then POSTRUN
  begins. So nothing is sampled or written while a session is graded, and what was sampled before is kept.
- A reward is given by the evaluator or not at all. Nothing is scored because *we* broke.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gangline import plugins
from gangline.domain.completion import Completion
from gangline.domain.contracts import (
    AgentRun,
    EvaluationContext,
    ExecResult,
    Harness,
    HarnessContext,
    Launch,
    Logged,
    Reward,
    RuntimeHandle,
    RuntimeStart,
    Usage,
)
from gangline.domain.errors import (
    BuilderError,
    Failure,
    GanglineError,
    GradingSpoiled,
    NodeError,
    PrepareFailed,
    RuntimeFailed,
)
from gangline.domain.ids import new_secret
from gangline.domain.lifecycle import Outcome, Stage
from gangline.domain.open_files import out_of_files
from gangline.domain.session import HarnessExit, Lease, SessionResult, StageTiming
from gangline.domain.task import ExecAction, RuntimeSpec, SamplingPolicy, TaskRequest, decoded
from gangline.domain.trajectory import Trajectory
from gangline.gateway.adoption import RESTARTED, AttemptNote, RunClock, RunEnd, annotate, run_harness
from gangline.gateway.backends import BackendPool
from gangline.gateway.gate import Gate
from gangline.gateway.grading import bounded, graded, within
from gangline.gateway.harness_logs import collect_logs
from gangline.gateway.metrics import NodeMetrics
from gangline.gateway.model_session import ModelSession
from gangline.gateway.pools import Pools
from gangline.gateway.proxy import Proxy
from gangline.runtimes.kept import Keeper, KeptHandle
from gangline.store.journal import AttemptKey, AttemptOpened, Journal
from gangline.trajectories.building import built
from gangline.trajectories.rewards import apply_reward

__all__ = ["Attempt", "NodeParts"]

log = logging.getLogger("gangline.node")

_T = TypeVar("_T")

MAX_LOG_BYTES = 256 << 10
_KILL_GRACE_S = 15.0
_STOP_S = 30.0
"""What tearing a runtime down should take."""


class NodeParts(msgspec.Struct, frozen=True, kw_only=True):
    """What all attempts of a node share."""

    node_id: str
    owner: str
    """Label of everything this node starts."""
    runtimes_folder: Path
    hidden: tuple[Path, ...] = ()
    """Host folders that no sandbox sees."""
    backends: BackendPool
    first_model: str
    """Served when the node started."""
    proxy: Proxy
    proxy_port: int
    journal: Journal
    pools: Pools
    gate: Gate = msgspec.field(default_factory=Gate)
    sampling: SamplingPolicy | None = None
    """The operator's, applied after a task's own."""
    metrics: NodeMetrics = msgspec.field(default_factory=NodeMetrics)
    on_result: Callable[[SessionResult], None] | None = None
    """Told of each attempt that ended."""
    keeper: Keeper | None = None
    """Where sandboxes live that are to outlive the node's process; None: none is."""

    @property
    def model(self) -> str:
        """Served model; the default for tasks that name none."""
        return next((view.model for view in self.backends.views()), self.first_model)

    async def start_runtime(self, name: str, start: RuntimeStart) -> RuntimeHandle:
        """Raises: UnknownPlugin, and what the runtime raises."""
        starter = plugins.make_runtime(name).start(start) if self.keeper is None else self.keeper.start(name, start)
        return await starter


class Attempt:
    """Run with `live()`, once. Cancelling it (a cancelled session, a lost lease) leaves nothing behind."""

    def __init__(
        self,
        lease: Lease,
        parts: NodeParts,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.lease = lease
        self.key = AttemptKey(lease.session_id, lease.attempt)
        self.stage: Stage = "init"
        self.since = clock()
        """When it came to this stage, or began to work at it. Unix time, UTC, seconds."""
        self.on_stage: Callable[[], None] = lambda: None
        """Called whenever the attempt is in another stage."""
        self._budget_ends_at: float | None = None
        self._parts = parts
        self._clock = clock
        self._task = TaskRequest.model_validate(lease.task)
        self._handles: list[RuntimeHandle] = []
        self._session: ModelSession | None = None
        self._fresh: asyncio.Task[RuntimeHandle] | None = None
        self._timings: list[StageTiming] = []
        self._run_clock: RunClock | None = None
        self._evicted: Failure | None = None
        """Why it was ended for what it took of the machine."""
        self._adopted: tuple[AttemptNote, KeptHandle] | None = None
        self._artifacts: dict[str, bytes] = {}
        self._outcome: Outcome = "infra_error"
        self._failure: Failure | None = None
        self._exit: HarnessExit | None = None
        self._stdout = b""

    @classmethod
    async def adopted(cls, note: AttemptNote, handle: KeptHandle, parts: NodeParts) -> Attempt:
        """An attempt of an earlier life of this node; its session answers calls when this returns."""
        attempt = cls(note.lease, parts)
        attempt._adopted = (note, handle)
        attempt._handles.append(handle)
        attempt._timings.extend(note.timings)
        attempt.since = note.entered_at
        attempt.stage = "run" if note.ended is None else "postrun"
        if note.ended is None:
            session = attempt._open_session(note.key_digest, await parts.journal.read(attempt.key))
            session.node_failure = RESTARTED
        log.info("session.adopted session=%s attempt=%d stage=%s", *attempt.key, attempt.stage)
        return attempt

    async def live(self) -> SessionResult:
        """All four stages. Raises only CancelledError."""
        try:
            await self._guard(self._init_and_run if self._adopted is None else self._go_on)
            self._move("postrun")
            await self._settle_grader()
            async with self._parts.pools.postrun:
                with self._in("postrun", self._task.evaluation_timeout_seconds):
                    return await self._postrun()
        finally:
            self._move("postrun", _STOP_S)
            await _uncancelled(self._clean())
            self._move("postrun")

    def overdue_s(self) -> float | None:
        """For how long its present work should have ended, by its budget; None while it waits, or has nothing to do."""
        if self._budget_ends_at is None:
            return None
        held_s = self._session.meter.held_s if self._session is not None else 0.0
        return max(0.0, time.monotonic() - self._budget_ends_at - held_s)

    async def _guard(self, step: Callable[[], Awaitable[None]]) -> None:
        """Turn what a step raises into the attempt's failure."""
        try:
            await step()
        except Exception as error:
            known = out_of_files(error) or error
            if isinstance(known, GanglineError):
                self._fail(known.failure())
                return
            log.exception("session.internal_error session=%s", self.lease.session_id)
            message = f"{type(error).__name__}: {error}"
            self._fail(Failure(boundary="node", code="internal_error", message=message, retryable=True))

    def _fail(self, failure: Failure) -> None:
        self._outcome, self._failure = "infra_error", failure
        log.warning(
            "session.failed session=%s attempt=%d stage=%s boundary=%s code=%s message=%s",
            *(*self.key, self.stage, failure.boundary, failure.code, failure.message),
        )

    def _move(self, stage: Stage, budget_s: float | None = None) -> None:
        """To another stage, or another part of it; `budget_s` is None where it waits its turn."""
        self.stage, self.since = stage, self._clock()
        self._allow(budget_s)
        self.on_stage()

    def _allow(self, budget_s: float | None) -> None:
        """What begins now should be done by then."""
        self._budget_ends_at = None if budget_s is None else time.monotonic() + budget_s

    @contextmanager
    def _in(self, stage: Stage, budget_s: float | None = None, since: float | None = None) -> Generator[None]:
        """`since`: when it came to this stage in an earlier life of the node."""
        self._move(stage, budget_s)
        self.since = self.since if since is None else since
        log.info("session.%s session=%s attempt=%d", stage, *self.key)
        try:
            yield
        finally:
            self._timings.append(StageTiming(stage, self.since, self._clock()))

    # -- INIT ----------------------------------------------------------------------------------------------------

    async def _init_and_run(self) -> None:
        pools = self._parts.pools
        self._refuse_taken_id()
        opened = AttemptOpened(*self.key, self.lease.task_id, self.lease.fence)
        await self._parts.journal.open_attempt(opened)
        budget_s = self._task.init_timeout_seconds
        async with pools.init:
            with self._in("init", budget_s):
                out_of_time = RuntimeFailed(f"INIT ran out of its budget of {budget_s:g} s")
                handle, launch = await within(budget_s, self._init(), out_of_time)
        async with self._ready_for_run():
            with self._in("run", self._task.timeout_seconds):
                await self._run(handle, run_harness(handle, launch, self._note(), MAX_LOG_BYTES))

    @asynccontextmanager
    async def _ready_for_run(self) -> AsyncGenerator[None]:
        """Wait in READY for a place in RUN, and keep it."""
        async with AsyncExitStack() as place:
            with self._in("ready"):
                await place.enter_async_context(self._parts.pools.run)
            yield

    async def _go_on(self) -> None:
        """With what an earlier life of this node began. It had a place in RUN; nobody waits for one with a harness
        that runs already."""
        assert self._adopted is not None
        (note, handle), places = self._adopted, self._parts.pools.run
        if note.ended is not None:
            self._outcome, self._failure = note.ended.outcome, note.ended.failure
            self._timings.append(StageTiming("run", note.entered_at, note.ended.ended_at))
            self._exit, self._artifacts = note.ended.harness_exit, dict(note.ended.artifacts)
            self._stdout = self._artifacts.get("harness.stdout", b"")
            return
        async with AsyncExitStack() as place:
            if places.num_free > 0:
                await place.enter_async_context(places)
            with self._in("run", self._task.timeout_seconds - handle.spent_s, note.entered_at):
                await self._run(handle, handle.rejoin(), handle.spent_s)

    def _note(self) -> AttemptNote:
        """For the node's next life."""
        assert self._session is not None
        ended = None
        if self._exit is not None:
            ended = RunEnd(
                outcome=self._outcome,
                failure=self._failure,
                harness_exit=self._exit,
                artifacts=self._artifacts,
                ended_at=self._clock(),
            )
        return AttemptNote(
            lease=self.lease,
            key_digest=self._session.key_digest,
            timings=tuple(self._timings),
            entered_at=self.since,
            ended=ended,
        )

    def tell_spent(self) -> None:
        """Let the node's next life know how much of RUN's budget is used."""
        handle = self._handles[0] if self._handles else None
        if self._run_clock is not None and isinstance(handle, KeptHandle):
            handle.tell_spent(self._run_clock.spent_s)

    def _refuse_taken_id(self) -> None:
        """Raises: NodeError when a caller's own session has the id here; another node may still take the lease."""
        if self._parts.proxy.serves(self.lease.session_id):
            raise NodeError(f"a session of its caller's own has the id {self.lease.session_id!r} open on this node.")

    async def _init(self) -> tuple[RuntimeHandle, Launch | AgentRun]:
        task, parts = self._task, self._parts
        handle = await self._start_runtime("agent", task.runtime)
        session = self._open_session(new_secret("gls"))
        harness = plugins.make_harness(task.agent.harness, task.agent.settings)
        context = HarnessContext(
            session_id=self.lease.session_id,
            task_id=self.lease.task_id,
            instruction=task.instruction,
            model=task.agent.model_name or parts.model,
            base_url=f"{handle.proxy_url or ''}/s/{self.lease.session_id}",
            node_url=f"http://127.0.0.1:{parts.proxy_port}/s/{self.lease.session_id}",
            api_key=session.key,
            runtime=handle,
            env=task.agent.env,
            max_turns=task.agent.max_turns,
            mcp_servers=task.agent.mcp_servers,
            skills=task.agent.skills,
        )
        return handle, await harness.prepare(context)

    def _open_session(self, key: str | bytes, completions: Sequence[Completion] = ()) -> ModelSession:
        task, parts = self._task, self._parts
        session = ModelSession(
            session_id=self.lease.session_id,
            attempt=self.lease.attempt,
            key=key,
            engine=parts.backends.engine_for(self.lease.session_id, self.lease.task_id),
            journal=parts.journal,
            max_turns=task.agent.max_turns,
            max_sampled_tokens=task.agent.max_sampled_tokens,
            thinking=task.capture.thinking,
            tier=task.capture.tier,
            volatile_system_text=task.capture.volatile_system_text,
            token_texts=task.capture.token_texts,
            completions=completions,
            gate=parts.gate,
            sampling=[policy for policy in (task.capture.sampling, parts.sampling) if policy is not None],
            seed=task.capture.session_seed(self.lease.sample_index),
        )
        parts.proxy.add(session)
        self._session = session
        return session

    async def _start_runtime(self, role: str, spec: RuntimeSpec) -> RuntimeHandle:
        runtime_id = f"{self.lease.session_id}.{self.lease.attempt}.{role}"
        handle = await self._parts.start_runtime(
            spec.backend,
            RuntimeStart(
                runtime_id=runtime_id,
                owner=self._parts.owner,
                spec=spec,
                folder=self._parts.runtimes_folder / runtime_id,
                proxy_port=self._parts.proxy_port,
                hidden=self._parts.hidden,
            ),
        )
        self._handles.append(handle)
        for action in spec.prepare:
            if isinstance(action, ExecAction):
                await self._prepare_exec(handle, action)
            else:
                await handle.upload(action.path, decoded(action.content, action.encoding), mode=action.mode)
        return handle

    @staticmethod
    async def _prepare_exec(handle: RuntimeHandle, action: ExecAction) -> None:
        result = await handle.exec(action.command, timeout_s=action.timeout_seconds)
        if not result.ok:
            said = result.stderr[-1000:].decode(errors="replace")
            raise PrepareFailed(f"prepare action {action.command[:200]!r} {_ended(result)}: {said}")

    # -- RUN -----------------------------------------------------------------------------------------------------

    async def _run(self, handle: RuntimeHandle, work: Coroutine[Any, Any, ExecResult], spent_s: float = 0.0) -> None:
        """`work`: the harness's whole run. `spent_s`: of its budget, in an earlier life of the node."""
        assert self._session is not None
        task, session = self._task, self._session
        if task.evaluator.refresh_runtime and self._parts.pools.prewarm.size:
            self._fresh = self._begin("grader", self._prewarm())  # prepared while the agent runs
        execution = self._begin("command", work)
        limit = asyncio.create_task(session.limit_reached.wait())
        is_over = False
        self._run_clock = RunClock(session.meter, spent_s)
        budget = asyncio.create_task(session.meter.elapse(task.timeout_seconds - spent_s))
        try:
            await asyncio.wait({execution, limit, budget}, return_when=asyncio.FIRST_COMPLETED)
            result = execution.result() if execution.done() else None
            is_over = not execution.done() and (budget.done() or limit.done())
        finally:
            limit.cancel()
            budget.cancel()
            if not is_over:
                execution.cancel()
            await session.fence("the session has ended")
            if not execution.done():  # what the kill makes of it would be mistaken for its own end
                await annotate(handle, None)
            await handle.kill()
            # What it wrote until then is kept where its budget or a limit ended it; the kill has ended it already.
            await asyncio.wait({execution}, timeout=_KILL_GRACE_S)
            execution.cancel()
            await asyncio.wait({execution, limit, budget})
        await self._note_usage(handle)
        harness = plugins.make_harness(self._task.agent.harness, self._task.agent.settings)
        if isinstance(harness, Logged):
            self._artifacts |= await collect_logs(handle, harness.logs)
        result = result or _cut_short(execution)
        if self._evicted is not None:
            self._outcome, self._failure = "agent_error", self._evicted
            self._exit = HarnessExit(exit_code=result.exit_code, signal=result.signal)
            self._keep_output(result)
        elif session.limit is not None:
            self._stop_at_limit(session.limit, result)
        else:
            self._judge(harness, result)
        await annotate(handle, self._note())

    async def evict(self, why: str) -> bool:
        """End an agent that took too much of the machine. It is the agent's failure, and is graded like others.

        Returns whether it was running.
        """
        if self.stage != "run" or self._evicted is not None:
            return False
        self._evicted = _disk_limit(why)
        with suppress(RuntimeFailed):  # gone already
            await self._handles[0].kill()
        return True

    async def usage(self) -> Usage:
        """Of the agent's sandbox. Raises: RuntimeFailed when it is gone."""
        return await self._handles[0].usage() if self._handles else Usage(disk_bytes=None)

    def exceeds(self, usage: Usage) -> str | None:
        """Why the agent's own limit ends it, if it does."""
        if usage.exceeded is None:
            return None
        limit = getattr(self._task.runtime.limits, usage.exceeded)
        return f"the agent's files took more than limits.{usage.exceeded} ({limit}) allows"

    async def _note_usage(self, handle: RuntimeHandle) -> None:
        """Whether the runtime itself ended the harness for what it took."""
        with suppress(RuntimeFailed):
            if self._evicted is None and (why := self.exceeds(await handle.usage())) is not None:
                self._evicted = _disk_limit(why)

    def _stop_at_limit(self, limit: Outcome, result: ExecResult) -> None:
        """A limit is an outcome, whatever the harness made of the refused call."""
        self._outcome, self._exit = limit, HarnessExit(exit_code=None)
        self._keep_output(result)

    def _keep_output(self, result: ExecResult) -> None:
        self._stdout = result.stdout
        self._artifacts |= {"harness.stdout": result.stdout, "harness.stderr": result.stderr}

    def _judge(self, harness: Harness, result: ExecResult) -> None:
        """Outcome of RUN."""
        assert self._session is not None
        self._exit = HarnessExit(exit_code=result.exit_code, signal=result.signal, timed_out=result.timed_out)
        self._keep_output(result)
        verdict = harness.judge(result)
        broken = self._session.engine_failure or self._session.store_failure
        if verdict.ok and not result.timed_out:
            self._outcome = "completed"
        elif broken is not None:
            self._fail(broken)  # the harness could not work: we failed it
        elif result.timed_out:
            self._outcome = "agent_timeout"
        elif self._session.node_failure is not None:
            self._fail(self._session.node_failure)  # it gave up on the call that died with us
        else:
            self._outcome = "agent_error"
            reason = verdict.reason or f"the harness {_ended(result)}"
            self._failure = Failure(boundary="harness", code="harness_failed", message=reason, retryable=False)

    # -- POSTRUN -------------------------------------------------------------------------------------------------

    async def _postrun(self) -> SessionResult:
        trajectory: Trajectory | None = None
        completions: Sequence[Completion] = ()

        async def build() -> None:
            nonlocal completions, trajectory
            completions = await self._parts.journal.read(self.key)
            trajectory = await self._built(completions) if completions else None

        await self._guard(build)
        reward, details = None, dict[str, Any]()
        if self._outcome != "infra_error":
            if trajectory is None:
                trajectory = _empty_trajectory(self.lease, self._task)
            to_grade = trajectory

            async def grade() -> None:
                nonlocal trajectory, reward, details
                try:
                    found = await self._evaluate(to_grade)
                except GradingSpoiled as error:
                    self._blame_agent(error)
                    details, on_failure = {"grading_failed": error.message}, self._task.evaluator.on_failure
                    if on_failure == "none":
                        return
                    found = Reward(reward=on_failure, details=details)
                trajectory, reward, details = apply_reward(to_grade, found), found.reward, found.details

            await self._guard(grade)
        return self._result(trajectory, reward, details, tuple(completions))

    async def _built(self, completions: Sequence[Completion]) -> Trajectory:
        """Raises: BuilderError."""
        builder = plugins.make_builder(self._task.builder.strategy, self._task.builder.config)
        budget_s = self._task.evaluation_timeout_seconds
        building = asyncio.to_thread(
            built, builder, completions, session_id=self.lease.session_id, task_id=self.lease.task_id
        )
        return await within(
            budget_s, building, BuilderError(f"no trajectory within the evaluation's budget of {budget_s:g} s")
        )

    async def _evaluate(self, trajectory: Trajectory) -> Reward:
        assert self._exit is not None
        if not self._task.evaluator.refresh_runtime:
            await annotate(self._handles[0], None)  # what grading does to the agent's sandbox is not done twice
        evaluator = plugins.make_evaluator(self._task.evaluator.strategy, self._task.evaluator.config)
        context = EvaluationContext(
            session_id=self.lease.session_id,
            instruction=self._task.instruction,
            trajectory=trajectory,
            outcome=self._outcome,
            harness_exit=self._exit,
            harness_stdout=self._stdout,
            runtime=self._handles[0],
            fresh_runtime=self._fresh_runtime,
            refresh_runtime=self._task.evaluator.refresh_runtime,
            metadata=self._task.metadata,
        )
        budget_s, init_s = self._task.evaluation_timeout_seconds, self._task.init_timeout_seconds
        if context.refresh_runtime:
            self._allow(2 * init_s)
            await asyncio.wait({self._fresh_runtime()})
        self._allow(budget_s)

        def start_control() -> Coroutine[Any, Any, RuntimeHandle]:
            self._allow(init_s + budget_s)
            return self._start_grader("control")

        try:
            return await graded(evaluator, context, start_control, budget_s=budget_s)
        finally:
            self._artifacts = bounded(context.artifacts) | self._artifacts

    def _blame_agent(self, error: GradingSpoiled) -> None:
        """The session is the agent's failure, and no fault of ours."""
        self._failure = error.failure()
        if self._outcome == "completed":
            self._outcome = "agent_error"
        log.warning("session.grading_spoiled session=%s attempt=%d message=%s", *self.key, error.message)

    async def _prewarm(self) -> RuntimeHandle:
        """The clean runtime, while the agent runs. A start that fails is tried again: the agent's work hangs on it."""
        async with self._parts.pools.prewarm:
            try:
                return await self._start_grader("grader")
            except GanglineError as error:
                log.warning("grader.failed session=%s attempt=%d message=%s", *self.key, error)
                return await self._start_grader("grader.again")

    async def _start_grader(self, role: str) -> RuntimeHandle:
        budget_s = self._task.init_timeout_seconds
        out_of_time = RuntimeFailed(f"the grader's clean runtime ran out of INIT's budget of {budget_s:g} s")
        return await within(budget_s, self._start_runtime(role, self._task.runtime), out_of_time)

    def _fresh_runtime(self) -> asyncio.Task[RuntimeHandle]:
        """The clean runtime, started once; awaiting it gives the handle."""
        if self._fresh is None:
            self._fresh = self._begin("grader", self._start_grader("grader"))
        return self._fresh

    async def _settle_grader(self) -> None:
        """Before a worker of POSTRUN is taken: the clean runtime is there, or gone where nothing will be graded.

        What kept it from starting is told to the evaluator, when it asks.
        """
        if self._fresh is None:
            return
        if self._outcome == "infra_error":
            await self._cancel_grader()
        else:
            await asyncio.wait({self._fresh})

    async def _cancel_grader(self) -> None:
        if self._fresh is None:
            return
        self._fresh.cancel()
        await asyncio.wait({self._fresh})
        if not self._fresh.cancelled() and self._fresh.exception() is None:
            with suppress(GanglineError):  # it is stopped again with the others
                await self._fresh.result().stop()

    def _begin(self, what: str, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """A task whose name tells whose it is, and what it does."""
        return asyncio.create_task(work, name=f"session.{self.lease.session_id} {what}")

    def _result(
        self,
        trajectory: Trajectory | None,
        reward: float | None,
        details: dict[str, Any],
        completions: tuple[Completion, ...],
    ) -> SessionResult:
        return SessionResult(
            session_id=self.lease.session_id,
            task_id=self.lease.task_id,
            node_id=self._parts.node_id,
            attempt=self.lease.attempt,
            fence=self.lease.fence,
            outcome=self._outcome,
            failure=self._failure,
            reward=reward,
            reward_details=details,
            harness_exit=self._exit,
            trajectory=trajectory,
            completions=completions,
            timings=(*self._timings, StageTiming("postrun", self.since, self._clock())),
            artifacts=self._artifacts,
            limits=self._handles[0].limits() if self._handles else {},
        )

    async def _clean(self) -> None:
        if self._session is not None:
            await self._session.fence("the session has ended")
            self._parts.proxy.remove(self.lease.session_id)
            self._parts.backends.release(self.lease.session_id)
        await self._cancel_grader()
        for handle in self._handles:
            try:
                await handle.stop()
            except GanglineError as error:
                log.error("runtime.stop_failed runtime=%s message=%s", handle.runtime_id, error)


def _disk_limit(why: str) -> Failure:
    return Failure(boundary="harness", code="disk_limit", message=why, retryable=False)


def _empty_trajectory(lease: Lease, task: TaskRequest) -> Trajectory:
    """Of an agent that never called its model."""
    return Trajectory(
        session_id=lease.session_id,
        task_id=lease.task_id,
        builder=task.builder.strategy,
        traces=(),
        num_completions=0,
    )


def _cut_short(execution: asyncio.Task[ExecResult]) -> ExecResult:
    """Of a command that was killed when its budget had ended, or a limit was reached."""
    said = ExecResult(exit_code=None, timed_out=True)
    if execution.cancelled() or execution.exception() is not None:
        return said
    result = execution.result()
    return msgspec.structs.replace(said, stdout=result.stdout, stderr=result.stderr, duration_s=result.duration_s)


def _ended(result: ExecResult) -> str:
    if result.timed_out:
        return "ran out of time"
    return f"exited {result.exit_code}" if result.signal is None else f"was ended by signal {result.signal}"


async def _uncancelled(work: Awaitable[None]) -> None:
    """Finish `work` even when the caller is cancelled meanwhile; then let the cancellation on."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
