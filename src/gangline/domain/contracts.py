"""The Protocols that plug-ins implement. Each plug-in has its own pydantic `Config` type beside it.

A runtime, harness, builder or evaluator is found through an entry point (group `gangline.<kind>s`); the built-in ones
come through the same door. See `gangline.settings.plugins`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import msgspec
from pydantic import BaseModel

from gangline.domain.child_work import ChildWork
from gangline.domain.completion import CompletionTree
from gangline.domain.environment import EnvironmentCall, GradedEnvironment, SessionEnvironment
from gangline.domain.lifecycle import Outcome
from gangline.domain.mcp_source import McpSource
from gangline.domain.search_source import SearchSource
from gangline.domain.session import HarnessExit
from gangline.domain.task import McpServer, NetworkPolicy, RuntimeSpec, TaskRequest
from gangline.domain.trajectory import Trajectory
from gangline.domain.usage import Usage

__all__ = [
    "AgentRun",
    "Builder",
    "Capability",
    "Channel",
    "Checkpoint",
    "CheckpointMethod",
    "Controlled",
    "DependsOnTools",
    "DropsTurns",
    "EvaluationContext",
    "Evaluator",
    "ExecResult",
    "GraderEngine",
    "GradesClean",
    "Harness",
    "HarnessContext",
    "HarnessVerdict",
    "HasServices",
    "Keepable",
    "Launch",
    "Layered",
    "Logged",
    "OutputSink",
    "Reward",
    "Runtime",
    "RuntimeHandle",
    "RuntimeStart",
    "RuntimeUser",
    "SupportsCapabilities",
    "TellsImages",
    "TellsMissing",
    "Tidies",
    "VariesBetweenRuns",
    "depends_on_tools",
    "in_binary_units",
]

Capability = Literal["mcp_servers", "skills"]
"""A field of `AgentSpec` that only some harnesses support."""

RuntimeUser = Literal["agent", "grader"]
"""Users of a sandbox, neither of them root. Not every runtime has the second one: see `RuntimeHandle.grader_home`."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def in_binary_units(num_bytes: int) -> str:
    """`2 GiB`, `1.5 MiB`, `100 bytes`."""
    power = min(max(0, num_bytes.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{num_bytes / 1024**power:.4g} {_UNITS[power]}"


OutputSink = Callable[[Literal["stdout", "stderr"], bytes], None]
"""Called with each piece of output as it comes, on the event loop."""


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a command in a runtime. Exactly one of `exit_code`, `signal`, `timed_out` is set."""

    exit_code: int | None
    signal: int | None = None
    timed_out: bool = False
    stdout: bytes = b""
    """Bounded; the front is kept, and `truncated` says when more came."""
    stderr: bytes = b""
    truncated: bool = False
    duration_s: float = 0.0
    memory_limit_bytes: int | None = None
    """The sandbox's limit of memory, where the kernel killed the command for it: its first process, or one whose
    SIGKILL a shell reports as its own exit code, 137. None otherwise, and where memory is limited per process: there
    the kernel refuses memory instead, and the program ends in its own way."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def memory_kill(self) -> str:
        """`killed: more than 2 GiB of memory`; empty where memory did not end the command."""
        limit = self.memory_limit_bytes
        return "" if limit is None else f"killed: more than {in_binary_units(limit)} of memory"


CheckpointMethod = Literal["overlay", "frozen_copy", "reflink", "copy"]
"""How a checkpoint was made.

`overlay`: its files became a frozen layer, and the sandbox goes on in a new one over it; no process of it lived.
`frozen_copy`: copied while all processes of the sandbox were stopped. `reflink`: the same or `copy`, by a file system
that shares the bytes. `copy`: copied without stopping any.
"""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a sandbox's writable folders at one time. Processes are not part of it, nor is the grader's HOME."""

    checkpoint_id: str
    """Unique."""
    runtime_id: str
    """The sandbox that it was made of."""
    owner: str
    runtime: str
    """Name of the runtime plug-in."""
    spec_digest: str
    """A sandbox over it needs the same specification."""
    number: int
    """From 1, counted in its sandbox."""
    name: str
    """As given to `checkpoint`."""
    method: CheckpointMethod
    is_frozen: bool
    """Whether no process of the sandbox ran while it was made; otherwise its files may be of different moments."""
    num_bytes: int
    """Disk usage in bytes, without files that it shares with checkpoints below it."""
    num_files: int
    made_at: float
    """Unix time, UTC, seconds."""
    folder: str
    """On the host, the runtime's own."""


class RuntimeStart(msgspec.Struct, frozen=True, kw_only=True):
    """All that a runtime needs to start one sandbox."""

    runtime_id: str
    """Unique; also names the sandbox's folder."""
    owner: str
    """Label of the node; the reaper removes labelled sandboxes that have no lease."""
    spec: RuntimeSpec
    folder: Path
    """On the host, empty, the runtime's own; removed by `stop`."""
    proxy_port: int | None = None
    """Loopback TCP port of the node's proxy on the host; the sandbox must reach it when `spec.network` is `proxy` or
    `list`."""
    hidden: tuple[Path, ...] = ()
    """Host folders that the sandbox must not see, also where they lie in a folder that it does see."""
    prepare_folders: tuple[Path, ...] = ()
    """Host folders that it sees read-only at the same path until it is first killed, and never again."""
    sharing: str | None = None
    """Sandboxes with the same name, such as those of one session, share their GPUs; None: with none."""
    base: Checkpoint | None = None
    """The sandbox begins with these files: a fork. Its folder lies beside that of the checkpoint's sandbox, and its
    owner and specification are the same."""


class Channel(Protocol):
    """Our end of a channel to a command in a sandbox: see `RuntimeHandle.channel`.

    A cancelled `read` loses nothing. The data of a cancelled `write` is still taken, whole.
    """

    async def read(self, max_bytes: int = 1 << 16) -> bytes:
        """At least one byte, at most `max_bytes`; b"" when no process holds the other end any more, and after
        `close`."""
        ...

    async def write(self, data: bytes) -> None:
        """Wait until the data is taken: a reader that is slow slows this down.

        Raises: RuntimeFailed when no process holds the other end any more, and after `close`.
        """
        ...

    async def close(self) -> None:
        """Kill the command's whole process tree, unless it has ended by itself. Idempotent."""
        ...

    async def ended(self) -> ExecResult:
        """Wait for the command's end: its exit, and the front of its stdout and stderr (1 MB each).

        Closed, or killed with its sandbox, it ended by signal 9. Raises: RuntimeFailed when the sandbox is gone.
        """
        ...


class RuntimeHandle(Protocol):
    """One started sandbox."""

    runtime_id: str
    workdir: str
    """Inside the sandbox (for `process`: a real path on the host)."""
    home: str
    """A private HOME inside the sandbox."""
    grader_home: str | None
    """HOME of the user `grader`, which no command of the agent's can enter; None where the runtime has no such user."""
    proxy_url: str | None
    """How the node's proxy is reached from inside, e.g. `http://127.0.0.1:8642`; None under network `none`."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        on_output: OutputSink | None = None,
        max_output_bytes: int = 1 << 20,
        user: RuntimeUser = "agent",
        grace_s: float = 0.0,
    ) -> ExecResult:
        """Run a command (a string goes to `sh -c`) and wait for it and its output.

        user: processes of `agent` cannot signal, trace or read those of `grader`, whose HOME is `grader_home`.

        The environment holds only PATH, HOME, LANG, the image's variables and the spec's `env`. On timeout, and when
        the caller is cancelled, the command's whole process tree is killed: with a `grace_s`, its processes get SIGTERM
        first, and SIGKILL those seconds later if they have not ended by then.
        Raises: RuntimeFailed when the sandbox is gone; RuntimeUnavailable when it has no such user.
        """
        ...

    async def channel(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: RuntimeUser = "agent",
    ) -> Channel:
        """Start a command, as `exec` does, whose descriptor 3 is the other end of a channel: a stream of bytes in both
        directions (a Unix socket without a name, which nothing else in the sandbox can reach).

        The command's standard input is empty. It lives until it ends by itself, the channel is closed, or the sandbox
        is killed or stopped. Its bytes are the agent's claims.
        Raises: as `exec`.
        """
        ...

    async def upload(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file (relative to `workdir`, or absolute inside); parents are made."""
        ...

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """Read a regular file. Untrusted: no link is followed, no path leaves the sandbox.

        Raises: NotFound, LimitExceeded, InvalidRequest (a link, a device, an escape).
        """
        ...

    async def clear(self, path: str) -> None:
        """Remove everything at `path` from outside the sandbox, even if an untrusted program left it there. Call it
        after `kill`.

        Removes a file, a link or a folder with its content, whatever its modes; empties and keeps both HOMEs, `workdir`
        and the spec's `folders`. Also removes a file or link in place of one of its parents. Makes the parent folders
        usable by their owner again. Follows no link; a missing path is no error.
        Raises: InvalidRequest when the path is not one that files can be moved through.
        """
        ...

    async def kill(self, *, grace_s: float = 0.0) -> None:
        """Kill every process in the sandbox and keep its files; a later `exec` works.

        With a `grace_s`, the processes of commands that run get SIGTERM first, and those seconds to end by themselves.
        """
        ...

    async def checkpoint(self, name: str = "") -> Checkpoint:
        """Keep the present files of the writable folders, until `Layered.release`. Commands go on, but for a pause.

        Later writes never change it. It outlives kills, and the sandbox.
        Raises: RuntimeUnavailable where `limits()["checkpoints"]` is `not supported`; RuntimeFailed.
        """
        ...

    async def reset(self, checkpoint: Checkpoint | None = None) -> None:
        """Kill every process and return to a checkpoint's files; None: to those that the sandbox began with.

        Also empties the grader's HOME. Raises: as `checkpoint`; NotFound when it was released; InvalidRequest when it
        is of another owner, runtime or specification.
        """
        ...

    async def stop(self) -> None:
        """Kill and remove everything. Idempotent."""
        ...

    def limits(self) -> dict[str, str]:
        """Name of a limit, `network`, ... -> its enforcement: `cgroup v2`, `rlimit`, ...; `not enforced`; `not set`.

        An enforcement that holds each process for itself, not all together, says `per process`. `grader_user` is there
        where `exec` takes the user `grader`.
        """
        ...

    async def usage(self) -> Usage:
        """Its resources over all its lives; those of the disk as they were last measured. An amount that the runtime
        cannot measure is None, with the reason in `measured`. Raises: RuntimeFailed when the sandbox is gone."""
        ...


class Runtime(Protocol):
    """A kind of sandbox."""

    name: ClassVar[str]

    async def check(self) -> None:
        """Raises: RuntimeUnavailable, which names the missing part and the command to run."""
        ...

    async def start(self, start: RuntimeStart) -> RuntimeHandle: ...

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        """Remove every sandbox, process, mount and folder under `root` that carries `owner`, but those in `keep`.

        Returns how many sandboxes were removed.
        """
        ...


@runtime_checkable
class TellsMissing(Protocol):
    """A runtime that can tell cheaply that it cannot run here. Nodes pass over sessions of one that cannot."""

    def missing(self) -> str | None:
        """The missing part and the command to run, after a look at installed programs alone; None: none is known."""
        ...


@runtime_checkable
class TellsImages(Protocol):
    """A runtime that can list its images. Nodes pass over sessions that need another one, which none pulls."""

    async def images(self) -> Mapping[str, Collection[str]]:
        """Folder -> names of the images directly in it; the folder `""` has those without a path, by each of their
        names (see `image_names`). Only of folders that are known wholly. Raises: RuntimeFailed, RuntimeUnavailable.
        """
        ...


@runtime_checkable
class GivesGpus(Protocol):
    """A runtime that can give sandboxes GPUs. Those of other runtimes have none."""

    @property
    def num_gpus(self) -> int:
        """How many this machine has, taken ones included."""
        ...


@runtime_checkable
class Layered(Protocol):
    """A runtime whose sandboxes have checkpoints. Those of other runtimes refuse them."""

    async def release(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint as soon as no sandbox is over it. Idempotent. A reaper removes those that were never
        released, as it does sandboxes: by `checkpoint_id`."""
        ...


@runtime_checkable
class HasServices(Protocol):
    """A runtime whose sandboxes may have the `services` of their specification. Others refuse such tasks."""

    has_services: ClassVar[bool]

    def services_of(self, runtime_id: str, spec: RuntimeSpec) -> SideServices:
        """Those beside a sandbox that is not stopped yet."""
        ...


@runtime_checkable
class ChecksSpec(Protocol):
    """A runtime that knows of some specifications, on any machine, that no node could start a sandbox of."""

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        """Called at submit. Raises: InvalidRequest, which begins with the field (`runtime.workdir`) and has the
        remedy."""
        ...


class SideServices(Protocol):
    """The services beside an agent's sandbox. The agent reaches them, so what they say is a claim, as its files are."""

    async def exec(
        self, service: str, command: str, *, timeout_s: float, user: str | None = None, max_output_bytes: int = 1 << 16
    ) -> ExecResult:
        """Run a command of `sh -c` in a service's container. user: None is the service's own.

        One that takes too long may go on until the sandbox is stopped.
        Raises: RuntimeFailed, also where there is no such service.
        """
        ...

    async def archive(self, service: str, path: str, *, max_bytes: int) -> bytes:
        """A file or folder of a service's container, as a tar archive in which it is at the top.

        Raises: NotFound where there is no such file, LimitExceeded; as `exec`.
        """
        ...


@runtime_checkable
class Keepable(Protocol):
    """A runtime whose sandboxes may live in the node's keeper, and so outlive the node's process.

    The keeper finds the runtime by its name and uses only the contract of its handles. Its sandboxes die with the
    process that started them: the keeper. Its channels have a `fileno()`: the socket that the keeper shares with the
    node.
    """

    is_keepable: ClassVar[bool]


class HarnessContext(msgspec.Struct, frozen=True, kw_only=True):
    """All that a harness adapter needs to configure and start its agent program."""

    session_id: str
    task_id: str
    instruction: str
    model: str
    base_url: str
    """`<proxy>/s/<session>` as reached from inside; adapters append their dialect's own path (`/v1` ...)."""
    node_url: str = ""
    """The same, as reached from the node itself: for an agent that runs there."""
    api_key: str
    """The session's key."""
    runtime: RuntimeHandle
    env: Mapping[str, str]
    max_turns: int | None = None
    mcp_servers: Mapping[str, McpServer] = {}
    """Empty unless the harness takes them."""
    skills: Mapping[str, Mapping[str, str]] = {}
    """Name -> path in the skill's folder -> content. Empty unless the harness takes them."""
    network: NetworkPolicy = "none"
    """The task's policy for its sandbox."""
    search_sources: Mapping[str, SearchSource] = {}
    """Places that the node's operator lets tasks search, for an agent that runs in the node."""
    mcp_sources: Mapping[str, McpSource] = {}
    """MCP servers over HTTP that the node's operator lets such an agent use."""
    environments: Mapping[str, SessionEnvironment] = {}
    """Worlds of the session that offer tools, for an agent that runs in the node. A program in the sandbox finds them
    in `mcp_servers`, under the same names."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The command that is the agent's run."""

    command: str | Sequence[str]
    env: Mapping[str, str] = {}
    stdin: bytes | None = None


AgentRun = Callable[[], Coroutine[Any, Any, ExecResult]]
"""The run of an agent that lives in the node and acts on the runtime through its handle.

It is awaited once, in RUN, and cancelled when it does not end with its runtime, so it must end when calls are refused
and commands are killed. Its result stands for a process's: exit code, stdout and stderr, bounded by itself. It dies
with the node, and its session is retried.
"""


class HarnessVerdict(msgspec.Struct, frozen=True):
    """Whether the agent program itself worked, by evidence: events and files rather than exit codes alone."""

    ok: bool
    reason: str = ""


class Harness(Protocol):
    """An adapter for one agent program. Constructed with its validated `Config`, one per session."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]]

    async def prepare(self, context: HarnessContext) -> Launch | AgentRun:
        """Write the program's configuration into the runtime and return the command that runs it, or the run itself.

        Raises: HarnessError when the program is missing or of a wrong version, with the line that installs it.
        """
        ...

    def judge(self, result: ExecResult) -> HarnessVerdict: ...


@runtime_checkable
class SupportsCapabilities(Protocol):
    """A harness that translates common task fields for its program; others reject these fields."""

    takes: ClassVar[frozenset[Capability]]


@runtime_checkable
class DependsOnTools(Protocol):
    """A harness whose program acts through the tools of the provider's API. With a model that is not shown them it is
    of no use, and starts only where its task says so."""

    @property
    def needs_tools(self) -> bool: ...


def depends_on_tools(harness: Harness, task: TaskRequest) -> bool:
    """Whether the agent acts through tools of the provider's API: its own, or those that the task gives it."""
    if not isinstance(harness, DependsOnTools):
        return False
    return harness.needs_tools or bool(task.agent.mcp_servers or task.environments)


@runtime_checkable
class Logged(Protocol):
    """A harness whose program leaves log files of its run. They are kept with the session's artifacts, however the run
    ended; their content is the agent's claim."""

    logs: ClassVar[tuple[str, ...]]
    """Shell patterns, relative to HOME."""


@runtime_checkable
class VariesBetweenRuns(Protocol):
    """A harness whose program writes text into user messages or tool results that differs between equal runs."""

    varying_text: ClassVar[tuple[str, ...]]
    """Regular expressions: see `forks.tolerance`."""


class Builder(Protocol):
    """completions -> trajectory. Pure, deterministic, linear in tokens. Constructed with its validated `Config`."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]]

    def build(self, tree: CompletionTree, *, session_id: str, task_id: str) -> Trajectory:
        """Raises: BuilderError."""
        ...


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    reward: float
    trace_rewards: dict[str, float] = {}
    """trace id -> reward, where an evaluator rewards traces separately; others get `reward`."""
    turn_scores: dict[str, float] = {}
    """completion id -> score, where an evaluator scores turns; kept with the turns (`TurnSpan.score`)."""
    details: dict[str, Any] = {}
    """The checks and their results, for people."""
    values: dict[str, float] = {}
    """All numbers that the grader gave, by name, for tasks with steps; empty: `reward` alone."""


class GraderEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Access to a model for graders. Its calls are no session's, and appear in no row."""

    url: str
    """Base URL, with or without `/v1`."""
    model: str | None = None
    key_env: str | None = None
    """Name of the node's environment variable with the key; None: it asks for none."""
    prompt_price: float = 0.0
    """Price of a million prompt tokens."""
    completion_price: float = 0.0


class EvaluationContext(msgspec.Struct, frozen=True, kw_only=True):
    """The input of an evaluator. The agent's processes are dead by then."""

    session_id: str
    instruction: str
    trajectory: Trajectory
    outcome: Outcome
    harness_exit: HarnessExit
    harness_stdout: bytes
    """Bounded."""
    runtime: RuntimeHandle
    """The agent's own, with its files."""
    fresh_runtime: Callable[[], Awaitable[RuntimeHandle]]
    """A clean runtime of the same specification, prepared the same way, never touched by the agent.

    Each call gives another one. Stopped by the node.
    """
    refresh_runtime: bool
    """True if the task requires grading in `fresh_runtime`."""
    metadata: Mapping[str, Any]
    services_of: Callable[[RuntimeHandle], SideServices | None] = lambda _: None
    """Services beside a runtime of the agent's specification, such as `runtime`, that still run; None: it has none."""
    is_control: bool = False
    """No agent acted: this asks only whether grading works. `runtime` is clean, and no trace is there. An evaluator
    that fails without an agent's work may take what `graded_before` has."""
    artifacts: dict[str, bytes] = msgspec.field(default_factory=dict[str, bytes])
    """Name -> content, for the evaluator to fill: kept with the session's artifacts however grading ends, bounded by
    the node."""
    kept: Mapping[str, bytes] = {}
    """Whole artifacts that an evaluator left when it graded the session for the first time. Empty unless a recorded
    session is graded again. Its files may not be kept then: reading them from `runtime` raises FilesNotKept."""
    engines: Mapping[str, GraderEngine] = {}
    """Models that the operator gives to graders, by name, and `policy`, the engine that serves the agents. An evaluator
    calls only one that its configuration names."""
    functions: frozenset[str] = frozenset()
    """Reward functions that the operator allows tasks to name, as `module:function`."""
    environment_calls: Sequence[EnvironmentCall] = ()
    """Calls that the agent made of the task's environments, in order of their ends."""
    environments: Mapping[str, GradedEnvironment] = {}
    """The environments, still running. Empty where a recorded session is graded again."""
    verdicts: MutableMapping[bytes, bytes] = msgspec.field(default_factory=dict[bytes, bytes])
    """Answers of models, by digests of the questions: a cache that the node's sessions share. It forgets."""
    task_digest: str = ""
    """The same for all sessions of a task: a grader that works for one of them is not broken for another."""
    graded_before: MutableMapping[bytes, bytes] = msgspec.field(default_factory=dict[bytes, bytes])
    """What sessions left that graders gave a reward, for the controls of others: a cache like `verdicts`."""
    child_work: ChildWork | None = None
    """Runs work on untrusted text in child processes; None where nobody keeps any ready."""


class Evaluator(Protocol):
    """(trajectory, artifacts, runtime) -> reward. Constructed with its validated `Config`."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]]

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: EvaluatorError when no reward can be given; never answer 0 because *we* broke. GradingSpoiled when
        the agent kept it from grading."""
        ...


@runtime_checkable
class GradesClean(Protocol):
    """An evaluator that grades in `EvaluationContext.fresh_runtime` where a task requires it. With other evaluators, a
    task that sets `refresh_runtime` is rejected on submission."""

    grades_clean: ClassVar[bool]


@runtime_checkable
class Tidies(Protocol):
    """An evaluator that removes what its grading left in the agent's runtime: the agent's next step begins there."""

    async def tidy(self, runtime: RuntimeHandle) -> None:
        """Called when no process runs there. Raises: EvaluatorError, and the runtime's errors."""
        ...


@runtime_checkable
class DropsTurns(Protocol):
    """A builder that leaves completions out of all traces, with a reason for each. With other builders, a completion in
    no trace counts as lost: the audit distinguishes the two."""

    drops_turns: ClassVar[str]


@runtime_checkable
class Controlled(Protocol):
    """An evaluator whose EvaluatorError the agent may have caused. The node then lets it grade a session in which no
    agent acted (`EvaluationContext.is_control`), where it must take the same steps as for any other. A reward in that
    control session shows that the agent spoiled its grading."""

    is_controlled: ClassVar[bool]
