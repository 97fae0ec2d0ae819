"""A node's answers: its state, its gate, its engines, and the sessions that callers opened on it.

Plain records without I/O. The node sends them as JSON, and the client reads them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from gangline.domain.errors import Boundary
from gangline.domain.lifecycle import Stage

GateMode = Literal["drain", "keep"]
BackendState = Literal["healthy", "unhealthy", "draining"]
BreakerState = Literal["closed", "open", "trying"]


class GateState(msgspec.Struct, frozen=True, kw_only=True):
    """A node's gate, which holds model calls while weights are updated."""

    is_paused: bool
    mode: GateMode | None
    """None while the gate is open."""
    version: int | None
    """Policy version last set; None: never set."""
    lease_left_s: float | None
    """None while the gate is open."""
    num_waiting: int
    num_in_flight: int
    is_drained: bool
    """Paused, with no call in flight."""
    num_expired_leases: int
    notes: tuple[str, ...] = ()
    """For people: engines that report versions themselves, so that `version` does not apply to their tokens."""


class TemplateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the engine's tokenizer and chat template. Empty and None: unknown."""

    tokenizer_digest: str = ""
    """Digest of the ids of a fixed text: engines with the same digest tokenise alike."""
    template_digest: str = ""
    """Digest of the texts of fixed conversations, without their dates."""
    appends_tool_turns: bool | None = None
    """Whether, in a sequence of calls with thinking, each prompt begins with the previous one."""
    appends_user_turns: bool | None = None
    keeps_thinking: bool | None = None
    """Whether the template keeps the thinking of turns before a user's message."""
    renders_tools: bool | None = None
    """Whether a request's tools are in its prompt. Otherwise the model cannot know them."""
    renders_tool_results: bool | None = None
    """Likewise for the results of tool calls."""
    renders_current_thinking: bool | None = None
    """Whether thinking before a call, since the last user's message, is in the prompt."""
    takes_system: bool | None = None
    """`takes_...`: the template accepts messages of this form, and its prompt contains their texts in order."""
    takes_system_alone: bool | None = None
    """Without a user's message."""
    takes_several_system: bool | None = None
    """Several system messages at the front."""
    takes_late_system: bool | None = None
    """System messages after a user's message or a reply."""
    takes_system_after_results: bool | None = None
    """System messages after the results of tool calls."""
    takes_neighbours: bool | None = None
    """Two consecutive messages of one role."""
    takes_reply_first: bool | None = None
    """Replies before any user's message."""
    takes_empty_replies: bool | None = None
    takes_user_after_results: bool | None = None
    """A user's message after the results of tool calls."""
    takes_parallel_calls: bool | None = None
    """Several calls in one reply, and their results."""
    takes_results_without_calls: bool | None = None
    takes_calls_without_results: bool | None = None
    """A call followed by a user's message. Only whether it is accepted."""
    takes_text_and_thinking_with_calls: bool | None = None
    """A call with both text and thinking in one reply, if it takes a call with either. Only whether it is accepted."""
    call_ids: Literal["any", "nine"] | None = None
    """Form of call ids: `any` takes the node's own, `nine` only nine of [a-zA-Z0-9]. None: takes no calls."""
    prints_call_ids: bool | None = None
    """Whether prompts show the ids of calls."""

    # -- choices: None if unknown, empty if the template has no argument for it
    thinking_on: dict[str, Any] | None = None
    """Template arguments that turn thinking on, such as {"enable_thinking": true}."""
    thinking_off: dict[str, Any] | None = None
    efforts: dict[str, tuple[str, ...]] | None = None
    """Template argument -> values for the amount of thinking."""
    keeps_thinking_with: dict[str, Any] | None = None
    """Arguments that make the template keep earlier thinking, if it does not by default."""
    reads_tools: bool | None = None
    """Whether tool calls in replies are parsed by the node; None: the engine parses them, or it is unknown."""
    refuses: str = ""
    """Why the template renders no conversation at all; empty: it does, or it is unknown."""
    refuses_tools: str = ""
    """Why it renders no conversation with a tool call and its result."""
    refuses_some_tools: str = ""
    """Why it renders no tools without parameters or descriptions, or none with unions and nested values in their
    schemas; empty: it takes all of these, or no tools, or it is unknown."""
    user_turns_as_rendered: bool | None = None
    """Whether prompts stitched at user turns equal the template's rendering of the whole conversation, with a system
    message if the template takes one. If not, every such call is compared."""
    tool_turns_as_rendered: bool | None = None
    """Likewise for prompts after tool results, over two rounds of calls."""
    reports_ends: bool | None = None
    """Whether the engine reports the end-of-turn id of a turn that ended by itself."""


class IdsToDecode(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids to decode."""

    tokenizer_digest: str
    """As an engine's `TemplateFacts` have it."""
    ids: tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...]


class DecodedIds(msgspec.Struct, frozen=True, kw_only=True):
    """Decoded token ids."""

    text: str


