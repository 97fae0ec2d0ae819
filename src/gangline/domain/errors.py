"""One tree of errors, by the boundary that broke.

    GanglineError
    ├── CallerError            a request that cannot be answered
    │   ├── InvalidRequest     400
    │   │   ├── ReplyNotFound  continues a reply that the session does not have
    │   │   ├── ImageMissing   the machine lacks the image, and it is not pulled
    │   │   └── ForkDiverged   a fork's agent sent another request than its parent's
    │   │       └── ResumeDiverged  retryable: the same, in a session that continues after a lost node
    │   ├── Unauthorized       401
    │   ├── SessionOver        403: the session takes no more model calls
    │   ├── ForeignRequest     403: from another site's web page, or for another host
    │   ├── ReadOnly           403: a signed-in browser with read-only access
    │   ├── NotFound           404
    │   ├── MethodNotAllowed   405: the path has other methods
    │   ├── Conflict           409
    │   │   └── NodeIdTaken    another node uses the id
    │   ├── RequestTimeout     408: the body did not arrive
    │   ├── UnsupportedMediaType 415: a body that is not JSON, or has an unknown compression
    │   ├── UpgradeRefused     426: WebSocket is not supported
    │   ├── LimitExceeded      413: a request beyond its limits
    │   │   └── TooMany        429, retryable: concurrency limit reached
    │   ├── ActionRefused      a tool's action failed: no such file, a command still runs
    │   ├── UnknownPlugin      400, lists the known ones
    │   ├── InvalidGroup       an incomplete group, for a trainer that needs whole ones
    │   └── OutOfTasks         a trainer ran out of tasks before its groups were complete
    ├── EngineError            the inference engine
    │   ├── EngineUnavailable  retryable: down, refused, reset, timed out, 5xx
    │   │   └── EngineMalformed  502: its answer cannot be parsed
    │   ├── EngineRefused      the engine answered 4xx
    │   │   └── MessagesRefused  its chat template refuses the conversation: not the agent's fault
    │   ├── ContextOverflow    prompt and reply do not fit the context
    │   ├── EngineIncapable    no token ids or no log-probs: its replies cannot be trained on
    │   └── WeightsNotLoaded   retryable: not all engines loaded a trainer's weights; lists each one's
    ├── RuntimeFault           the sandbox
    │   ├── RuntimeUnavailable this machine cannot run it; names the missing package
    │   ├── RuntimeFailed      retryable: did not start, or died
    │   ├── PullFailed         retryable: an image cannot be pulled, in the registry's words
    │   │   └── PullPostponed  not now: its registry is down or busy, or the disk is full; costs no attempt
    │   ├── EnvironmentFailed  retryable: an environment's server did not start, ended, or does not answer
    │   ├── FilesNotKept       a recorded session's files are needed to grade it again
    │   └── PrepareFailed      retryable: a prepare command of the task failed
    ├── HarnessError           the agent program
    │   ├── ActionServerFailed the sandbox's action server ended, or gives no valid answer
    │   ├── ToolUnavailable    a tool's service failed, or is not allowed: not the agent's fault
    │   └── GradingSpoiled     the agent's files prevent its grading
    ├── BuilderError
    ├── EvaluatorError
    │   ├── GraderUnavailable  a grader's service failed: not the agent's fault
    │   └── TaskAtFault        the task's grading is wrong: not the agent's fault
    ├── StoreError             retryable: database, journal, disk
    │   ├── DiskFull
    │   └── OtherVersion
    └── NodeError              ours
        ├── LeaseLost          the session was leased to another node
        ├── NodeDraining       retryable: the node takes no more sessions
        ├── TooManyFiles       retryable: this process or its machine has too many open files
        ├── DrainTimeout       504, retryable: model calls did not end before a weight update
        ├── PortUnavailable    the address to listen on is taken, or not ours
        ├── ServerUnavailable  retryable: the rollout server does not answer
        └── ClusterUnavailable retryable: no Ray cluster answers

Cancellation is never wrapped. A limit that a session reached is an outcome, not an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar, Literal

import msgspec

from gangline.domain.plain import plain_text

Boundary = Literal["caller", "engine", "runtime", "harness", "builder", "evaluator", "store", "node"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure as data."""

    boundary: Boundary
    code: str
    message: str
    retryable: bool


