"""One attempt at one session: the runtime starts, the harness runs, traces are built, the outcome is graded.

Laws
- In every case the runtime is stopped, the session's key is revoked and the result names the boundary of a failure.
- Budgets count a stage's own time, not waiting for a pool or being held by the gate.
- When RUN ends, everything is fenced and killed before POSTRUN begins: see `harness.run`.
- A reward is given by the evaluator or not at all: see `grading.postrun`.
- An attempt with steps goes through all stages once per step, in one sandbox, with a new key each time: see
  `grading.steps`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from gangline.domain.completion import Completion
from gangline.domain.contracts import HarnessContext
from gangline.domain.errors import NodeError, RuntimeFailed
from gangline.domain.ids import new_secret
from gangline.domain.lifecycle import UNGRADED, Stage
from gangline.domain.sandbox import Sandbox
from gangline.domain.session import Lease, SessionResult, StageTiming
from gangline.domain.task import TaskRequest
from gangline.domain.usage import Usage
from gangline.machine.event_loop import is_fault, to_end
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.node.environments.session_environments import SessionEnvironments
from gangline.node.replay.replay import Replay
from gangline.node.sessions.adoption import RESTARTED, AttemptNote, RunEnd
from gangline.node.sessions.evaluation import within
from gangline.node.sessions.failures import failure_of, log_failed, unfinished
from gangline.node.sessions.grading.postrun import Graded, Postrun
from gangline.node.sessions.grading.steps import Steps
from gangline.node.sessions.harness.run import HarnessRun, Prepared, check_tools_are_shown, over_limit
from gangline.node.sessions.parts import NodeParts
from gangline.node.sessions.replay.files import keep_files
from gangline.node.sessions.replay.forks import replay_of
from gangline.node.sessions.sandboxes import Sandboxes
from gangline.node.sessions.stages import StageClock
from gangline.sandbox.keeper.kept import KeptSandbox
from gangline.settings import plugins
from gangline.store.journal.log import AttemptKey, AttemptOpened

log = logging.getLogger("gangline.node")

_STOP_S = 30.0
"""Seconds that tearing down a runtime should take at most."""


class Attempt:
    """Run `live()` once. Cancelling it (a cancelled session, a lost lease) leaves nothing behind.

    Long because it has every stage of an attempt.
    """

    def __init__(
        self,
        lease: Lease,
        parts: NodeParts,
        *,
        adopted: tuple[AttemptNote, KeptSandbox] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`adopted`: the attempt's state from before the restart; see `Attempt.adopted`."""
        self.lease = lease
        self.key = AttemptKey(lease.session_id, lease.attempt)
        self.stages = StageClock(self.key, clock)
        self.is_done = False
        """Whether it has a result, which is being delivered."""
        self._parts = parts
        request = TaskRequest.model_validate(lease.task)
        self._steps = Steps(request) if request.steps else None
        self._task = request if self._steps is None else self._steps.task
        """The current step's, in a task with steps."""
        self._adopted = adopted
        agent = None if adopted is None else adopted[1]
        self._sandboxes = Sandboxes(self.key, self._task, parts, agent, whole=request)
        self._environments = self._new_environments()
        self._session: ModelSession | None = None
        self._run: HarnessRun | None = None
        self.waits_for_image = False
        self.has_run = adopted is not None
        """Whether its agent has started: then the lease cannot be given back as unused."""

    @classmethod
    async def adopted(cls, note: AttemptNote, sandbox: KeptSandbox, parts: NodeParts) -> Attempt:
        """Returns an attempt from before the node's restart. Its session answers calls from then on."""
        attempt = cls(note.lease, parts, adopted=(note, sandbox))
        attempt.stages.go_on("run" if note.ended is None else "postrun", note.entered_at, note.timings)
        if note.ended is None:
            completions = await parts.journal.read(attempt.key)
            replay = await attempt._replay(completions)
            session = attempt._open_session(note.key_digest, replay, *completions)
            session.failures.node = RESTARTED
        log.info("session.adopted session=%s attempt=%d stage=%s", *attempt.key, attempt.stage)
        return attempt

    async def live(self) -> SessionResult:
        """Run all four stages, once per step. Raises only unexpected errors: see `broken`."""
        try:
            end, graded = await self._graded_run()
            if self._steps is not None:
                while self._steps.goes_on(graded):
                    self._task = self._steps.task
                    end, graded = await self._graded_run()
                graded = self._steps.combined(graded)
            return await self._result(end, graded)
        finally:
            await self._end()

    async def broken(self, error: BaseException) -> SessionResult:
        """Returns the result of an attempt that ended with an unexpected error: its cause, and the calls that were
        answered."""
        failure = failure_of(error, self.lease.session_id)
        log_failed(self.key, self.stage, failure)
        try:
            completions = await self._parts.journal.read(self.key)
        except Exception as unread:
            log.error("session.calls_not_read session=%s attempt=%d message=%s", *self.key, unread)
            completions = ()
        held_out = self._task.held_out
        return unfinished(self.lease, self._parts.node_id, failure, completions, held_out=held_out)

    async def _graded_run(self) -> tuple[RunEnd, Graded]:
        """Run all four stages once. Raises only CancelledError."""
        end = await self._reach_end()
        self.stages.move("postrun")
        if end.outcome in UNGRADED:
            await self._sandboxes.drop_grader()
        else:
            await self._sandboxes.settle()
        async with self._parts.pools.postrun:
            with self.stages.within("postrun", self._task.evaluation_timeout_seconds):
                return end, await self.grade(end)

    # -- the node's view -----------------------------------------------------------------------------------------

    @property
    def stage(self) -> Stage:
        return self.stages.stage

    @property
    def since(self) -> float:
        """When it entered this stage, or began working in it. Unix time, UTC, seconds."""
        return self.stages.since

    @property
    def _opened(self) -> AttemptOpened:
        return AttemptOpened(*self.key, self.lease.task_id, self.lease.fence, self._task.held_out)

    def overdue_s(self) -> float | None:
        """Seconds by which its current work exceeds its budget; None while it waits."""
        return self.stages.overdue_s(0.0 if self._session is None else self._session.meter.held_s)

    def tell_spent(self) -> None:
        """Report how much of RUN's budget is used, for a restart of the node."""
        if self._run is not None:
            self._run.tell_spent()

    async def evict(self, why: str) -> bool:
        """End an agent that used too much of the machine. Returns whether it was running."""
        return self.stage == "run" and self._run is not None and await self._run.evict(why)

    async def usage(self) -> Usage:
        """Returns the resource use of the agent's sandbox. Raises: RuntimeFailed when the sandbox is gone."""
        agent = self._sandboxes.agent
        return Usage(disk_bytes=None) if agent is None else await agent.usage()

    def exceeds(self, usage: Usage) -> str | None:
        """Returns why the agent's own limit ends it; None: it does not."""
        return over_limit(usage, self._task.runtime.limits)

    # -- INIT and RUN --------------------------------------------------------------------------------------------

    async def _reach_end(self) -> RunEnd:
        """Returns the end of RUN, or of an error before it. Raises only CancelledError."""
        if self._adopted is not None and (ended := self._adopted[0].ended) is not None:
            self.stages.add(StageTiming("run", self._adopted[0].entered_at, ended.ended_at))
            return ended
        try:
            prepared = await self.prepare()
            async with self._place_in_run(prepared):
                end = await self.run(prepared)
        except Exception as error:
            failure = failure_of(error, self.lease.session_id)
            end = RunEnd(
                outcome="infra_error", failure=failure, harness_exit=None, artifacts={}, ended_at=self.stages.now()
            )
        if end.outcome == "infra_error" and end.failure is not None:
            log_failed(self.key, self.stage, end.failure)
        return end

    async def prepare(self) -> Prepared:
        """INIT: the agent's sandbox, its session and its harness, started here or before the node's restart.

        Raises: NodeError, RuntimeFailed, StoreError, and errors of plug-ins.
        """
        if self._adopted is not None:
            assert self._session is not None
            if self._sandboxes.waits_for_images:
                self._sandboxes.hold_images()
            note, sandbox = self._adopted
            harness = plugins.make_harness(self._task.agent.harness, self._task.agent.settings)
            return Prepared(
                sandbox=sandbox,
                session=self._session,
                harness=harness,
                launch=None,
                spent_s=sandbox.spent_s,
                since=note.entered_at,
            )
        if self._session is None:
            if self._parts.serves(self.lease.session_id):  # another node may still take the lease
                raise NodeError(
                    f"a session of its caller's own has the id {self.lease.session_id!r} open on this node."
                )
            await self._parts.journal.open_attempt(self._opened)
        if self._sandboxes.agent is None and self._sandboxes.waits_for_images:
            await self._wait_for_images()
        budget_s = self._task.init_timeout_seconds
        async with self._parts.pools.init:
            with self.stages.within("init", budget_s):
                out_of_time = RuntimeFailed(f"INIT ran out of its budget of {budget_s:g} s")
                return await within(budget_s, self._prepared(), out_of_time)

    async def _wait_for_images(self) -> None:
        """Without a place in INIT, so that sessions whose images are here go ahead."""
        self.waits_for_image = True
        self.stages.move("init")
        try:
            await self._sandboxes.bring_images()
        finally:
            self.waits_for_image = False
            self.stages.move("init")

    async def run(self, prepared: Prepared) -> RunEnd:
        """RUN: the harness's work. Raises: RuntimeFailed, and errors of an agent in the node's process."""
        budget_s = self._task.timeout_seconds - prepared.spent_s
        with self.stages.within("run", budget_s, prepared.since):
            self._sandboxes.prewarm()
            self.has_run = True
            self._run = HarnessRun(prepared, self._task, self._note, self.stages.now)
            try:
                end = await self._run.ended()
            except Exception:
                self.has_run = bool(prepared.session.tree)  # else its command may not have started
                raise
        if self._environments is None:
            return end
        await self._environments.fence()
        record = self._environments.record(list(prepared.session.tree))
        return msgspec.structs.replace(end, artifacts=end.artifacts | record)

    @asynccontextmanager
    async def _place_in_run(self, prepared: Prepared) -> AsyncGenerator[None]:
        """Wait in READY for a slot in RUN and hold it. A harness that runs already does not wait."""
        places = self._parts.pools.run
        async with AsyncExitStack() as place:
            if prepared.launch is not None:
                with self.stages.within("ready"):
                    await place.enter_async_context(places)
            elif places.num_free > 0:
                await place.enter_async_context(places)
            yield

    @property
    def _images(self) -> dict[str, str]:
        """See `SessionResult.images`."""
        return ({} if self._adopted is None else self._adopted[0].images) | self._sandboxes.images

    def _note(self, ended: RunEnd | None) -> AttemptNote | None:
        """Returns the state for a restart of the node; None if it cannot continue: environments and steps end with the
        node."""
        assert self._session is not None
        if self._environments is not None or self._steps is not None:
            return None
        return AttemptNote(
            lease=self.lease,
            key_digest=self._session.key_digest,
            timings=self.stages.timings,
            entered_at=self.since,
            ended=ended,
            images=self._images,
        )

    async def _prepared(self) -> Prepared:
        task, parts = self._task, self._parts
        sandbox = await self._prepared_sandbox()
        session = await self._new_session()
        harness = plugins.make_harness(task.agent.harness, task.agent.settings)
        parts.allowed.check_template(task.capture.template_kwargs)
        check_tools_are_shown(harness, task, parts.backends.policy.views())
        instruction, servers = task.instruction, task.agent.mcp_servers
        base_url = f"{sandbox.proxy_url or ''}/s/{self.lease.session_id}"
        if (environments := self._environments) is not None:
            await environments.start(sandbox, session.session_id, session.spec.environment_key)
            session.environments = environments.offered
            instruction = environments.instruction
            servers = servers | environments.servers(sandbox.proxy_url and base_url, session.key)
        context = HarnessContext(
            session_id=self.lease.session_id,
            task_id=self.lease.task_id,
            instruction=instruction,
            model=task.agent.model_name or parts.model,
            base_url=base_url,
            node_url=f"http://127.0.0.1:{parts.proxy_port}/s/{self.lease.session_id}",
            api_key=session.key,
            runtime=sandbox,
            env=task.agent.env,
            max_turns=task.agent.max_turns,
            mcp_servers=servers,
            skills=task.agent.skills,
            network=task.runtime.network,
            search_sources=parts.search_sources,
            mcp_sources=parts.mcp_sources,
            environments=session.environments,
        )
        return Prepared(sandbox=sandbox, session=session, harness=harness, launch=await harness.prepare(context))

    async def _prepared_sandbox(self) -> Sandbox:
        if self._steps is not None and self._steps.number > 1:
            await self._sandboxes.next_step(self._steps.number, self._task)
            self._environments = self._new_environments()
        else:
            await self._sandboxes.start("agent")
            await self._sandboxes.begin_checkpoints()
        if self._steps is not None:
            await self._sandboxes.prepare_step(self._steps.prepare)
        assert self._sandboxes.agent is not None
        return self._sandboxes.agent

    def _new_environments(self) -> SessionEnvironments | None:
        """None without environments."""
        return SessionEnvironments(self._task, self._sandboxes.start_beside) if self._task.environments else None

    async def _new_session(self) -> ModelSession:
        """Open the step's session, with its own key. Its conversations may continue earlier steps'."""
        completions: list[Completion] = []
        if self._session is not None:
            self._parts.close_session(self.lease.session_id)
            completions = list(await self._parts.journal.read(self.key))
        return self._open_session(new_secret("gls"), await self._replay(), *completions)

    async def _replay(self, completions: Sequence[Completion] = ()) -> Replay | None:
        """Returns the records to repeat, if any. completions: recorded before a restart of the node."""
        if self._task.fork is None and not self._task.is_durable:
            return None
        return await replay_of(self.lease, self._task, self._parts, completions)

    def _open_session(self, key: str | bytes, replay: Replay | None, *completions: Completion) -> ModelSession:
        if self._parts.turns is not None and self._task.is_durable:
            self._parts.turns.follow(self.key, self.lease.fence, completions)
        spec = session_spec(self.lease, self._task, key, () if self._adopted is not None else completions)
        self._session = self._parts.open_session(spec, completions, self._sandboxes.checkpoint, replay)
        return self._session

    # -- POSTRUN -------------------------------------------------------------------------------------------------

    async def grade(self, end: RunEnd) -> Graded:
        """POSTRUN: build the traces and the reward. Raises only CancelledError."""
        agent = self._sandboxes.agent
        if self._task.evaluator.keep_files and end.outcome not in UNGRADED and agent is not None:
            end = msgspec.structs.replace(end, artifacts=end.artifacts | await keep_files(agent))
        postrun = Postrun(
            self.key,
            self._task,
            self._parts,
            self._sandboxes,
            self.stages,
            task_id=self.lease.task_id,
            environments=None if self._environments is None else self._environments.all,
        )
        return await postrun.graded(end)

    async def _result(self, end: RunEnd, graded: Graded) -> SessionResult:
        agent = self._sandboxes.agent
        return SessionResult(
            session_id=self.lease.session_id,
            task_id=self.lease.task_id,
            node_id=self._parts.node_id,
            attempt=self.lease.attempt,
            fence=self.lease.fence,
            outcome=graded.outcome,
            run_outcome=None if end.outcome == graded.outcome else end.outcome,
            failure=graded.failure,
            reward=graded.reward,
            reward_details=graded.details,
            harness_exit=end.harness_exit,
            trajectory=graded.trajectory,
            completions=graded.completions,
            timings=self.stages.timings,
            artifacts=graded.artifacts,
            limits={} if agent is None else agent.limits(),
            images=self._images,
            usage=await self._sandboxes.usage(end.usage, was_graded=end.outcome not in UNGRADED),
            held_out=self._task.held_out,
        )

    async def _end(self) -> None:
        """Leave nothing behind. An error here does not lose the result. Raises only CancelledError."""
        try:
            self.stages.move("postrun", _STOP_S)
            await to_end(self._clean())
            self.stages.move("postrun")
        except BaseException as error:
            if not is_fault(error):
                raise
            log.error("session.not_cleaned session=%s attempt=%d", *self.key, exc_info=error)

    async def _clean(self) -> None:
        """Clean all parts, even if some fail."""
        self._run = None  # it refers to this attempt: the cycle would keep the whole session in memory
        async with AsyncExitStack() as parts:
            parts.push_async_callback(self._sandboxes.stop)
            if self._environments is not None:
                parts.push_async_callback(self._environments.close)
            if self._parts.turns is not None and self._task.is_durable:
                parts.callback(self._parts.turns.leave, self.key)
            if self._session is not None:
                parts.callback(self._parts.close_session, self.lease.session_id)
                await self._session.fence("the session has ended")


def session_spec(lease: Lease, task: TaskRequest, key: str | bytes, before: Sequence[Completion] = ()) -> SessionSpec:
    """before: records of earlier steps, which do not count towards this step's limits."""
    agent = task.agent
    own = [completion for completion in before if not completion.of_environment]
    num_calls = len({completion.started_at for completion in own})
    num_tokens = sum(len(completion.sampled_ids) for completion in own)
    return SessionSpec(
        session_id=lease.session_id,
        task_id=lease.task_id,
        attempt=lease.attempt,
        key=key,
        environment_key=new_secret("gle") if task.environments else None,
        capture=task.capture,
        sample_index=lease.sample_index,
        max_turns=None if agent.max_turns is None else agent.max_turns + num_calls,
        max_sampled_tokens=None if agent.max_sampled_tokens is None else agent.max_sampled_tokens + num_tokens,
        max_repeated_actions=agent.max_repeated_actions,
    )
