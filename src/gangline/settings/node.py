"""Settings of a node: its engines, its stages, its policy over model calls, and its address."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from gangline.domain.ids import ROLE_PATTERN
from gangline.settings.fields import Setting
from gangline.settings.plugins import explain, load

if TYPE_CHECKING:
    from gangline.domain.contracts import GraderEngine
    from gangline.domain.mcp_source import McpSource
    from gangline.domain.placement import Allowed
    from gangline.domain.search_source import SearchSource
    from gangline.domain.task import SamplingPolicy

_JsonTable = dict[str, Any]
SourceT = TypeVar("SourceT", "SearchSource", "McpSource")


class CallLimits(BaseModel):
    """Limits of one model call. Each is set by its name in `--call-limits`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    """Bytes of a body, decompressed."""
    max_messages: int = Field(default=4096, ge=1)
    """Messages or items of a conversation."""
    max_tools: int = Field(default=1024, ge=0)
    max_parts: int = Field(default=8192, ge=1)
    """Content parts of all messages together."""
    max_definition_bytes: int = Field(default=512 << 10, ge=1024)
    """Bytes of one field outside of the conversation: the tools with their schemas, a response format."""
    max_in_flight_bytes: int = Field(default=32 << 20, ge=1024)
    """Bytes of all bodies of a session's calls in flight."""


