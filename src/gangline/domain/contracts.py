"""The Protocols that plug-ins implement. Each plug-in has its own pydantic `Config` type.

A runtime, harness, builder or evaluator is found through an entry point (group `gangline.<kind>s`), including the
built-in ones. See `gangline.settings.plugins`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import msgspec
from pydantic import BaseModel

from gangline.domain.child_work import ChildWork
from gangline.domain.completion import CompletionTree
from gangline.domain.environment import EnvironmentCall, GradedEnvironment, SessionEnvironment
from gangline.domain.lifecycle import Outcome
from gangline.domain.mcp_source import McpSource
from gangline.domain.sandbox import (
    ExecResult,
    Sandbox,
    SideServices,
)
from gangline.domain.search_source import SearchSource
from gangline.domain.session import HarnessExit
from gangline.domain.task import McpServer, NetworkPolicy, TaskRequest
from gangline.domain.trajectory import Trajectory

Capability = Literal["mcp_servers", "skills", "environments"]
"""A field of `AgentSpec` that only some harnesses support; `environments`: its program itself calls the tools of the
task's environments, at `BASE_URL/mcp/NAME`."""


class HarnessContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a harness adapter needs to configure and start its agent program."""

    session_id: str
    task_id: str
    instruction: str
    model: str
    base_url: str
    """`<proxy>/s/<session>` as reached from inside; adapters append their dialect's own path (`/v1` ...)."""
    node_url: str = ""
    """Like `base_url`, as reached from the node itself: for an agent that runs there."""
    api_key: str
    """The session's key."""
    runtime: Sandbox
    env: Mapping[str, str]
    max_turns: int | None = None
    mcp_servers: Mapping[str, McpServer] = {}
    """Empty unless the harness supports them."""
    skills: Mapping[str, Mapping[str, str]] = {}
    """Name -> path in the skill's folder -> content. Empty unless the harness supports them."""
    network: NetworkPolicy = "none"
    """The task's policy for its sandbox."""
    search_sources: Mapping[str, SearchSource] = {}
    """Search sources that the node's operator lets tasks use, for an agent that runs in the node."""
    mcp_sources: Mapping[str, McpSource] = {}
    """MCP servers over HTTP that the node's operator lets such an agent use."""
    environments: Mapping[str, SessionEnvironment] = {}
    """The session's environments with tools, for an agent that runs in the node. A program in the sandbox finds them in
    `mcp_servers`, under the same names."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The command that runs the agent."""

    command: str | Sequence[str]
    env: Mapping[str, str] = {}
    stdin: bytes | None = None


AgentRun = Callable[[], Coroutine[Any, Any, ExecResult]]
"""The run of an agent that lives in the node and acts in the sandbox.

It is awaited once, in RUN, and cancelled when it does not end with its runtime, so it must end when calls are refused
and commands are killed. Its result is in the form of a process's: exit code, stdout and stderr, which it must limit
itself. It ends with the node, and its session is retried.
"""


class HarnessVerdict(msgspec.Struct, frozen=True):
    """Whether the agent program itself worked, by evidence: events and files rather than exit codes alone."""

    ok: bool
    reason: str = ""


class Harness(Protocol):
    """An adapter for one agent program. Constructed with its validated `Config`, once per session."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]]

    async def prepare(self, context: HarnessContext) -> Launch | AgentRun:
        """Write the program's configuration into the runtime. Returns the command that runs it, or the run itself.

        Raises: HarnessError when the program is missing or has an unsupported version, with the command that installs
        it.
        """
        ...

    def judge(self, result: ExecResult) -> HarnessVerdict: ...


@runtime_checkable
class SupportsCapabilities(Protocol):
    """A harness that translates common task fields for its program; other harnesses reject these fields."""

    takes: ClassVar[frozenset[Capability]]


@runtime_checkable
class DependsOnTools(Protocol):
    """A harness whose program acts through the tools of the provider's API. It does not work with a model that is not
    shown them, and starts only if its task allows that."""

    @property
    def needs_tools(self) -> bool: ...


def depends_on_tools(harness: Harness, task: TaskRequest) -> bool:
    """Whether the agent acts through tools of the provider's API: its own, or tools from the task."""
    if not isinstance(harness, DependsOnTools):
        return False
    return harness.needs_tools or bool(task.agent.mcp_servers or task.environments)


@runtime_checkable
class Logged(Protocol):
    """A harness whose program writes log files of its run. They are kept with the session's artifacts, however the run
    ended; their content is the agent's claim."""

    logs: ClassVar[tuple[str, ...]]
    """Shell patterns, relative to HOME."""


@runtime_checkable
class VariesBetweenRuns(Protocol):
    """A harness whose program writes text into user messages or tool results that differs between equal runs."""

    varying_text: ClassVar[tuple[str, ...]]
    """Regular expressions: see `forks.tolerance`."""


@runtime_checkable
class RunsElsewhere(Protocol):
    """A harness that stands for another system's agents: their sessions cannot be run again here."""

    runs_elsewhere: ClassVar[str]
    """Why, as the rest of a sentence after "because"."""


