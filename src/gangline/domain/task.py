"""A task: the problem, the agent program, its sandbox and its grading. Written by people and trainers, immutable once
accepted.

Source: Polar, A.3 (field names), with additions that are all optional.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from gangline.domain.ids import ID_PATTERN, ROLE_PATTERN
from gangline.domain.network import NetworkRule
from gangline.domain.patterns import checked_pattern
from gangline.domain.seeds import derived_seed
from gangline.domain.services import MAX_SERVICES, ServiceName, ServiceSpec, checked_services
from gangline.domain.task_values import (
    Argv,
    Command,
    Environment,
    FilePath,
    FolderPath,
    HostFolder,
    Image,
    Line,
    Seconds,
    Size,
    TemplateArguments,
)
from gangline.domain.vetting import TaskVerdict

NetworkPolicy = Literal["none", "proxy", "full", "list"]
SystemCall = Literal["keyring", "io_uring", "userfaultfd", "perf_events", "bpf", "vsock", "user_namespaces"]
"""Kernel interfaces that agents are refused unless their task asks for them."""
TextEncoding = Literal["utf-8", "base64"]
"""How bytes are written in JSON: as text, or in base 64 if they are not text."""


MAX_DEPTH = 64
MAX_SAMPLES = 4096


class _Spec(BaseModel):
    # JSON has no infinite number: it would be stored as null.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def decoded(content: str, encoding: TextEncoding) -> bytes:
    """Raises: ValueError when `content` does not match the encoding."""
    return content.encode() if encoding == "utf-8" else base64.b64decode(content, validate=True)


class ExecAction(_Spec):
    """Run a shell command in the runtime before the harness starts."""

    type: Literal["exec"]
    command: Command
    """Run with `sh -c` in `workdir`; a non-zero exit fails INIT."""
    timeout_seconds: Seconds = 300


class WriteAction(_Spec):
    """Write a file into the runtime before the harness starts."""

    type: Literal["write"]
    path: FilePath
    """Relative to `workdir`, or absolute inside the runtime."""
    content: str
    encoding: TextEncoding = "utf-8"
    """How `content` encodes the bytes."""
    mode: int = Field(default=0o644, ge=0, le=0o777)

    @model_validator(mode="after")
    def _is_decodable(self) -> WriteAction:
        decoded(self.content, self.encoding)
        return self


PrepareAction = Annotated[ExecAction | WriteAction, Field(discriminator="type")]


class LimitsSpec(_Spec):
    """Resource limits of a sandbox; None: no limit. A runtime reports which of these it enforces, and how."""

    memory_bytes: Size | None = 4 << 30
    """Memory of all its processes together if control groups enforce it; else of each process."""
    cpus: float | None = Field(default=2.0, gt=0, le=65_536)
    max_pids: int | None = Field(default=512, gt=0, le=4_194_304)
    max_file_bytes: Size | None = None
    """Size of one file; None: as much as `disk_bytes`."""
    disk_bytes: Size | None = 10 << 30
    """Total size of its files. An agent that exceeds it is ended: outcome `agent_error`, code `disk_limit`."""
    max_files: Size | None = 1_000_000
    """Files and folders, including empty ones. An agent that exceeds it is ended in the same way."""


class RuntimeSpec(_Spec):
    """The sandbox a harness runs in."""

    backend: str = "sandbox"
    """Name of a runtime plug-in: `sandbox`, `docker`, `podman`, or `process` (no isolation)."""
    image: Image | None = None
    """Root file system: the name of an image (`docker`, `podman`: always; `sandbox`) or a folder (`sandbox`; None: the
    host's, read-only)."""
    python: str | None = Field(default=None, pattern=r"^/[^\x00]+$")
    """A Python environment on the node's machine, such as a venv: its folder, which the runtime sees read-only at the
    same path together with the installation that it was made from. Its programs come first in `PATH`, so that `python3`
    is its interpreter. Not for containers: packages belong in their image."""
    node_labels: tuple[Annotated[str, Field(pattern=ROLE_PATTERN)], ...] = Field(default=(), max_length=16)
    """Labels that the node must have: the architecture of its machine, such as `x86_64` or `aarch64`, or a label from
    its operator, such as `gpu`. If no node has them, the task waits and reports it."""
    gpus: int = Field(default=0, ge=0, le=64)
    """GPUs for this sandbox alone (`docker`, `podman`): no other session of the machine has them meanwhile. If no node
    has as many, the task waits and reports it."""
    network: NetworkPolicy = "proxy"
    network_allow: tuple[Annotated[str, Field(max_length=300)], ...] = Field(default=(), max_length=256)
    """Addresses that network `list` opens in addition to the node's proxy: `host`, `*.domain` (all names below it) or
    an address, each with or without `:port`; the default ports are 80 and 443. An address that is not public must be
    listed itself."""
    system_calls_allow: tuple[SystemCall, ...] = ()
    """Kernel interfaces that the agent gets in addition to the default ones: browsers need `user_namespaces` for their
    own sandboxes. If an engine or the machine refuses one itself, asking for it has no effect."""
    workdir: FolderPath = "/workspace"
    """Where the harness starts."""
    folders: tuple[FolderPath, ...] = ()
    """More folders of the session, writable, such as `/logs`, for programs with built-in paths. At first empty, or with
    the image's content."""
    mounts: dict[FolderPath, HostFolder] = Field(default_factory=dict, max_length=64)
    """Folders of the node's machine that the sandbox sees read-only at other paths: path inside to the folder there
    (`sandbox`, `apptainer`, `docker`, `podman`). The node's operator must have named it, or a folder around it, in
    GANGLINE_EXPOSE."""
    env: Environment = Field(default_factory=dict)
    prepare: tuple[PrepareAction, ...] = ()
    limits: LimitsSpec = LimitsSpec()
    services: Annotated[dict[ServiceName, ServiceSpec], AfterValidator(checked_services)] = Field(
        default_factory=dict, max_length=MAX_SERVICES
    )
    """Other containers of the session, such as a database, reached by name on a network of their own (`docker`,
    `podman`). They start before `prepare` and last as long as the sandbox. They reach the outside only under network
    `full`, and never the node's proxy."""

    @field_validator("network_allow")
    @classmethod
    def _are_rules(cls, lines: tuple[str, ...]) -> tuple[str, ...]:
        for line in lines:
            NetworkRule.parse(line)
        return lines

    @model_validator(mode="after")
    def _has_its_list(self) -> RuntimeSpec:
        if self.network == "list" and not self.network_allow:
            raise ValueError("network `list` needs hosts in network_allow; for the model proxy alone write `proxy`")
        if self.network != "list" and self.network_allow:
            raise ValueError(f"network_allow is of network `list`, and network is `{self.network}`")
        return self

    @property
    def network_rules(self) -> tuple[NetworkRule, ...]:
        return tuple(map(NetworkRule.parse, self.network_allow))


class EnvironmentSpec(_Spec):
    """A tool server that is the agent's world. Each session has its own, separate from the agent, and every call is
    recorded."""

    kind: str
    """Name of a plug-in: `gymnasium`, `pettingzoo`, `textarena`, `reasoning_gym`, `openenv`, `nemo_gym`, `tau2`, or
    `mcp` for any server of the Model Context Protocol."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Checked against the kind's own configuration type at submit."""
    place: Literal["beside", "inside"] = "beside"
    """`beside`: in its own sandbox. `inside`: in the agent's, by the user `grader`, whose processes and HOME the agent
    cannot reach. It ends with the agent, and is restarted for the grader with the remaining files."""
    runtime: RuntimeSpec | None = None
    """The sandbox for `beside`. None: like the agent's, prepared in the same way, without a network."""
    hidden_tools: tuple[str, ...] = ()
    """Tools that the agent is not offered and cannot call; the grader can. A kind may hide more."""
    show_instructions: bool = True
    """Whether the server's own instructions, such as a game's first observation, are appended to the task's."""
    start_timeout_seconds: Seconds = 60
    call_timeout_seconds: Seconds = 60

    @model_validator(mode="after")
    def _has_one_sandbox(self) -> EnvironmentSpec:
        if self.place == "inside" and self.runtime is not None:
            raise ValueError("runtime is of an environment alongside the agent's sandbox, and this one is inside")
        return self


class McpServer(_Spec):
    """A server that gives the agent tools over the Model Context Protocol: a command, or a URL."""

    command: tuple[Command, ...] = ()
    """A program in the runtime and its arguments; it uses its standard streams."""
    env: Environment = Field(default_factory=dict)
    """Environment of the command."""
    url: str | None = Field(default=None, pattern=r"^https?://[^\s\x00]+$")
    """URL of a server that speaks streamable HTTP. The runtime's network policy must let the agent reach it; for an
    agent in the node, its operator must have named it in `mcp_servers`."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers sent to the URL."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> McpServer:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give either command or url")
        if self.env and not self.command:
            raise ValueError("env is of a command, and there is none")
        if self.headers and self.url is None:
            raise ValueError("headers are of a url, and there is none")
        return self


def _inside_skill(path: str) -> str:
    parts = path.split("/")
    if path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{path!r} is not a path inside the skill's folder")
    return path


_SHORT_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
McpServerName = Annotated[str, Field(pattern=_SHORT_NAME)]
SkillName = Annotated[str, Field(pattern=_SHORT_NAME)]
SkillFile = Annotated[str, AfterValidator(_inside_skill)]


class AgentSpec(_Spec):
    """The harness and its settings."""

    harness: str
    """Name of a harness plug-in."""
    model_name: str | None = None
    """Model name given to the harness; None: the engine's served model."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Checked against the harness's own configuration type at submit."""
    env: Environment = Field(default_factory=dict)
    max_turns: int | None = Field(default=None, gt=0)
    """Model calls before the session is ended with outcome `turn_limit`; None: no limit."""
    max_sampled_tokens: int | None = Field(default=None, gt=0)
    """Total sampled tokens after which the next call ends the session with outcome `token_limit`; None: no limit."""
    max_repeated_actions: int | None = Field(default=None, ge=2, le=100)
    """How often in a row the agent may do the same with the same result; the next call then ends the session with
    outcome `agent_loop`. A cycle of up to four actions counts too. None: no limit."""
    grace_seconds: float = Field(default=0.0, ge=0, le=60)
    """Seconds between SIGTERM and SIGKILL for the agent's processes, for instance to write their logs, when its time, a
    limit or a cancellation ends the session. They reach no model then."""
    allow_no_model_call: bool = False
    """Whether an agent that ends by itself without a model call has completed its task and is graded: for reference
    solutions and other programs that need no model. Otherwise its outcome is `no_model_call`, without a reward."""
    allow_unrendered_tools: bool = False
    """Whether a harness that depends on tools starts although the model's chat template does not render them: for
    prompts that describe the tools themselves, or models that should learn them."""
    mcp_servers: dict[McpServerName, McpServer] = Field(default_factory=dict)
    """Tool servers for the harness's program, by name. A harness without support for them rejects the task."""
    skills: dict[SkillName, dict[SkillFile, str]] = Field(default_factory=dict)
    """Skills for the harness's program: name -> path in the skill's folder -> content; `SKILL.md` must be among them. A
    harness without support for them rejects the task."""

    @field_validator("skills")
    @classmethod
    def _are_skills(cls, skills: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        for name, files in skills.items():
            if "SKILL.md" not in files:
                raise ValueError(f"skill {name!r} has no SKILL.md")
        return skills


class ParameterRule(_Spec):
    """The policy for one sampling parameter of the harness: overridden, clamped, or passed through."""

    override: float | None = None
    """Always sent, regardless of the harness's request."""
    default: float | None = None
    """Sent when the harness sends none."""
    min: float | None = None
    max: float | None = None
    """Bounds for the value that the harness asks for. If it sends none and there is no `default`, the provider's
    default is clamped: temperature and top_p 1, penalties 0, max_tokens and top_k without limit."""

    @model_validator(mode="after")
    def _is_consistent(self) -> ParameterRule:
        if self.override is not None and (self.default, self.min, self.max) != (None, None, None):
            raise ValueError("override leaves nothing to default, min and max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError("min is above max")
        return self


class SamplingPolicy(_Spec):
    """The operator's sampling policy, which takes precedence over the harness. Parameters without a rule pass
    unchanged."""

    temperature: ParameterRule | None = None
    top_p: ParameterRule | None = None
    top_k: ParameterRule | None = None
    max_tokens: ParameterRule | None = None
    seed: ParameterRule | None = None
    presence_penalty: ParameterRule | None = None
    frequency_penalty: ParameterRule | None = None


class CaptureSpec(_Spec):
    """How the session's model calls are captured."""

    tier: Literal["auto", "observe"] = "auto"
    """`auto` stitches exact ids wherever the engine takes them; `observe` lets the engine render every prompt."""
    thinking: Literal["follow_template", "retain"] = "follow_template"
    """At a new user turn where the template strips earlier thinking: start a new chain as deployment would see it, or
    keep stitching."""
    template_kwargs: TemplateArguments = {}
    """Arguments of the model's chat template for every call, such as {"enable_thinking": false}. They replace the
    harness's own; the record's metadata has both. The node's operator decides which names are allowed."""
    not_as_rendered: Literal["fall_back", "stitch"] = "fall_back"
    """If the template would write a stitched prompt differently, apart from the model's own turns: let the engine
    render it as deployment would see it, or send it and record that in the certificate."""
    sampling: SamplingPolicy | None = None
    """Sampling parameters that the trainer needs; a policy of the node is applied after it."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Every model call gets its own seed, derived from this one, the session's number in its group and the call's
    number in its session. An engine that samples by seeds then repeats the same tokens, as long as the harness sends
    the same. It replaces the harness's own seed; a rule of `sampling` for `seed` takes precedence. A session's next
    attempt uses the same seeds; concurrent calls of a harness are numbered as they arrive. A session that its caller
    opened is number 0."""
    empty_generation_retries: int = Field(default=0, ge=0, le=10)
    """How often a reply that ends by itself without text, thinking or a tool call is sampled again, within one model
    call. Replies that are given up are recorded and never trained on; a seed is replaced by one derived from it. If the
    last one is empty too, it is delivered. 0 delivers the first, which is what the policy sampled. Calls in tokens are
    delivered as they are."""
    volatile_system_text: tuple[Annotated[str, Field(max_length=500)], ...] | None = Field(default=None, max_length=32)
    """Regular expressions; None: the default ones, for dates, times and billing lines. Matching text of system messages
    does not make a call a new conversation: the engine receives the text of the conversation's first call, and the
    record keeps the client's."""

    checkpoints: Literal["none", "turn"] = "none"
    """`turn`: keep the files of the sandbox at each model call, before it is sampled. The record's metadata names the
    checkpoint. They last as long as the session and the node's `checkpoint_hold_s`, unless the node needs their room.
    Not every runtime supports them."""
    durable: Literal["node", "turn"] = "node"
    """`turn`: each model call's record reaches the server within about a second. If a node is lost with its disk, the
    next node answers those calls from these records and samples none of them again. `node`: the record is on the node's
    disk until the session has ended, and a session that is lost with it starts over. A fork starts over at its parent.
    """
    token_texts: bool = False
    """Keep the text of each sampled token with its id, as the engine reports it: a part of a character is U+FFFD. Tasks
    in Polar's format have it on."""
    routed_experts: bool = False
    """Keep the experts that a mixture-of-experts model chooses for each token, for trainers that replay them. Calls are
    refused if the policy's engine does not report them. Replies are requested whole: a stream arrives in one piece."""
    sampling_masks: bool = False
    """Keep the ids that top-k and top-p left to draw each token from, for trainers that replay them: such tokens can
    only be trained on with them. Calls that cut ids away are refused if the policy's engine does not report them, and
    their replies are requested whole."""
    evidence: tuple[Annotated[str, Field(max_length=100)], ...] = Field(default=(), max_length=16)
    """Other kinds of evidence to keep with each token, by the names of their plug-ins. Calls are refused if the
    policy's engine does not report them, and their replies are requested whole."""

    @field_validator("volatile_system_text")
    @classmethod
    def _are_expressions(cls, rules: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for rule in rules or ():
            checked_pattern(rule)
        return rules

    @property
    def asks_evidence(self) -> bool:
        """Whether it asks for any evidence besides the tokens."""
        return self.routed_experts or self.sampling_masks or bool(self.evidence)

    def session_seed(self, sample_index: int) -> int | None:
        """Returns the seed from which the seeds of one session's calls derive; None without `seed`."""
        return None if self.seed is None else derived_seed(self.seed, sample_index)


class BuilderSpec(BaseModel):
    """How completions become traces. Other fields belong to the strategy, which checks them."""

    model_config = ConfigDict(frozen=True, extra="allow")

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
    runtime: RuntimeSpec | None = None
    """Specification of the clean runtime, if it differs from the agent's. Only with `refresh_runtime`."""
    keep_files: bool = False
    """Keep the agent's working folder with the session, so that an evaluator that reads it can grade the session again.
    It is the artifact `files.tar`, of at most 8 MiB."""
    on_failure: Literal["none"] | float = "none"
    """Reward of a session whose grading failed although the grader works: its own work caused the failure, for instance
    a syntax error. `none` gives it no reward, which keeps it out of its group. A grader that fails for another reason
    never gives one."""
    on_unparsed: Literal["keep"] | float = "keep"
    """Highest reward of a session in which a tool call of the policy could not be parsed: 0 trains on it as a failure,
    for every trainer and in every export. It also limits the session's traces, except traces without such a call that
    the evaluator rewarded separately. `keep`: the evaluator's reward."""

    @model_validator(mode="after")
    def _has_a_use_for_its_runtime(self) -> EvaluatorSpec:
        if self.runtime is not None and not self.refresh_runtime:
            raise ValueError("runtime is that of a clean runtime: set refresh_runtime")
        return self


class SolutionSpec(_Spec):
    """A task's reference solution, for `gangline vet` and `gangline submit --oracle`. No other agent sees it."""

    command: Line | Argv | None = None
    """Solves the task in the working folder; a string is run with `sh -c`."""
    env: Environment = Field(default_factory=dict)
    """Environment of `command`."""
    prepare: tuple[PrepareAction, ...] = ()
    """Actions after the task's own, for instance to write the files of `command`."""
    files: dict[FilePath, str] = Field(default_factory=dict)
    """Path in the working folder -> content of the finished file."""
    patch: str | None = None
    """A patch for `git apply` in the working folder."""
    answer: str | None = None
    """The text that an agent would answer."""
    reward: float = 1.0
    """The reward that it earns: the top of the task's range."""
    floor: float = 0.0
    """Highest reward of an agent that does nothing."""

    @model_validator(mode="after")
    def _is_one(self) -> SolutionSpec:
        given = [self.command is not None, bool(self.files), self.patch is not None, self.answer is not None]
        if sum(given) != 1:
            raise ValueError("give one of command, files, patch and answer")
        if self.command is None and (self.env or self.prepare):
            raise ValueError("env and prepare go with command")
        if self.floor >= self.reward:
            raise ValueError("floor must be below reward")
        return self


class StepSpec(_Spec):
    """One of several runs of the agent in one sandbox, and its grading."""

    name: str = Field(min_length=1, max_length=200)
    instruction: str
    """The agent's instruction in this step."""
    prepare: tuple[PrepareAction, ...] = ()
    """Actions in the agent's sandbox before the agent starts. Clean runtimes of graders skip them."""
    timeout_seconds: Seconds | None = None
    """RUN's budget of this step; None: the task's."""
    evaluation_timeout_seconds: Seconds | None = None
    """None: the task's."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the harness for this step, which override the task's."""
    evaluator: EvaluatorSpec = EvaluatorSpec()
    solution: SolutionSpec | None = None
    """The step's reference solution, applied after the earlier steps' solutions. Agents never see it."""
    min_reward: float | dict[str, float] | None = None
    """If the number `reward`, or any of the grader's named numbers, is below this, no further step begins. A number
    that the grader did not give counts as below."""


MAX_EDIT_CHARS = 1 << 20
"""Most characters of a fork's edit."""


class ForkSpec(_Spec):
    """The recorded session whose first calls are replayed from its record to sessions of this task. The server writes
    it: see `POST /v1/sessions/{session_id}/forks`."""

    session_id: str
    attempt: int = Field(ge=1)
    turn: int = Field(ge=1)
    """Calls up to this one, in the order of their answers, are answered from the record."""
    edit: str | None = Field(default=None, max_length=MAX_EDIT_CHARS)
    """Text sent to the engine in place of the newest message after the last recorded answer: the tool's result, or the
    user's message. The agent does not see it."""
    engine: str | None = Field(default=None, pattern=ID_PATTERN)
    """A role with its own engines, which answer the calls after the fork; None: the policy's do. They must have the
    tokenizer and the chat template of the record."""


class TaskRequest(_Spec):
    """A task to solve: the body of `POST /v1/tasks`."""

    task_id: str | None = Field(default=None, pattern=ID_PATTERN)
    """Chosen by the caller to make submitting idempotent; None: the server chooses."""
    instruction: str
    """With `steps`, agents get the steps' instructions instead; this one is for people."""
    num_samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Sessions in the group."""
    enough_sessions: int | None = Field(default=None, ge=1)
    """Once this many sessions have finished their work, with tokens to train on, the others are cancelled, so that no
    group waits for its slowest sessions. That favours short sessions, so a task that is `held_out` waits for all of
    them. None: all."""
    timeout_seconds: Seconds = 1200
    """RUN's budget: the harness's own time, without queues and gates."""
    init_timeout_seconds: Seconds = 300
    evaluation_timeout_seconds: Seconds = 300
    max_attempts: int = Field(default=3, ge=1, le=100)
    """How often a session is started in all, counting restarts after an infrastructure fault."""
    runtime: RuntimeSpec = RuntimeSpec()
    agent: AgentSpec
    environments: dict[McpServerName, EnvironmentSpec] = Field(default_factory=dict)
    """Environments that the agent acts in, by name, in addition to its sandbox or instead of it."""
    capture: CaptureSpec = CaptureSpec()
    builder: BuilderSpec = BuilderSpec()
    evaluator: EvaluatorSpec = EvaluatorSpec()
    steps: tuple[StepSpec, ...] = Field(default=(), max_length=64)
    """Runs of the agent, one after another in one sandbox, each graded by its own evaluator before the next begins.
    None: one run, graded by `evaluator`."""
    step_reward: Literal["mean", "final"] = "mean"
    """How the steps' rewards become the session's: the mean over the steps that began, or the last one's."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Sessions with a higher priority are leased first."""
    submitter: str | None = Field(default=None, pattern=ID_PATTERN)
    """The requesting person or team. Within one priority, submitters with queued sessions are served in turn; None
    counts as one."""
    callback_url: str | None = Field(default=None, pattern=r"^https?://[^\s\x00]+$")
    callback_form: Literal["gangline", "polar"] = "gangline"
    """`polar`: the callback's body is the answer of `GET /rollout/task/{task_id}`. Polar's route submits such tasks."""
    callback_secret: str | None = Field(default=None, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the server's environment variable with the key that signs the callback, instead of the control token. It
    begins with GANGLINE_TASK_, or the server's GANGLINE_TASK_VARIABLES has it.
    """
    callback_expiry_seconds: Seconds | None = None
    """How long delivery of the callback is retried; None: the server's default."""
    held_out: bool = False
    """The task is for evaluation and never trained on: collectors refuse it, and `gangline data` and `gangline export`
    leave its sessions out. Runs set it on their evaluation tasks, and so does `gangline eval`. Forks inherit it."""
    fork: ForkSpec | None = None
    """The session that this task's sessions continue, from one of its turns; None: they begin at the beginning."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """The caller's own data; never read by us."""
    solution: SolutionSpec | None = None
    """The reference solution, which `gangline vet` and `gangline submit --oracle` run. Agents never see it."""
    vetting: TaskVerdict | None = None
    """The verdict of `gangline vet`. It is in the details of each reward, as `stale` if the task was changed after its
    audit."""

    @model_validator(mode="after")
    def _names_servers_once(self) -> TaskRequest:
        if twice := sorted(self.environments.keys() & self.agent.mcp_servers.keys()):
            raise ValueError(f"environments: {twice[0]!r} is the name of a server in agent.mcp_servers, too")
        return self

    @model_validator(mode="after")
    def _can_have_its_steps(self) -> TaskRequest:
        if not self.steps:
            return self
        names = [step.name for step in self.steps]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"steps: two have the name {twice[0]!r}")
        cannot = {
            "evaluator: each step has one of its own": self.evaluator != EvaluatorSpec(),
            "evaluator.keep_files: a session with steps cannot be graded again": any(
                step.evaluator.keep_files for step in self.steps
            ),
            "environments: they end with the agent's first run": bool(self.environments),
            "fork: a session with steps cannot be continued from one of its turns": self.fork is not None,
            "capture.durable `turn`: a session with steps begins anew where its node is lost": (
                self.capture.durable == "turn"
            ),
            "capture.checkpoints: they are of sessions with one run": self.capture.checkpoints != "none",
            "solution: each step has one of its own": self.solution is not None,
        }
        if why := [reason for reason, asked in cannot.items() if asked]:
            raise ValueError(f"a task with steps cannot have {'; '.join(why)}")
        return self

    @property
    def is_durable(self) -> bool:
        """Whether its records leave the node turn by turn. A fork starts over at its parent."""
        return self.capture.durable == "turn" and self.fork is None

    def at_step(self, index: int) -> TaskRequest:
        """Returns the step as its own task, without the prepare actions, which are for the agent's sandbox alone."""
        step = self.steps[index]
        changes: dict[str, Any] = {
            "instruction": step.instruction,
            "timeout_seconds": step.timeout_seconds or self.timeout_seconds,
            "evaluation_timeout_seconds": step.evaluation_timeout_seconds or self.evaluation_timeout_seconds,
            "agent": self.agent.model_copy(update={"settings": self.agent.settings | step.settings}),
            "evaluator": step.evaluator,
            "steps": (),
            "vetting": None,
        }
        return self.model_copy(update=changes)

    @model_validator(mode="after")
    def _travels(self) -> TaskRequest:
        """Check that free-form values survive JSON and MessagePack."""
        free = {
            "metadata": self.metadata,
            "agent.settings": self.agent.settings,
            "builder": self.builder.config,
            "evaluator.config": self.evaluator.config,
            **{f"environments.{name}.config": one.config for name, one in self.environments.items()},
            **{f"steps.{index}.settings": one.settings for index, one in enumerate(self.steps)},
            **{f"steps.{index}.evaluator.config": one.evaluator.config for index, one in enumerate(self.steps)},
        }
        for name, value in free.items():
            if why := _why_not_portable(value):
                raise ValueError(f"{name}: {why}")
        return self

    @model_validator(mode="after")
    def _compares_unlike_sessions(self) -> TaskRequest:
        """Reject a group whose sessions share one seed: they would be identical, with nothing to compare."""
        rule = None if self.capture.sampling is None else self.capture.sampling.seed
        if self.num_samples > 1 and rule is not None and (rule.override, rule.default) != (None, None):
            raise ValueError(
                "capture.sampling.seed: override and default give all sessions of the group the same seed, and so the "
                "same tokens; write capture.seed instead, from which every call gets its own seed"
            )
        return self


def _why_not_portable(value: Any, depth: int = 0) -> str | None:
    """Returns why a value would not survive JSON and MessagePack unchanged; None if it would."""
    if depth > MAX_DEPTH:
        return f"must not be nested deeper than {MAX_DEPTH} levels"
    match value:
        case bool() | None | str():
            return None
        case int():
            return None if -(2**63) <= value < 2**64 else "whole numbers must fit 64 bits"
        case float():
            return None if math.isfinite(value) else "numbers must be finite"
        case dict():
            inner = cast("dict[str, Any]", value).values()
        case list() | tuple():
            inner = cast("list[Any]", value)
        case _:
            return f"{type(value).__name__} has no form in JSON"
    return next((why for one in inner if (why := _why_not_portable(one, depth + 1))), None)


def task_digest(task: TaskRequest) -> str:
    """Returns the digest of the content, without the id: equal digests are the same task.

    Fields with their default value are left out, so that a field added in a later version changes no digest.
    """
    body = task.model_dump_json(exclude={"task_id"}, exclude_defaults=True)
    return hashlib.sha256(body.encode()).hexdigest()


_VETTED = {
    "instruction",
    "runtime",
    "environments",
    "evaluator",
    "steps",
    "step_reward",
    "timeout_seconds",
    "init_timeout_seconds",
    "evaluation_timeout_seconds",
}


def vetted_digest(task: TaskRequest) -> str:
    """Returns the digest of the audited content: another agent, or another number of samples, does not change it."""
    body = task.model_dump_json(include=_VETTED, exclude={"steps": {"__all__": {"solution"}}}, exclude_defaults=True)
    return hashlib.sha256(body.encode()).hexdigest()


def metadata_value(metadata: object, key: str) -> str | None:
    """Returns the value of a dotted key as text; None if it is missing."""
    for part in key.split("."):
        metadata = cast("Mapping[str, object]", metadata).get(part) if isinstance(metadata, Mapping) else None
    return None if metadata is None else str(metadata)
