"""Sandboxes of one attempt: the agent's, and the clean ones for its grader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.contracts import Tidies
from gangline.domain.errors import GanglineError, ImageMissing, InvalidRequest, PrepareFailed, RuntimeFailed
from gangline.domain.placement import specs_of
from gangline.domain.sandbox import ExecResult, RuntimeStart, Sandbox
from gangline.domain.task import ExecAction, PrepareAction, RuntimeSpec, TaskRequest, decoded
from gangline.domain.usage import SessionUsage, Usage, since, summed, unmeasured
from gangline.machine.event_loop import session_task
from gangline.node.sessions.evaluation import within
from gangline.node.sessions.parts import NodeParts
from gangline.settings import plugins
from gangline.store.journal.log import AttemptKey

log = logging.getLogger("gangline.node")


class Sandboxes:
    """Starts sandboxes as they are needed; `stop` ends them all."""

    def __init__(
        self,
        key: AttemptKey,
        task: TaskRequest,
        parts: NodeParts,
        agent: Sandbox | None = None,
        *,
        whole: TaskRequest | None = None,
    ) -> None:
        """key: names the sandboxes.
        agent: the agent's, if it was started before the node's restart.
        whole: the task with all its steps, if it has any.
        """
        self._specs = specs_of(whole or task)
        self._holding: asyncio.Task[None] | None = None
        self._key = key
        self._task = task
        self._parts = parts
        self._started = [] if agent is None else [agent]
        self._beside: list[Sandbox] = []
        self._fresh: asyncio.Task[Sandbox] | None = None
        self._num_clean = 0
        self._step = ""
        """Part of a grader's name; empty in an attempt's only or first step."""

    async def next_step(self, number: int, task: TaskRequest) -> None:
        """Move on to another step in the agent's sandbox, after all processes there and in clean sandboxes were killed.

        number: 2 for the second step.
        Clean sandboxes of earlier steps stay until the attempt's end, since their usage counts for the attempt.

        Raises: RuntimeFailed, and errors of a plug-in.
        """
        agent, *graders = self._started
        await agent.kill()
        for sandbox in graders:
            with suppress(GanglineError):  # already gone
                await sandbox.kill()
        before = self._task.evaluator
        evaluator = plugins.make_evaluator(before.strategy, before.config)
        if not before.refresh_runtime and isinstance(evaluator, Tidies):
            await evaluator.tidy(agent)
        self._task, self._fresh, self._num_clean, self._step = task, None, 0, f"step{number}."

    async def prepare_step(self, actions: Sequence[PrepareAction]) -> None:
        """Run a step's actions in the agent's sandbox. Raises: PrepareFailed, and the runtime's errors."""
        assert self.agent is not None
        await _run_actions(self.agent, actions)

    @property
    def agent(self) -> Sandbox | None:
        """The agent's sandbox; None before it has started."""
        return self._started[0] if self._started else None

    @property
    def waits_for_images(self) -> bool:
        """Whether `bring_images` may take long. Raises: UnknownPlugin."""
        return any(map(self._parts.images.pulls_for, self._specs))

    async def bring_images(self) -> None:
        """Wait for the images of all of the attempt's sandboxes. Raises: like `ImageSupply.bring`, and InvalidRequest
        when the node's operator refuses a runtime."""
        for spec in self._specs:
            self._parts.allowed.check(spec.backend, spec.network)
        await self._parts.images.bring(self._attempt, self._specs)

    def hold_images(self) -> None:
        """Hold them again after the node's restart, without waiting. A failure is the grader's, when it asks."""
        self._holding = session_task(self._key.session_id, "images", self._held_again())

    async def _held_again(self) -> None:
        with suppress(GanglineError):
            await self.bring_images()

    @property
    def images(self) -> dict[str, str]:
        """Image, as the task names it -> its digest; without images that this node does not pull."""
        return self._parts.images.digests(self._attempt)

    async def start(self, role: str, spec: RuntimeSpec | None = None) -> Sandbox:
        """Start a sandbox and run its prepare actions, or take a warm one. The agent's must be the first.

        spec: None: the agent's.

        Raises: PrepareFailed, and the runtime's errors.
        """
        spec, warm = spec or self._task.runtime, self._parts.warm
        if self._parts.images.policy == "always" and self._parts.images.pulls_for(spec):
            warm = None  # its image may be an older one
        sandbox = None if warm is None else await warm.take(spec, self._task.submitter)
        if sandbox is not None:
            self._started.append(sandbox)
            return sandbox
        sandbox = await self._begun(role, spec)
        self._started.append(sandbox)
        await _prepare_all(sandbox, spec, self._parts)
        return sandbox

    async def start_beside(self, role: str, spec: RuntimeSpec) -> Sandbox:
        """Start a sandbox with another specification, for neither agent nor grader. Raises: like `start`."""
        sandbox = await self._begun(role, spec)
        self._beside.append(sandbox)
        await _prepare_all(sandbox, spec, self._parts)
        return sandbox

    async def _begun(self, role: str, spec: RuntimeSpec) -> Sandbox:
        """Raises: the runtime's errors."""
        return await _started(self._parts, spec, f"{self._attempt}.{role}", sharing=self._attempt)

    @property
    def _attempt(self) -> str:
        return f"{self._key.session_id}.{self._key.attempt}"

    async def begin_checkpoints(self) -> None:
        """Freeze the agent's prepared files if the task asks for checkpoints. Call before the agent starts.

        Raises: RuntimeUnavailable when there are none; RuntimeFailed.
        """
        if self._task.capture.checkpoints == "turn":
            assert self.agent is not None
            await self._parts.checkpoints.begin(self._key.session_id, self.agent)

    @property
    def checkpoint(self) -> Callable[[], Awaitable[str | None]] | None:
        """See `CallParts.checkpoint`."""
        agent = self.agent
        if self._task.capture.checkpoints == "none" or agent is None:
            return None
        return lambda: self._parts.checkpoints.take(self._key.session_id, agent)

    async def start_grader(self, role: str) -> Sandbox:
        """Start a clean sandbox for the evaluator within INIT's budget. Raises: RuntimeFailed, and the errors of
        `start`."""
        return await self._in_time(self.start(f"{self._step}{role}", self._task.evaluator.runtime))

    async def start_untouched(self, role: str) -> Sandbox:
        """Like `start_grader`, with the agent's specification."""
        return await self._in_time(self.start(f"{self._step}{role}"))

    async def start_control(self) -> tuple[Sandbox, Sandbox]:
        """Start clean sandboxes in place of the agent's and the grader's. They are the same one unless their
        specifications differ."""
        agents = await self.start_untouched("control")
        return agents, agents if self._task.evaluator.runtime is None else await self.start_grader("control.grader")

    async def _in_time(self, start: Coroutine[Any, Any, Sandbox]) -> Sandbox:
        budget_s = self._task.init_timeout_seconds
        out_of_time = RuntimeFailed(f"the grader's clean runtime ran out of INIT's budget of {budget_s:g} s")
        return await within(budget_s, start, out_of_time)

    async def usage(self, run: Usage | None, *, was_graded: bool) -> SessionUsage | None:
        """Returns the attempt's resource use so far; call before `stop`. None if no sandbox was started.

        run: of the agent's sandbox at the end of RUN; None if RUN did not end.
        """
        if self.agent is None:
            return None
        total, *graders = [await usage_of(sandbox) for sandbox in self._started]
        if run is None:
            return SessionUsage(agent=total)
        grading = summed([*graders, since(run, total)]) if was_graded else None
        return SessionUsage(agent=run, grading=grading)

    def prewarm(self) -> None:
        """Start the grader's sandbox while the agent runs, if the evaluator uses one and the node has prewarm
        workers."""
        if self._task.evaluator.refresh_runtime and self._parts.pools.prewarm.size:
            self._fresh = self._begin(self._prewarmed())

    async def _prewarmed(self) -> Sandbox:
        """Retry a start that fails: the agent's work depends on it."""
        async with self._parts.pools.prewarm:
            try:
                return await self.start_grader("grader")
            except GanglineError as error:
                log.warning("grader.failed session=%s attempt=%d message=%s", *self._key, error)
                return await self.start_grader("grader.again")

    def fresh(self) -> asyncio.Task[Sandbox]:
        """Returns a task for the grader's clean sandbox, which is started once."""
        if self._fresh is None:
            self._fresh = self._begin(self.start_grader("grader"))
        return self._fresh

    async def clean(self) -> Sandbox:
        """Returns a clean sandbox per call, the prewarmed one first. Raises: like `start_grader`."""
        self._num_clean += 1
        return await (self.fresh() if self._num_clean == 1 else self.start_grader(f"grader.{self._num_clean}"))

    def _begin(self, work: Coroutine[Any, Any, Sandbox]) -> asyncio.Task[Sandbox]:
        return session_task(self._key.session_id, "grader", work)

    async def settle(self) -> None:
        """Wait until a prewarmed sandbox has started or failed. The evaluator gets the error when it asks for the
        sandbox."""
        if self._fresh is not None:
            await asyncio.wait({self._fresh})

    async def drop_grader(self) -> None:
        """Stop the grader's sandbox, even while it starts. Idempotent."""
        if self._fresh is None:
            return
        self._fresh.cancel()
        await asyncio.wait({self._fresh})
        if not self._fresh.cancelled() and self._fresh.exception() is None:
            with suppress(GanglineError):  # `stop` stops it again
                await self._fresh.result().stop()

    async def stop(self) -> None:
        await self.drop_grader()
        if self._holding is not None:
            self._holding.cancel()
            await asyncio.wait({self._holding})
        if self._task.capture.checkpoints == "turn":
            self._parts.checkpoints.ended(self._key.session_id)
        for sandbox in (*self._started, *self._beside):
            try:
                await sandbox.stop()
            except Exception as error:  # still stop the others
                log.error("runtime.stop_failed runtime=%s message=%s", sandbox.runtime_id, error)
        self._parts.images.release(self._attempt)