class GanglineError(Exception):
    """Root of the tree. The message states the failure and the remedy."""

    boundary: ClassVar[Boundary] = "node"
    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    """HTTP status on our own API."""
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: str | int | float | None) -> None:
        self.message = plain_text(message)
        super().__init__(self.message)
        self.details = details

    def failure(self) -> Failure:
        return Failure(boundary=self.boundary, code=self.code, message=self.message, retryable=self.retryable)


class CallerError(GanglineError):
    boundary = "caller"
    code = "caller_error"
    status = 400


class InvalidRequest(CallerError):
    code = "invalid_request"


class ReplyNotFound(InvalidRequest):
    """A model call continues from a reply that this session does not have."""

    code = "previous_response_not_found"


class ImageMissing(InvalidRequest):
    """The machine lacks the image of a sandbox, and it is not pulled."""

    code = "image_missing"


class ForkDiverged(InvalidRequest):
    """A fork's model call differs from the recorded call that would answer it."""

    code = "fork_diverged"
    boundary = "harness"


class ResumeDiverged(ForkDiverged):
    """A model call differs from the record that would answer it, in a session that began on another node."""

    code = "resume_diverged"
    retryable = True


class Unauthorized(CallerError):
    code = "unauthorized"
    status = 401


class SessionOver(CallerError):
    """A model call in a session that was fenced or has used up its turns."""

    code = "session_over"
    status = 403


class ForeignRequest(CallerError):
    """A request from another site's web page, or for another host."""

    code = "foreign_request"
    status = 403


class ReadOnly(CallerError):
    """A signed-in browser with read-only access requested a change."""

    code = "read_only"
    status = 403


class NotAllowed(CallerError):
    """The caller's role does not open the route."""

    code = "not_allowed"
    status = 403


class NotFound(CallerError):
    code = "not_found"
    status = 404


class MethodNotAllowed(CallerError):
    """`allow` in the details lists the path's methods."""

    code = "method_not_allowed"
    status = 405


class Conflict(CallerError):
    code = "conflict"
    status = 409


class NodeIdTaken(Conflict):
    """A node with another data folder has this id and was heard from recently."""

    code = "node_id_taken"


class RequestTimeout(CallerError):
    """The client stopped sending its request."""

    code = "request_timeout"
    status = 408
    retryable = True


class UnsupportedMediaType(CallerError):
    code = "unsupported_media_type"
    status = 415


class UpgradeRefused(CallerError):
    code = "upgrade_refused"
    status = 426


class LimitExceeded(CallerError):
    code = "limit_exceeded"
    status = 413


class TooMany(LimitExceeded):
    """Others have to end first."""

    code = "too_many"
    status = 429
    retryable = True


class QuotaExceeded(LimitExceeded):
    """A quota of the caller's tenant; `details` has its name, and when it is free again."""

    code = "quota_exceeded"
    status = 429


class ActionRefused(CallerError):
    """A tool's action was not carried out; `reason` is a short code such as `not_found`."""

    code = "action_refused"

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message, reason=reason)
        self.reason = reason


class UnknownPlugin(CallerError):
    code = "unknown_plugin"

    @classmethod
    def named(cls, kind: str, name: str, known: Iterable[str]) -> UnknownPlugin:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return cls(f"unknown {kind} {name!r}.{hint} Known: {', '.join(names) or 'none'}.")


class InvalidGroup(CallerError):
    code = "invalid_group"


class OutOfTasks(CallerError):
    code = "out_of_tasks"


class EngineError(GanglineError):
    boundary = "engine"
    code = "engine_error"
    status = 502


class EngineUnavailable(EngineError):
    code = "engine_unavailable"
    status = 503
    retryable = True


class EngineMalformed(EngineUnavailable):
    """The engine answered, but its answer is not a reply: not JSON, not HTTP, without choices, with impossible ids.

    Calls fail over as if the engine had not answered. If no other engine takes the call, the client gets a 502.
    """

    code = "engine_malformed"
    status = 502


class EngineRefused(EngineError):
    code = "engine_refused"


class MessagesRefused(EngineRefused):
    """The model's chat template refuses a conversation even after fitting, but accepts a plain one."""

    code = "messages_refused"


