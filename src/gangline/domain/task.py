"""A task: what to solve. Written by people and trainers, immutable once accepted.

Source: Polar, A.3 (field names), with additions that are all optional.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.ids import ID_PATTERN

__all__ = [
    "AgentSpec",
    "BuilderSpec",
    "CaptureSpec",
    "EvaluatorSpec",
    "ExecAction",
    "LimitsSpec",
    "NetworkPolicy",
    "PrepareAction",
    "RuntimeSpec",
    "TaskRequest",
    "WriteAction",
    "task_digest",
]

NetworkPolicy = Literal["none", "proxy", "full"]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ExecAction(_Spec):
    """Run a shell command in the runtime before the harness starts."""

    type: Literal["exec"]
    command: str
    """Given to `sh -c` in `workdir`; a non-zero exit fails INIT."""
    timeout_seconds: float = Field(default=300, gt=0)


class WriteAction(_Spec):
    """Write a file into the runtime before the harness starts."""

    type: Literal["write"]
    path: str = Field(min_length=1)
    """Relative to `workdir`, or absolute inside the runtime."""
    content: str
    mode: int = Field(default=0o644, ge=0, le=0o777)


PrepareAction = Annotated[ExecAction | WriteAction, Field(discriminator="type")]


class LimitsSpec(_Spec):
    """What a runtime may use. A runtime reports which of these it really enforces."""

    memory_bytes: int | None = Field(default=None, gt=0)
    cpus: float | None = Field(default=None, gt=0)
    max_pids: int | None = Field(default=512, gt=0)
    max_file_bytes: int | None = Field(default=None, gt=0)


class RuntimeSpec(_Spec):
    """The sandbox a harness runs in."""

    backend: str = "sandbox"
    """Name of a runtime plug-in: `sandbox`, or `process` (no isolation)."""
    image: str | None = None
    """Root file system: an image name or a folder, as the backend understands it; None is the host's, read-only."""
    network: NetworkPolicy = "proxy"
    workdir: str = "/workspace"
    """Where the harness starts."""
    env: dict[str, str] = Field(default_factory=dict)
    prepare: tuple[PrepareAction, ...] = ()
    limits: LimitsSpec = LimitsSpec()


class AgentSpec(_Spec):
    """The harness and how it is set."""

    harness: str
    """Name of a harness plug-in."""
    model_name: str | None = None
    """Model name the harness is told; None is the engine's served model."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Checked against the harness's own configuration type at submit."""
    env: dict[str, str] = Field(default_factory=dict)
    max_turns: int | None = Field(default=None, gt=0)
    """Model calls before the session is ended with outcome `turn_limit`; None is no limit."""


class CaptureSpec(_Spec):
    """How the session's model calls are captured."""

    tier: Literal["auto", "observe"] = "auto"
    """`auto` stitches exact ids wherever the engine takes them; `observe` lets the engine render every prompt."""
    thinking: Literal["follow_template", "retain"] = "follow_template"
    """At a new user turn, where the template strips earlier thinking: start a new chain as deployment would see it,
    or stitch on."""


class BuilderSpec(BaseModel):
    """How completions become traces. Other fields belong to the strategy and are checked by it."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    strategy: str = "prefix_merging"

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class EvaluatorSpec(_Spec):
    """How the outcome becomes a reward."""

    strategy: str = "session_completed"
    config: dict[str, Any] = Field(default_factory=dict)
    """Checked against the evaluator's own configuration type at submit."""
    refresh_runtime: bool = False
    """Grade in a clean runtime, prepared like the agent's, that the agent never touched."""


class TaskRequest(_Spec):
    """What to solve: the body of `POST /v1/tasks`."""

    task_id: str | None = Field(default=None, pattern=ID_PATTERN)
    """Chosen by the caller to make submitting idempotent; None lets the server choose."""
    instruction: str
    num_samples: int = Field(default=1, ge=1, le=4096)
    """Sessions in the group."""
    timeout_seconds: float = Field(default=1200, gt=0)
    """RUN's budget: the harness's own time, without queues and gates."""
    init_timeout_seconds: float = Field(default=300, gt=0)
    evaluation_timeout_seconds: float = Field(default=300, gt=0)
    max_attempts: int = Field(default=3, ge=1, le=100)
    """How often a session is started again after an infrastructure fault."""
    runtime: RuntimeSpec = RuntimeSpec()
    agent: AgentSpec
    capture: CaptureSpec = CaptureSpec()
    builder: BuilderSpec = BuilderSpec()
    evaluator: EvaluatorSpec = EvaluatorSpec()
    callback_url: str | None = Field(default=None, pattern=r"^https?://")
    metadata: dict[str, Any] = Field(default_factory=dict)
    """The caller's own; never read by us."""


def task_digest(task: TaskRequest) -> str:
    """Digest of the content, without the id: equal digests are the same task."""
    body = task.model_dump_json(exclude={"task_id"})
    return hashlib.sha256(body.encode()).hexdigest()