async def start_prepared(parts: NodeParts, spec: RuntimeSpec, runtime_id: str) -> Sandbox:
    """Start a sandbox for no session yet. Leaves nothing behind if it fails. Raises: like `Sandboxes.start`."""
    sandbox = await _started(parts, spec, runtime_id)
    try:
        await _prepare_all(sandbox, spec, parts)
    except BaseException:
        await asyncio.shield(sandbox.stop())
        raise
    return sandbox


async def _started(parts: NodeParts, spec: RuntimeSpec, runtime_id: str, *, sharing: str | None = None) -> Sandbox:
    """Raises: InvalidRequest when GPUs are asked of a runtime without any, and the runtime's errors."""
    if spec.gpus and plugins.make_runtime(spec.backend).num_gpus is None:
        raise InvalidRequest(f"runtime `{spec.backend}` gives no GPUs; docker and podman do.", param="runtime.gpus")
    parts.allowed.check(spec.backend, spec.network)
    user = sharing or runtime_id
    try:
        local = await parts.images.local(user, spec)
        try:
            return await _started_here(parts, local, runtime_id, sharing)
        except ImageMissing as error:
            if local is spec:
                raise
            log.warning("image.gone runtime=%s message=%s", runtime_id, error)
        parts.images.lost(user, spec)
        try:
            return await _started_here(parts, await parts.images.local(user, spec), runtime_id, sharing)
        except ImageMissing as error:
            raise RuntimeFailed(f"its image is removed again and again: {error.message}") from error
    finally:
        if sharing is None:
            parts.images.release(user)