class Builder(Protocol):
    """Turns completions into a trajectory. Pure, deterministic, linear in tokens. Constructed with its validated
    `Config`."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]]

    def build(self, tree: CompletionTree, *, session_id: str, task_id: str) -> Trajectory:
        """Raises: BuilderError."""
        ...


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    reward: float
    trace_rewards: dict[str, float] = {}
    """trace id -> reward, if an evaluator rewards traces separately; other traces get `reward`."""
    turn_scores: dict[str, float] = {}
    """completion id -> score, if an evaluator scores turns; kept with the turns (`TurnSpan.score`)."""
    details: dict[str, Any] = {}
    """The checks and their results, for people."""
    values: dict[str, float] = {}
    """All numbers from the grader, by name, for tasks with steps; empty: only `reward`."""


class GraderEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Access to a model for graders. Its calls do not belong to a session and appear in no row."""

    url: str
    """Base URL, with or without `/v1`."""
    model: str | None = None
    key_env: str | None = None
    """Name of the node's environment variable with the key; None: no key is needed."""
    prompt_price: float = 0.0
    """Price of a million prompt tokens."""
    completion_price: float = 0.0


class EvaluationContext(msgspec.Struct, frozen=True, kw_only=True):
    """The input of an evaluator. The agent's processes have been killed by then."""

    session_id: str
    instruction: str
    trajectory: Trajectory
    outcome: Outcome
    harness_exit: HarnessExit
    harness_stdout: bytes
    """Limited in size."""
    runtime: Sandbox
    """The agent's own, with its files."""
    fresh_runtime: Callable[[], Awaitable[Sandbox]]
    """A clean runtime with the same specification and preparation, never touched by the agent.

    Each call returns another one. Stopped by the node.
    """
    refresh_runtime: bool
    """Whether the task requires grading in `fresh_runtime`."""
    metadata: Mapping[str, Any]
    services_of: Callable[[Sandbox], SideServices | None] = lambda _: None
    """Returns the services of a runtime with the agent's specification, such as `runtime`, which still run; None:
    there are none."""
    is_control: bool = False
    """No agent acted: this only asks whether grading works. `runtime` is clean, and there are no traces. An evaluator
    that fails without an agent's work may use `graded_before`."""
    artifacts: dict[str, bytes] = msgspec.field(default_factory=dict[str, bytes])
    """Name -> content, filled by the evaluator: kept with the session's artifacts however grading ends, limited by the
    node."""
    kept: Mapping[str, bytes] = {}
    """Complete artifacts that an evaluator left when it first graded the session. Empty unless a recorded session is
    graded again. Its files may be missing then: reading them from `runtime` raises FilesNotKept."""
    engines: Mapping[str, GraderEngine] = {}
    """Models that the operator gives to graders, by name, and `policy`, the engine that serves the agents. An evaluator
    only calls a model that its configuration names."""
    functions: frozenset[str] = frozenset()
    """Reward functions that the operator lets tasks name, as `module:function`."""
    environment_calls: Sequence[EnvironmentCall] = ()
    """The agent's calls of the task's environments, in the order in which they ended."""
    environments: Mapping[str, GradedEnvironment] = {}
    """The environments, still running. Empty if a recorded session is graded again."""
    verdicts: MutableMapping[bytes, bytes] = msgspec.field(default_factory=dict[bytes, bytes])
    """Digest of a question -> a model's answer: a cache that the node's sessions share. Entries may disappear."""
    task_digest: str = ""
    """The same for all sessions of a task: a grader that works for one session is not broken for another."""
    graded_before: MutableMapping[bytes, bytes] = msgspec.field(default_factory=dict[bytes, bytes])
    """Work of other sessions that graders gave a reward, for control sessions: a cache like `verdicts`."""
    child_work: ChildWork | None = None
    """Runs work on untrusted text in child processes; None: there are no prepared ones."""


class Evaluator(Protocol):
    """(trajectory, artifacts, runtime) -> reward. Constructed with its validated `Config`."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]]

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: EvaluatorError when no reward can be given (never return 0 because *we* broke); GradingSpoiled when
        the agent kept it from grading."""
        ...


@runtime_checkable
class GradesClean(Protocol):
    """An evaluator that grades in `EvaluationContext.fresh_runtime` if a task requires it. With other evaluators, a
    task that sets `refresh_runtime` is rejected at submit."""

    grades_clean: ClassVar[bool]


@runtime_checkable
class Tidies(Protocol):
    """An evaluator that removes the traces of its grading from the agent's runtime, where the agent's next step
    begins."""

    async def tidy(self, runtime: Sandbox) -> None:
        """Called when no process runs there. Raises: EvaluatorError, and the runtime's errors."""
        ...


@runtime_checkable
class DropsTurns(Protocol):
    """A builder that leaves completions out of all traces, with a reason for each. With other builders, a completion in
    no trace counts as lost: the audit distinguishes the two."""

    drops_turns: ClassVar[str]


@runtime_checkable
class Controlled(Protocol):
    """An evaluator whose EvaluatorError may be the agent's doing. The node then has it grade a session in which no
    agent acted (`EvaluationContext.is_control`), with the same steps as any other. A reward in that control session
    shows that the agent spoiled its grading."""

    is_controlled: ClassVar[bool]