class ContextOverflow(EngineError):
    """The prompt, with the requested reply, is longer than the model's context."""

    code = "context_length_exceeded"
    status = 400


class EngineIncapable(EngineError):
    code = "engine_incapable"


class WeightsNotLoaded(EngineError):
    """A weight update failed, entirely or in part. Pushing again repairs both."""

    code = "weights_not_loaded"
    retryable = True


class RuntimeFault(GanglineError):
    boundary = "runtime"
    code = "runtime_fault"


class RuntimeUnavailable(RuntimeFault):
    code = "runtime_unavailable"
    status = 422


class RuntimeFailed(RuntimeFault):
    code = "runtime_failed"
    retryable = True


class PullFailed(RuntimeFault):
    """An image cannot be pulled here: it does not exist, or not for this machine, or it needs credentials."""

    code = "pull_failed"
    status = 502
    retryable = True


class PullPostponed(PullFailed):
    """An image cannot be pulled here now: its registry is down, too slow or busy, or this machine's disk is full."""

    code = "pull_postponed"
    status = 503


class PrepareFailed(RuntimeFault):
    code = "prepare_failed"
    retryable = True


class EnvironmentFailed(RuntimeFault):
    """The server of a session's environment did not start, has ended, or does not answer."""

    code = "environment_failed"
    retryable = True


class FilesNotKept(RuntimeFault):
    """A recorded session is graded again, and its evaluator reads files that were not kept with it."""

    code = "files_not_kept"


class HarnessError(GanglineError):
    boundary = "harness"
    code = "harness_error"


class ToolsNotRendered(HarnessError):
    """The harness depends on tools, and the model's chat template does not render them."""

    code = "tools_not_rendered"


class GradingSpoiled(HarnessError):
    """The agent's files or actions made the grader fail: the session's own failure, never an infrastructure fault."""

    code = "grading_spoiled"


class ActionServerFailed(HarnessError):
    """A sandbox's action server no longer works. It belongs to the agent, so this is the session's own failure."""

    code = "action_server_failed"


class ToolUnavailable(HarnessError):
    """A service that an agent's tool needs is down, gives no usable answer, or is not allowed for this task."""

    code = "tool_unavailable"


class BuilderError(GanglineError):
    boundary = "builder"
    code = "builder_error"


class EvaluatorError(GanglineError):
    boundary = "evaluator"
    code = "evaluator_error"


class GraderUnavailable(EvaluatorError):
    """A service that a grader needs is down, slow, or gives no usable answer. No control session is run: it would only
    show whether the service works by now."""

    code = "grader_unavailable"


class TaskAtFault(EvaluatorError):
    """A mistake in the task's grading that shows only for some answers. It is not the agent's fault, so no control
    session is run."""

    code = "task_at_fault"


class StoreError(GanglineError):
    boundary = "store"
    code = "store_error"
    retryable = True


class OtherVersion(StoreError):
    """The data was written by a version of Gangline that this one cannot read: retrying does not help."""

    code = "other_version"
    retryable = False


class DiskFull(StoreError):
    code = "disk_full"
    status = 507


class NodeError(GanglineError):
    boundary = "node"
    code = "node_error"
    retryable = True


class LeaseLost(NodeError):
    code = "lease_lost"
    status = 409
    retryable = False


class NodeDraining(NodeError):
    code = "node_draining"
    status = 409


class TooManyFiles(NodeError):
    """The process may open no more files: see `open_files`. Sessions that fail for this are given back."""

    code = "too_many_open_files"
    status = 503


class DrainTimeout(NodeError):
    code = "drain_timeout"
    status = 504


class PortUnavailable(NodeError):
    code = "port_unavailable"
    retryable = False


class ServerUnavailable(NodeError):
    code = "server_unavailable"
    status = 503


class ClusterUnavailable(NodeError):
    code = "cluster_unavailable"
    status = 503


def errors_by_code() -> dict[str, type[GanglineError]]:
    """Returns all loaded error classes by code, including plug-ins'. A class that inherits its code is represented by
    its parent."""
    found: dict[str, type[GanglineError]] = {}
    waiting: list[type[GanglineError]] = [GanglineError]
    while waiting:
        kind = waiting.pop()
        found.setdefault(kind.code, kind)
        waiting.extend(kind.__subclasses__())
    return found