async def _started_here(parts: NodeParts, spec: RuntimeSpec, runtime_id: str, sharing: str | None) -> Sandbox:
    """spec: with images as they are called here."""
    seen = _named_folders(spec, parts)
    start = RuntimeStart(
        runtime_id=runtime_id,
        owner=parts.owner,
        spec=spec,
        folder=parts.runtimes_folder / runtime_id,
        proxy_port=parts.proxy_port,
        hidden=(*parts.hidden, *(folder for folder in parts.prepare_folders if folder not in seen)),
        prepare_folders=seen,
        sharing=sharing,
    )
    return await parts.start_runtime(spec.backend, start)


def _named_folders(spec: RuntimeSpec, parts: NodeParts) -> tuple[Path, ...]:
    """Returns the operator's folders for prepare actions that this specification's actions name."""
    commands = [str(action.command) for action in spec.prepare if isinstance(action, ExecAction)]
    return tuple(folder for folder in parts.prepare_folders if any(str(folder) in command for command in commands))


async def _prepare_all(sandbox: Sandbox, spec: RuntimeSpec, parts: NodeParts) -> None:
    """Run all prepare actions. A sandbox that saw folders for them is then killed: after its restart it sees none."""
    await _run_actions(sandbox, spec.prepare)
    if _named_folders(spec, parts):
        await sandbox.kill()


async def _run_actions(sandbox: Sandbox, actions: Sequence[PrepareAction]) -> None:
    for action in actions:
        if isinstance(action, ExecAction):
            await _prepare(sandbox, action)
        else:
            await sandbox.upload(action.path, decoded(action.content, action.encoding), mode=action.mode)


async def usage_of(sandbox: Sandbox) -> Usage:
    """Returns a sandbox's resource use, for the record; unmeasured if it is gone."""
    try:
        return msgspec.structs.replace(await sandbox.usage(), memory_bytes=None)
    except GanglineError as error:
        return unmeasured(error.message)


async def _prepare(sandbox: Sandbox, action: ExecAction) -> None:
    result = await sandbox.exec(action.command, timeout_s=action.timeout_seconds)
    if not result.ok:
        errors = result.stderr[-1000:].decode(errors="replace")
        raise PrepareFailed(f"prepare action {action.command[:200]!r} {describe_end(result)}: {errors}")


def describe_end(result: ExecResult) -> str:
    """Returns how a command ended, for a message."""
    if result.timed_out:
        return "ran out of time"
    if result.memory_kill:
        return f"was {result.memory_kill}"
    return f"exited {result.exit_code}" if result.signal is None else f"was ended by signal {result.signal}"
