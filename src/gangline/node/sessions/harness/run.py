"""RUN of one attempt: the harness works until it ends, or until its budget, a limit or the node's disk ends it.

When RUN ends, for any reason, first the session's key is fenced, then every process of the sandbox is killed, after a
grace period if the task grants one. So nothing is sampled or written while a session is graded, and tokens sampled
before are kept.

Log files in the HOME of a harness's program are kept as artifacts, limited in size and not trusted. They are read by a
command in the sandbox, so they contain only files the agent could read, and only regular files. The end of a long file
is kept, where a failed run reports its reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import msgspec

from gangline.domain.contracts import AgentRun, Harness, Launch, Logged, depends_on_tools
from gangline.domain.errors import EngineIncapable, Failure, GanglineError, RuntimeFailed, ToolsNotRendered
from gangline.domain.lifecycle import Outcome
from gangline.domain.node_views import BackendView, TemplateFacts
from gangline.domain.plain import plain_text
from gangline.domain.sandbox import ExecResult, Sandbox
from gangline.domain.session import HarnessExit
from gangline.domain.task import LimitsSpec, TaskRequest
from gangline.domain.template_findings import lacks
from gangline.domain.usage import Usage
from gangline.machine.event_loop import session_task
from gangline.node.calls.session import ModelSession
from gangline.node.sessions.adoption import AttemptNote, RunClock, RunEnd, annotate, rejoin, run_harness, tell_spent
from gangline.node.sessions.failures import failure_of
from gangline.node.sessions.sandboxes import describe_end, usage_of

MAX_LOG_BYTES = 256 << 10
_KILL_GRACE_S = 15.0

log = logging.getLogger("gangline.node")

MAX_FILES = 16
MAX_FILE_BYTES = 128 << 10
_TIMEOUT_S = 10.0
_MAX_NAMES_BYTES = 64 << 10

# Patterns come from the adapter and are expanded here; the names they match come from the agent and never are.
_LIST = 'cd && for name in {patterns}; do [ -f "$name" ] && [ ! -L "$name" ] && printf "%s\\0" "$name"; done; true'


def check_tools_are_shown(harness: Harness, task: TaskRequest, backends: Sequence[BackendView]) -> None:
    """Refuse an agent when no engine's template renders any conversation, or when it depends on tools and no engine
    renders them or reads their calls.

    An engine without that information passes, and so does a node without engines.

    Raises: EngineIncapable, ToolsNotRendered.
    """
    agent = task.agent
    templates = [backend.template for backend in backends]
    if templates and all(template.refuses for template in templates):
        raise EngineIncapable(f"{backends[0].model}: {lacks(templates[0])[0]}")
    if not depends_on_tools(harness, task) or agent.allow_unrendered_tools or not backends:
        return
    why = next((why for why in map(_why_no_tools, templates) if why is not None), None)
    if why is not None and all(_why_no_tools(template) is not None for template in templates):
        raise ToolsNotRendered(
            f"the chat template of {backends[0].model} {why}, and the harness {agent.harness} depends "
            "on tools: the model would not know what it can do. Serve a model whose template renders tools (vLLM and "
            "SGLang take another one with --chat-template), choose a harness that works without tools, or set "
            "agent.allow_unrendered_tools."
        )


def _why_no_tools(template: TemplateFacts) -> str | None:
    if template.renders_tools is False:
        return "does not render tools"
    if template.refuses_tools:
        return f"refuses a conversation with a tool call ({template.refuses_tools})"
    return "writes tool calls in a format that is not known here" if template.reads_tools is False else None


async def collect_logs(sandbox: Sandbox, patterns: Sequence[str]) -> dict[str, bytes]:
    """Returns artifact name (`harness.logs/` and the path in HOME) -> content. Never raises a runtime's error: a
    missing log is no reason to lose a session."""
    found: dict[str, bytes] = {}
    try:
        for name in await _names(sandbox, patterns):
            result = await sandbox.exec(
                ["tail", "-c", str(MAX_FILE_BYTES), "--", name],
                cwd=sandbox.home,
                timeout_s=_TIMEOUT_S,
                max_output_bytes=MAX_FILE_BYTES,
            )
            if result.ok:
                found[f"harness.logs/{name}"] = result.stdout
    except GanglineError as error:
        log.warning("harness.logs_failed runtime=%s message=%s", sandbox.runtime_id, error)
    return found


async def _names(sandbox: Sandbox, patterns: Sequence[str]) -> list[str]:
    if not patterns:
        return []
    listing = _LIST.format(patterns=" ".join(patterns))
    result = await sandbox.exec(listing, timeout_s=_TIMEOUT_S, max_output_bytes=_MAX_NAMES_BYTES)
    names = [name.decode() for name in result.stdout.split(b"\0")[:-1] if _is_text(name)]
    return names[:MAX_FILES]


def _is_text(name: bytes) -> bool:
    try:
        return name.decode().isprintable()
    except UnicodeDecodeError:
        return False


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that is ready for RUN."""

    sandbox: Sandbox
    """The agent's sandbox."""
    session: ModelSession
    harness: Harness
    launch: Launch | AgentRun | None
    """None: the harness is already running, started before the node's restart."""
    spent_s: float = 0.0
    """Seconds of RUN's budget used before the restart."""
    since: float | None = None
    """When RUN was entered before the restart; Unix time, UTC, seconds."""