class EngineTime(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of an engine's calls, measured by the engine since its start."""

    mean_s: float
    num_calls: int


class EngineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast an engine answers a node, over the last minute."""

    first_token_s: float | None
    """Mean time to the first token of streamed calls; of all its calls, by its own metrics page, if none was streamed.
    None: unknown."""
    waits_s: float
    """How long the streamed call that has waited longest for its first token waits already; 0 if none does."""
    reply_s: float | None
    """Mean time of whole calls; None if none ended."""
    tokens_per_s: float
    """Sampled for this node."""
    num_queued: int | None
    """Calls, of all its clients, that wait in the engine, by its own metrics page; None without one."""


def speed_of(engine: Mapping[str, Any]) -> EngineSpeed | None:
    """engine: a `BackendView` as a heartbeat has it. None: another implementation of nodes, without it."""
    try:
        return msgspec.convert(engine.get("speed"), EngineSpeed | None)
    except msgspec.ValidationError:
        return None


class CacheView(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's prefix cache and the sessions with a place in it."""

    num_tokens: int
    """That it holds."""
    usable: float
    """Part of it that sessions may fill; below 1 after contexts were not found in it."""
    num_held_tokens: int
    """Contexts of the sessions with a place, what they share counted once."""
    num_places: int
    """Sessions with a place."""
    hit_rate: float | None
    """Part of the prompts' tokens that it had, by the engine's own counters, in the last seconds. None: unknown."""


class PlacesView(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions that wait for a place in an engine's cache."""

    num_waiting: int
    longest_wait_s: float
    """The longest so far."""
    max_wait_s: float
    """After so long a session goes before all others."""


class BackendView(msgspec.Struct, frozen=True, kw_only=True):
    """One backend as an operator sees it."""

    backend_id: str
    url: str
    engine: str
    """Its kind: `vllm`, `sglang`, `openai_text`."""
    label: str | None
    """Where it runs, such as the name of a host or node."""
    role: str | None = None
    """The role whose calls it answers; None: the policy's."""
    api_key_env: str | None
    """Name of the environment variable with its key; None: it needs none."""
    is_near: bool
    """Whether it is on the node's own machine, by its label, or by its address without one. Such backends are chosen
    first."""
    state: BackendState
    model: str
    version: str
    tier: str = ""
    """How far its prompts can be captured, and why: `auto`, `observe` or `text`, then an explanation."""
    template: TemplateFacts
    template_told: tuple[str, ...] = ()
    """The same as short phrases."""
    template_lacks: tuple[str, ...] = ()
    """What it cannot do: one sentence each, with the remedy."""
    sees_images: bool | None = None
    """Whether calls with images can be trained on: an image processor is known. None: unknown."""
    num_sessions: int
    """Sessions assigned to it now."""
    num_assigned: int
    """Sessions ever assigned to it."""
    num_calls: int
    """In flight."""
    num_failures: int
    """Consecutive failed health checks."""
    error: str | None
    cache: CacheView | None = None
    """None: sessions have no places, or the engine does not tell the size of its cache."""
    speed: EngineSpeed | None = None
    times: dict[str, EngineTime] = {}
    """`queue`, `prefill`, `decode` from its own metrics page, if they were requested and it has one."""
    weights_known: bool = True
    """False: it was added or recovered after a policy version was set, or a weight update was cut off."""
    reports_versions: bool = False
    """Its tokens have the policy version that it reports, not the gate's."""
    since: float
    """When it entered this state. Unix time, UTC, seconds."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's own report at its end."""

    reward: float | None
    reward_info: dict[str, Any]


class OpenedSession(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `POST /v1/sessions`; no other answer contains the key."""

    session_id: str
    node_id: str
    """The node that runs it."""
    api_key: str
    base_url: str
    """For an agent that speaks OpenAI Chat Completions: `NODE/sessions/SESSION/v1`."""
    base_urls: dict[str, str]
    """By SDK: `openai` (ends with `/v1`), `anthropic`, `google`."""
    model: str


class ExternalView(msgspec.Struct, frozen=True, kw_only=True):
    """A session as its owner sees it."""

    session_id: str
    task_id: str
    status: Literal["open", "completed", "finalized", "aborted"]
    """completed: as reported by the agent; the session still answers calls until it is finalized."""
    model: str
    created_at: float
    """Unix time, UTC, seconds."""
    num_calls: int
    """Model calls so far; 0 once the session has ended."""
    claim: Claim | None
    metadata: dict[str, Any]


class BreakerView(msgspec.Struct, frozen=True, kw_only=True):
    """A node's circuit breaker; while open, it takes no sessions."""

    state: BreakerState
    boundary: Boundary | None = None
    """Boundary of the faults; None while closed without a recent failure."""
    num_faults: int = 0
    """Consecutive, at that boundary."""
    message: str = ""
    """Message of the last fault."""
    tries_in_s: float | None = None
    """Seconds until the next session is taken; None unless open."""


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """A session that is stuck beyond its budget."""

    session_id: str
    attempt: int
    stage: Stage
    since: float
    """When it got there. Unix time, UTC, seconds."""
    overdue_s: float
    """Seconds beyond its budget."""
    waits_at: dict[str, list[str]]
    """Each of its tasks -> the innermost frames, the innermost last."""


class DiskState(msgspec.Struct, frozen=True, kw_only=True):
    """Room on the disk of a node's data folder, and the reserve."""

    free_bytes: int
    reserve_bytes: int
    free_files: int
    """Files that can still be created."""
    reserve_files: int
    """0 if the file system has no fixed number of files."""
    is_low: bool
    """Whether leasing is paused."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node at a glance."""

    node_id: str
    model: str
    """Name under which its engines serve the model."""
    stages: dict[Stage, int]
    """stage -> sessions in it."""
    sizes: dict[str, int]
    """`init_workers`, `ready_slots` ...: how many sessions each stage takes at once."""
    num_ended: int
    """Sessions since the node's start."""
    draining: bool
    breaker: BreakerView
    stuck: list[Stuck]
    """Sessions beyond their budget."""
    disk: DiskState
    pulling: dict[str, int] = {}
    """Image that is being pulled -> sessions that wait for it."""
    orphans: list[str] = []
    """Names of sandboxes' folders that belong to no sandbox."""
    num_external_sessions: int
    """Open sessions of agents that run elsewhere."""