class RoleEngines(BaseModel):
    """Engines that answer the calls of one role, all with the same model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    urls: tuple[Annotated[str, Field(pattern=r"^https?://[^\s/]+")], ...] = Field(min_length=1)
    kind: str = "auto"
    """Engine plug-in for these engines; auto asks the engine."""
    key_env: str | None = None
    """Name of the environment variable with their API key."""
    options: _JsonTable = {}
    """Options of the engine plug-in."""
    capture: Literal["ids", "text"] | None = None
    """`text` accepts servers that report no token ids, such as a provider's API; None: the node's `capture`."""
    max_calls: int | None = Field(default=None, ge=1)
    """Maximum number of calls in flight, over all sessions of the node; others wait. None: no limit."""


def _are_labels(labels: tuple[str, ...]) -> tuple[str, ...]:
    _require_names("label", labels)
    return labels


def _names(given: tuple[str, ...]) -> tuple[str, ...]:
    """Each text may contain several names, separated by commas."""
    return tuple(name.strip() for text in given for name in text.split(",") if name.strip())


def _networks(given: tuple[str, ...]) -> tuple[str, ...]:
    from gangline.domain.task import NetworkPolicy  # noqa: PLC0415 - as above

    known = get_args(NetworkPolicy)
    for name in _names(given):
        if name not in known:
            raise ValueError(f"unknown network policy {name!r}; known: {', '.join(known)}")
    return _names(given)


def _template_names(given: tuple[str, ...]) -> tuple[str, ...]:
    from gangline.domain.task_values import why_not_an_argument  # noqa: PLC0415 - as above

    if (why := why_not_an_argument(_names(given))) is not None:
        raise ValueError(why)
    return _names(given)


def _roles_are_valid(engines: dict[str, RoleEngines]) -> dict[str, RoleEngines]:
    _require_names("role", engines)
    return engines


def _require_names(kind: str, names: Iterable[str]) -> None:
    """Raises: ValueError."""
    for name in names:
        if re.fullmatch(ROLE_PATTERN, name) is None:
            raise ValueError(
                f"{name[:100]!r} is no {kind}: 1 to 64 letters, digits, `.`, `_` or `-`, of which the first is a "
                "letter or digit"
            )


def _read_policy(policy: dict[str, _JsonTable]) -> SamplingPolicy:
    # Building the task models takes a tenth of a second, which `--help` should not spend.
    from gangline.domain.task import SamplingPolicy  # noqa: PLC0415

    return SamplingPolicy.model_validate(policy)


def _policy_is_valid(policy: dict[str, _JsonTable] | None) -> dict[str, _JsonTable] | None:
    if policy is not None:
        try:
            _read_policy(policy)
        except ValidationError as error:
            raise ValueError(explain(error)) from error
    return policy


def _read_engine(engine: _JsonTable) -> GraderEngine:
    """Raises: ValueError."""
    from gangline.domain.contracts import GraderEngine  # noqa: PLC0415 - as above

    given = msgspec.convert(engine, GraderEngine)
    if unknown := sorted(engine.keys() - set(given.__struct_fields__)):
        raise ValueError(f"unknown field {unknown[0]!r}; known: {', '.join(given.__struct_fields__)}")
    if not given.url.startswith(("http://", "https://")):
        raise ValueError("url must begin with http:// or https://")
    return given


def _read_source(source: _JsonTable) -> SearchSource:
    """Raises: ValueError."""
    from gangline.domain.search_source import SearchSource  # noqa: PLC0415 - as above

    return _fitting(msgspec.convert(source, SearchSource))


def _read_mcp_source(source: _JsonTable) -> McpSource:
    """Raises: ValueError."""
    from gangline.domain.mcp_source import McpSource  # noqa: PLC0415 - as above

    return _fitting(msgspec.convert(source, McpSource))


def _fitting(source: SourceT) -> SourceT:
    """Raises: ValueError."""
    if (problem := source.problem()) is not None:
        raise ValueError(problem)
    return source


def _each(read: Callable[[_JsonTable], object]) -> AfterValidator:
    """Whether `read` takes each table; an error names it."""

    def are_valid(tables: dict[str, _JsonTable]) -> dict[str, _JsonTable]:
        for name, table in tables.items():
            try:
                read(table)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return tables

    return AfterValidator(are_valid)


def _are_no_policy(engines: dict[str, _JsonTable]) -> dict[str, _JsonTable]:
    if "policy" in engines:
        raise ValueError("`policy` is the name of the engine that serves the agents: choose another")
    return engines


class NodeSettings(BaseModel):
    """Settings of `gangline node`, in the table [node]."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    engines: Annotated[tuple[str, ...], Setting(option="--engine", words=True)] = ()
    """URLs of inference engines; the option is repeatable."""
    engines_later: bool = False
    """Start without engines; they are added later by a trainer, or by gangline backend add."""
    node_id: Annotated[str | None, Setting(option="--id")] = None
    """Id of the node. A second node with the same id is refused. Default: node-HOSTNAME."""
    labels: Annotated[tuple[str, ...], Setting(option="--label", words=True), AfterValidator(_are_labels)] = ()
    """Labels that tasks may require in `runtime.node_labels`, such as gpu; the option is repeatable. Every node also
    has its machine's architecture.
    """
    runtimes: Annotated[tuple[str, ...], Setting(words=True), AfterValidator(_names)] = ()
    """Runtimes that tasks may use, such as sandbox,docker; others are refused. Default: all installed ones, including
    process, whose agents are processes of this machine.
    """
    networks: Annotated[tuple[str, ...], Setting(words=True), AfterValidator(_networks)] = ()
    """Network policies that tasks may use, such as none,proxy; others are refused. Default: none,proxy,list,full."""
    template_kwargs: Annotated[tuple[str, ...], Setting(words=True), AfterValidator(_template_names)] = ()
    """Arguments of chat templates that tasks may set in capture.template_kwargs, such as enable_thinking,thinking;
    others are refused. Default: the arguments that control how much a model thinks, and which thoughts its prompt
    keeps.
    """
    engine_kind: str = "auto"
    """Engine plug-in for these engines; auto asks the engine."""
    engine_options: _JsonTable = {}
    """Options of the engine plug-in, as JSON: {"parsers": {"thinking": "qwen3", "tools": "hermes"}}."""
    engine_wait_s: Annotated[float, Setting(option="--engine-wait"), Field(ge=0)] = 60.0
    """Seconds until a running engine must answer."""
    engine_key_env: str | None = None
    """Name of the environment variable with the engine's API key."""
    role_engines: Annotated[dict[str, RoleEngines], AfterValidator(_roles_are_valid)] = {}
    """Engines that answer the calls of a role, instead of the others, as JSON: {"critic": {"urls":
    ["http://127.0.0.1:8001"]}}; also with kind, key_env, options and capture like the others, and max_calls in flight.
    Agents select the role by a header, or by the model pool/critic. Weight updates do not reach these engines.
    """
    affinity_slack: Annotated[int, Field(ge=0)] = 0
    """Sessions of one task share an engine while it has fewer than this many more than the least loaded."""
    session_places: Literal["auto", "on", "off"] = "auto"
    """Sessions whose contexts do not fit the engines' prefix caches together wait before a call, instead of computing
    their contexts again. For engines that tell the size of their cache: vLLM, and SGLang. auto: once an engine has
    computed contexts again that its cache should have held.
    """
    places_wait_s: Annotated[float, Setting(option="--places-wait"), Field(gt=0)] = 600.0
    """Seconds after which a waiting session goes before all others."""
    capture: Literal["ids", "text"] = "ids"
    """ids, or text for engines that report no token ids (their rows cannot be trained on)."""
    sampling: Annotated[dict[str, _JsonTable] | None, AfterValidator(_policy_is_valid)] = None
    """Policy over the harness's sampling parameters, as JSON: {"temperature": {"override": 1}}."""
    grader_engines: Annotated[dict[str, _JsonTable], AfterValidator(_are_no_policy), _each(_read_engine)] = {}
    """Models that graders may use, as JSON: {"judge": {"url": "https://host/v1", "model": "m", "key_env": "KEY"}};
    prompt_price and completion_price are per million tokens.
    """
    search_sources: Annotated[dict[str, _JsonTable], _each(_read_source)] = {}
    """Places that tools of agents may search, as JSON: {"papers": {"kind": "local", "path": "/data/papers"},
    "web": {"kind": "tavily", "key_env": "TAVILY_API_KEY", "fetch_pages": true}}."""
    mcp_servers: Annotated[dict[str, _JsonTable], _each(_read_mcp_source)] = {}
    """MCP servers over HTTP whose URLs tasks may name for an agent in the node, as JSON: {"notes": {"url":
    "https://host/mcp", "key_env": "NOTES_KEY"}}."""
    reward_functions: Annotated[tuple[str, ...], Setting(option="--reward-function", words=True)] = ()
    """Python functions, as module:function, that tasks may name for their reward; the option is repeatable."""
    call_limits: CallLimits = CallLimits()
    """Limits of one model call, as JSON: {"max_body_bytes": 8388608, "max_messages": 4096}."""
    run_slots: Annotated[int, Field(ge=1)] = 16
    """Agents that run at once."""
    ready_slots: Annotated[int, Field(ge=0)] = 8
    """Prepared sandboxes that wait for a run slot; 0 prepares a sandbox only when a slot is free."""
    init_workers: Annotated[int, Field(ge=1)] = 4
    """Sandboxes prepared at the same time."""
    prewarm_workers: Annotated[int, Field(ge=0)] = 2
    """Clean grading sandboxes prepared at the same time while agents run; 0 prepares each after its agent."""
    postrun_workers: Annotated[int, Field(ge=1)] = 4
    """Sessions graded at the same time."""
    breaker_faults: Annotated[int, Field(ge=0)] = 8
    """Consecutive sessions with the same fault of the node after which it pauses leasing; 0 never pauses."""
    breaker_pause_s: Annotated[float, Setting(option="--breaker-pause"), Field(ge=0.1)] = 10.0
    """Seconds of the first pause; each failed try doubles it."""
    stuck_after_s: Annotated[float, Setting(option="--stuck-after"), Field(ge=0)] = 60.0
    """Seconds beyond its budget after which a session is reported as stuck."""
    disk_reserve_gib: Annotated[float | None, Setting(option="--disk-reserve"), Field(ge=0)] = None
    """GiB to keep free on the data folder's disk: below it the node accepts no sessions, below half of it it ends the
    agent with the largest sandbox. 0: no reserve. Default: 2, or 5 % of a smaller disk.
    """
    checkpoint_gib: Annotated[float, Field(ge=0)] = 8.0
    """GiB that checkpoints of sessions may use on the data folder's disk; beyond it the session that uses most loses
    its oldest checkpoint.
    """
    checkpoint_hold_s: Annotated[float, Setting(option="--checkpoint-hold"), Field(ge=0)] = 600.0
    """Seconds that a session's checkpoints outlive it."""
    pull: Literal["never", "if_missing", "always"] = "if_missing"
    """When the node pulls the images of docker and podman: never, if_missing (the engine lacks it), or always (its
    registry may have a newer one). Credentials are the engine's own (`docker login`).
    """
    pulls_at_once: Annotated[int, Field(ge=1)] = 3
    """Images pulled at the same time; sessions wait for them in INIT, without a place in RUN."""
    image_cache_gb: Annotated[float | None, Field(gt=0)] = None
    """Gigabytes that the layers of pulled images may take. Beyond it the least recently used images are removed, but
    only unused ones that the node itself pulled. Default: no limit; only a full disk removes images.
    """
    warm_sandboxes: Annotated[int, Field(ge=0)] = 0
    """Sandboxes that are started and prepared before a session needs them, for tasks like the most recent ones; 0: no
    warm sandboxes. Their prepare actions run once per sandbox.
    """
    warm_memory_gib: Annotated[float, Setting(option="--warm-memory"), Field(ge=0)] = 16.0
    """Bound of the sum of warm sandboxes' memory limits, in GiB."""
    warm_age_s: Annotated[float, Setting(option="--warm-age"), Field(gt=0)] = 300.0
    """Seconds after which an unused warm sandbox is stopped."""
    hooks: Annotated[tuple[str, ...], Setting(option="--hook")] = ()
    """Shell commands that get each attempt's result as JSON on stdin; the option is repeatable."""
    hook_timeout_s: Annotated[float, Setting(option="--hook-timeout"), Field(ge=0.1)] = 60.0
    """Seconds that a hook may take."""
    adopt_grace_s: Annotated[float, Setting(option="--adopt-grace"), Field(ge=0)] = 60.0
    """Seconds that running agents outlive a killed node, so that its next start can adopt them; 0 ends them."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 picks a free one."""
    public_url: str | None = None
    """URL under which other machines reach it. Default: its address, or the machine's name if it listens on every
    address."""
    allowed_hosts: Annotated[tuple[str, ...], Setting(option="--allowed-host", words=True)] = ()
    """Additional host names under which clients reach the control routes, such as a reverse proxy's; the option is
    repeatable. Its own address, loopback and the host of --public-url are always allowed.
    """
    no_token: Annotated[bool, Setting(unset="--with-token")] = False
    """Require no control token. Any program on this machine can then run commands."""

    def policy(self) -> SamplingPolicy | None:
        """`sampling`, in the form that the node applies."""
        return None if self.sampling is None else _read_policy(self.sampling)

    def allowed(self) -> Allowed:
        """`runtimes`, `networks` and `template_kwargs`, in the form that the node uses. Raises: UnknownPlugin."""
        from gangline.domain.placement import Allowed  # noqa: PLC0415 - as above

        for name in self.runtimes:
            load("runtime", name)
        settings = {"networks": self.networks, "template_kwargs": self.template_kwargs}
        given = {name: frozenset(names) for name, names in settings.items() if names}
        return Allowed(runtimes=frozenset(self.runtimes) or None, **given)

    def engines_of_graders(self) -> dict[str, GraderEngine]:
        """`grader_engines`, in the form that the node uses."""
        return {name: _read_engine(engine) for name, engine in self.grader_engines.items()}

    def sources_of_search(self) -> dict[str, SearchSource]:
        """`search_sources`, in the form that the node uses."""
        return {name: _read_source(source) for name, source in self.search_sources.items()}

    def sources_of_mcp(self) -> dict[str, McpSource]:
        """`mcp_servers`, in the form that the node uses."""
        return {name: _read_mcp_source(source) for name, source in self.mcp_servers.items()}

    def disk_reserve_bytes(self) -> int | None:
        return None if self.disk_reserve_gib is None else int(self.disk_reserve_gib * (1 << 30))