class HarnessRun:
    """Run `ended()` once."""

    def __init__(
        self,
        prepared: Prepared,
        task: TaskRequest,
        note: Callable[[RunEnd | None], AttemptNote | None],
        now: Callable[[], float],
    ) -> None:
        """note: makes the note for a restart of the node; called with None while the harness runs.
        now: Unix time, UTC, seconds.
        """
        self._prepared = prepared
        self._task = task
        self._note = note
        self._now = now
        self._clock = RunClock(prepared.session.meter, prepared.spent_s)
        self._num_before = 0 if prepared.launch is None else len(prepared.session.tree)
        """Records of the attempt's earlier steps."""
        self._evicted: Failure | None = None
        """Why the harness was ended for its use of the machine."""

    async def ended(self) -> RunEnd:
        """Run the harness to its end. Raises: RuntimeFailed, and errors of an agent in the node's process."""
        sandbox, harness = self._prepared.sandbox, self._prepared.harness
        result = await self._executed()
        usage = await usage_of(sandbox)
        self._note_excess(usage)
        logs = await collect_logs(sandbox, harness.logs) if isinstance(harness, Logged) else {}
        replay = self._prepared.session.replay
        lineage = {} if replay is None else replay.record()
        verdict = self._verdict(result, await self._prepared.session.failures.found())
        end = RunEnd(
            outcome=verdict.outcome,
            failure=verdict.failure,
            harness_exit=verdict.exit,
            artifacts=logs | lineage | {"harness.stdout": result.stdout, "harness.stderr": result.stderr},
            ended_at=self._now(),
            usage=usage,
        )
        try:
            await annotate(sandbox, self._note(end))
        except GanglineError as error:
            return msgspec.structs.replace(end, outcome="infra_error", failure=error.failure())
        return end

    async def evict(self, why: str) -> bool:
        """End a harness that used too much of the machine. It counts as the agent's failure and is graded like others.

        Returns whether this call ended it.
        """
        if self._evicted is not None:
            return False
        self._evicted = _disk_limit(why)
        with suppress(RuntimeFailed):  # already gone
            await self._prepared.sandbox.kill()
        return True

    def tell_spent(self) -> None:
        """Report how much of RUN's budget is used, for a restart of the node."""
        tell_spent(self._prepared.sandbox, self._clock.spent_s)

    async def _executed(self) -> ExecResult:
        """Returns the command's result, or its output so far if something else ended it."""
        sandbox, session = self._prepared.sandbox, self._prepared.session
        execution = session_task(session.session_id, "command", self._execute())
        limit = asyncio.create_task(session.limit_reached.wait())
        budget = asyncio.create_task(session.meter.elapse(self._task.timeout_seconds - self._prepared.spent_s))
        is_over = False
        try:
            await asyncio.wait({execution, limit, budget}, return_when=asyncio.FIRST_COMPLETED)
            result = execution.result() if execution.done() else None
            is_over = not execution.done() and (budget.done() or limit.done())
        finally:
            limit.cancel()
            budget.cancel()
            grace_s = self._task.agent.grace_seconds if self._has_processes else 0.0
            if not is_over and not grace_s:
                execution.cancel()
            await session.fence("the session has ended")
            if not execution.done():  # the result of the kill must not pass for its own end
                await annotate(sandbox, None)
            await sandbox.kill(grace_s=grace_s if not execution.done() else 0.0)
            # Its output is kept if its budget or a limit ended it. The kill has ended it already.
            await asyncio.wait({execution}, timeout=_KILL_GRACE_S)
            execution.cancel()
            await asyncio.wait({execution, limit, budget})
        return result or _cut_short(execution)

    @property
    def _has_processes(self) -> bool:
        """Whether the agent is a program in the sandbox; an agent in the node's process is cancelled instead."""
        return self._prepared.launch is None or isinstance(self._prepared.launch, Launch)

    async def _execute(self) -> ExecResult:
        if self._prepared.launch is None:
            return await rejoin(self._prepared.sandbox)
        return await run_harness(self._prepared.sandbox, self._prepared.launch, self._note(None), MAX_LOG_BYTES)

    def _note_excess(self, usage: Usage) -> None:
        """Note that the runtime itself ended the harness for its disk use, if it did."""
        if self._evicted is None and (why := over_limit(usage, self._task.runtime.limits)) is not None:
            self._evicted = _disk_limit(why)

    def _verdict(self, result: ExecResult, broken: Failure | None) -> _Verdict:
        """Returns the outcome of RUN. Reaching a limit is an outcome, however the harness reacted to the refused call.

        broken: our failure that the last calls met, if any.
        """
        if self._evicted is not None:
            ended = HarnessExit(exit_code=result.exit_code, signal=result.signal)
            return _Verdict("agent_error", self._evicted, ended)
        replay = self._prepared.session.replay
        if replay is not None and replay.diverged is not None:
            return _Verdict("infra_error", replay.diverged, HarnessExit(exit_code=None))
        if self._prepared.session.limit is not None:
            return _Verdict(self._prepared.session.limit, None, HarnessExit(exit_code=None))
        outcome, failure = self._judged(result, broken)
        ended = HarnessExit(exit_code=result.exit_code, signal=result.signal, timed_out=result.timed_out)
        return _Verdict(outcome, failure, ended)

    def _judged(self, result: ExecResult, broken: Failure | None) -> tuple[Outcome, Failure | None]:
        session = self._prepared.session
        if result.memory_kill:
            message = f"the agent was {result.memory_kill} (limits.memory_bytes)"
            return "memory_limit", Failure(boundary="harness", code="memory_limit", message=message, retryable=False)
        try:
            verdict = self._prepared.harness.judge(result)
        except Exception as error:  # a plug-in's error
            return "infra_error", failure_of(error, session.session_id)
        never_fitted = verdict.ok and self._lacks_a_call and not self._num_before
        if session.failures.context is not None and broken is None and not result.timed_out and not never_fitted:
            return "token_limit", session.failures.context
        if broken is not None:
            return "infra_error", broken  # our failure: the harness could not work
        if verdict.ok and not result.timed_out:
            return self._ended_well()
        if result.timed_out:
            return "agent_timeout", None
        if session.failures.node is not None:
            return "infra_error", session.failures.node  # it gave up on the call that the node's restart interrupted
        if not session.tree and _did_not_begin(result):
            return "infra_error", _unbegun(result)
        reason = verdict.reason or f"the harness {describe_end(result)}"
        if refused := session.failures.refusals:
            reason = f"{reason}; its last requests to the model were refused: {refused}"
        failure = Failure(boundary="harness", code="harness_failed", message=plain_text(reason), retryable=False)
        return "agent_error", failure

    def _ended_well(self) -> tuple[Outcome, Failure | None]:
        if not self._lacks_a_call:
            return "completed", None
        return "no_model_call", self._prepared.session.failures.no_model_call()

    @property
    def _lacks_a_call(self) -> bool:
        """Whether the agent needs an answered call and got none."""
        made = islice(self._prepared.session.tree, self._num_before, None)
        return not self._task.agent.allow_no_model_call and all(one.of_environment for one in made)


class _Verdict(NamedTuple):
    outcome: Outcome
    failure: Failure | None
    exit: HarnessExit


def over_limit(usage: Usage, limits: LimitsSpec) -> str | None:
    """Returns why the agent's own limit ends it; None: it does not."""
    if usage.exceeded is None:
        return None
    limit = getattr(limits, usage.exceeded)
    return f"the agent's files took more than limits.{usage.exceeded} ({limit}) allows"


def _disk_limit(why: str) -> Failure:
    return Failure(boundary="harness", code="disk_limit", message=why, retryable=False)


def _did_not_begin(result: ExecResult) -> bool:
    """Whether the runtime's helper reported that the command did not start. A program could print the same text, so
    this is checked only for a session without a model call, in which no model has acted."""
    return result.exit_code in (126, 127) and result.stderr.startswith(b"gangline: ")


def _unbegun(result: ExecResult) -> Failure:
    """Returns the failure of a command that did not start. The task may be wrong, such as a PATH without the program,
    or the program may be missing on the node."""
    errors = result.stderr[:1000].decode(errors="replace").removeprefix("gangline: ").strip()
    message = (
        f"the agent's program could not be started: {errors}. Compare its command, runtime.env, runtime.limits, "
        "runtime.workdir and the programs of the image"
    )
    return Failure(boundary="runtime", code="command_not_started", message=message, retryable=False)


def _cut_short(execution: asyncio.Task[ExecResult]) -> ExecResult:
    """Returns the result of a command that was killed when its budget ended or a limit was reached."""
    end = ExecResult(exit_code=None, timed_out=True)
    if execution.cancelled() or execution.exception() is not None:
        return end
    result = execution.result()
    return msgspec.structs.replace(end, stdout=result.stdout, stderr=result.stderr, duration_s=result.duration_s)
