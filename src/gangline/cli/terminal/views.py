"""Tables of tasks, sessions, nodes for `status`, `submit --wait` and `watch`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from gangline.cli.terminal.output import printable
from gangline.cli.terminal.tables import Column, FactTable, prose
from gangline.domain.lifecycle import STAGES
from gangline.domain.node_views import CacheView, speed_of
from gangline.domain.sandbox import in_binary_units
from gangline.domain.views import (
    HEARTBEAT_REFUSED,
    PULLING,
    SANDBOX_CPUS,
    SANDBOX_MEMORY,
    SILENT_AFTER_S,
    NodeView,
    ServiceStatus,
    SessionView,
    TaskSummary,
)

SLOW_TOKEN_S = 5.0
"""From here a wait for a first token is marked."""
_MOST_CAUSE_CHARS = 400
_NAMED = 3
_BREAKER = "breaker_open_"
_SLOW_UPDATE = "slow_update"

OUTCOME_COLOURS = {
    "completed": "green",
    "agent_timeout": "yellow",
    "turn_limit": "yellow",
    "token_limit": "yellow",
    "agent_loop": "yellow",
    "memory_limit": "yellow",
    "agent_error": "yellow",
    "no_model_call": "yellow",
    "infra_error": "bold red",
    "cancelled": "dim",
}


def coloured(outcome: str | None) -> Text:
    return Text(outcome or "", OUTCOME_COLOURS.get(outcome or "", ""))


def counts(numbers: dict[str, int]) -> str:
    """`3 queued, 2 leased`, in the given order, without zeros."""
    return ", ".join(f"{number} {name}" for name, number in numbers.items() if number) or "none"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def sessions_table(sessions: Sequence[SessionView]) -> RenderableType:
    """One line for each session, then the reasons why some failed or wait, each once."""
    table = FactTable("session", Column("state", 2), Column("attempt", 4), "outcome", "reward#", Column("node", 3))
    causes: dict[str, str] = {}
    for session in sessions:
        if session.failure:
            causes[session.session_id] = f"{session.failure.boundary}: {session.failure.message}"
        if session.unplaced:
            causes[session.session_id] = f"unplaced: {session.unplaced}"
        if session.waits_for:
            causes[session.session_id] = session.waits_for
        attempt, outcome = f"{session.attempt}/{session.max_attempts}", coloured(session.outcome)
        table.add_row(
            session.session_id,
            session.stage or session.state,
            attempt,
            outcome,
            _number(session.reward),
            session.node_id or "",
        )
    return Group(table, *causes_view(causes))


def causes_view(causes: Mapping[str, str]) -> list[RenderableType]:
    """An empty line and a row for each cause; empty without causes. causes: session -> reason. Reasons that differ only
    in numbers and the session's id count as one."""
    sessions: dict[str, list[str]] = {}
    for session_id, why in causes.items():
        sessions.setdefault(re.sub(r"\d+", "0", why.replace(session_id, "")), []).append(session_id)
    table = FactTable("", prose(""))
    for first, *others in sessions.values():
        named = ", ".join([first, *others[: _NAMED - 1]]) + (", ..." if len(others) >= _NAMED else "")
        why = textwrap.shorten(printable(causes[first]), _MOST_CAUSE_CHARS, placeholder=" ...", break_on_hyphens=False)
        table.add_row(f"{len(others) + 1} x", f"{why} ({named})")
    return [Text(), table] if causes else []


def groups_table(tasks: Sequence[TaskSummary]) -> RenderableType:
    table = FactTable("task", Column("state", 1), "sessions ended", "mean reward#", prose("outcomes"))
    for task in tasks:
        ended = f"{task.num_samples - task.num_open}/{task.num_samples}"
        outcomes = counts(task.outcomes) if task.outcomes else ""
        table.add_row(task.task_id, task.status, ended, _number(task.mean_reward), outcomes)
    return table


def node_state(node: NodeView) -> str:
    """A node's state: whether it takes sessions, and whether any hang."""
    if node.age_s > SILENT_AFTER_S:
        return "drained" if node.draining else "silent"
    refused = [name.removeprefix(HEARTBEAT_REFUSED) for name in node.metrics if name.startswith(HEARTBEAT_REFUSED)]
    broken = [name.removeprefix(_BREAKER) for name in node.metrics if name.startswith(_BREAKER)]
    troubles = [
        "the server's disk is full: its heartbeats are refused"
        if code == "disk_full"
        else f"its heartbeats fail: {code}"
        for code in refused
    ]
    troubles += [low] if (low := low_disk(node.metrics)) else []
    troubles += [f"resting: {broken[0]} fails"] if broken else []
    troubles += _silent_engines(node)
    state = "draining" if node.draining else "; ".join(troubles) or "up"
    stuck = int(node.metrics.get("num_stuck", 0))
    state = f"{state}, {stuck} stuck" if stuck else state
    if num_checkpoints := int(node.metrics.get("checkpoints", 0)):
        gib = node.metrics.get("checkpoint_bytes", 0) / (1 << 30)
        state = f"{state}, {num_checkpoints} checkpoints of {gib:.1f} GiB"
    if num_orphans := int(node.metrics.get("orphans", 0)):
        state = f"{state}, orphaned folders of sandboxes: {num_orphans} (gangline doctor)"
    pulls = {name.removeprefix(PULLING): num for name, num in node.metrics.items() if name.startswith(PULLING)}
    return ", ".join([state, *(f"pulls {printable(image)} (waiting: {num:.0f})" for image, num in pulls.items())])


def _silent_engines(node: NodeView) -> list[str]:
    """Engines that are unhealthy, or did not answer the latest check."""
    found: list[str] = []
    for engine in node.backends:
        url, error = printable(str(engine.get("url"))), engine.get("error")
        if engine.get("state") == "unhealthy":
            found.append(f"engine {url} is unhealthy" + (f" ({printable(str(error))[:120]})" if error else ""))
        elif engine.get("num_failures"):
            found.append(f"engine {url} does not answer")
    return found


def low_disk(metrics: Mapping[str, float]) -> str:
    """Why a node takes no session, if its disk is below its reserve; otherwise empty."""
    free = {unit: metrics.get(f"disk_low_free_{unit}") for unit in ("bytes", "files")}
    if free["bytes"] is None or free["files"] is None:
        return ""
    reserve = {unit: metrics.get(f"disk_low_reserve_{unit}", 0.0) for unit in free}
    if free["bytes"] < reserve["bytes"]:
        kept = f"{in_binary_units(int(free['bytes']))} free, reserve {in_binary_units(int(reserve['bytes']))}"
    else:
        kept = f"{int(free['files'])} files free, reserve {int(reserve['files'])}"
    return f"takes no session: disk low ({kept})"


def nodes_table(nodes: Sequence[NodeView]) -> RenderableType:
    if not nodes:
        return Text("No node has joined: start one with `gangline node`.", style="yellow")
    memory, disk = Column("sandboxes' memory", 4), Column("disk free", 3)
    table = FactTable("node", Column("url", 5), "sessions", memory, disk, Column("heard", 1), prose("state"))
    for node in nodes:
        held = f"{node.num_sessions}/{node.capacity}"
        used, free = (_gib(node.metrics.get(name)) for name in ("sandbox_memory_bytes", "disk_free_bytes"))
        of_all = _gib(node.metrics.get("memory_bytes") or None)
        used = f"{used} of {of_all}" if of_all else used
        table.add_row(node.node_id, node.url, held, used, free, f"{node.age_s:.0f} s ago", node_state(node))
    return table


def _gib(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / (1 << 30):.1f} GiB"


def engine_state(engine: Mapping[str, Any]) -> Text:
    """`healthy`, also with how long a call has waited for its first token, where that is long."""
    state, speed = printable(str(engine.get("state", ""))), speed_of(engine)
    if state == "healthy" and engine.get("num_failures"):
        return Text("does not answer", "bold red")
    if state == "healthy" and speed is not None and speed.waits_s >= SLOW_TOKEN_S:
        return Text(f"slow: a call has waited {speed.waits_s:.0f} s", "bold red")
    return Text(state, "green" if state == "healthy" else "bold red")


def engine_figures(engine: Mapping[str, Any]) -> tuple[Text, Text, Text, Text]:
    """Time to the first token, tokens per second, calls in flight and queued in the engine, sessions with their places
    in its cache."""
    first_s, rate, calls, speed = Text(), Text(), str(engine.get("num_calls") or 0), speed_of(engine)
    if speed is not None:
        rate = Text(f"{speed.tokens_per_s:.3g}")
        calls += "" if speed.num_queued is None else f" ({speed.num_queued} queued)"
    if speed is not None and speed.first_token_s is not None:
        first_s = Text(f"{speed.first_token_s:.2g} s", "bold red" if speed.first_token_s >= SLOW_TOKEN_S else "")
    sessions = str(engine.get("num_sessions") or 0)
    if engine.get("cache") is not None:
        sessions += f"; {cache_line(msgspec.convert(engine['cache'], CacheView))}"
    return first_s, rate, Text(printable(calls)), Text(printable(sessions))


def engines_table(nodes: Sequence[NodeView]) -> RenderableType:
    sessions, error = prose("sessions", 3), prose("error", 4)
    table = FactTable("engine", Column("node", 2), "state", "first token", "tokens/s", "calls", sessions, error)
    for node in nodes:
        for engine in node.backends:
            url, why = (printable(str(engine.get(name) or ""))[:_MOST_CAUSE_CHARS] for name in ("url", "error"))
            table.add_row(url, node.node_id, engine_state(engine), *engine_figures(engine), why)
    return table


def sandboxes_table(nodes: Sequence[NodeView]) -> list[RenderableType]:
    """Those that take the most of each node, the largest first; empty if none is measured."""
    found = [
        (memory, node.metrics.get(SANDBOX_CPUS + session), session, node.node_id)
        for node in nodes
        for name, memory in node.metrics.items()
        if (session := name.removeprefix(SANDBOX_MEMORY)) != name
    ]
    table = FactTable("largest sandboxes now", Column("node", 2), "memory#", "processors#")
    for memory, cpus, session, node_id in sorted(found, key=lambda one: one[0], reverse=True):
        table.add_row(session, node_id, in_binary_units(int(memory)), "" if cpus is None else f"{cpus:.2g}")
    return [Text(), table] if found else []


def oldest_line(status: ServiceStatus) -> list[Text]:
    """The session that has waited longest, and why; empty without one."""
    if (oldest := status.oldest_queued) is None:
        return []
    age = f"{oldest.session_id} has waited {status.at - oldest.created_at:.0f} s"
    return [Text(printable(f"waits longest: {age}: {_why_it_waits(oldest, status)}"), "yellow")]


def _why_it_waits(session: SessionView, status: ServiceStatus) -> str:
    if session.unplaced:
        return session.unplaced
    if session.ready_at is not None:
        why = "" if session.failure is None else f" ({session.failure.code})"
        return f"it rests for {max(0.0, session.ready_at - status.at):.0f} s after a fault{why}"
    states = {node.node_id: node_state(node) for node in status.nodes}
    well = [node for node in status.nodes if states[node.node_id].startswith("up")]
    if not well:
        told = "; ".join(f"{name}: {state}" for name, state in list(states.items())[:_NAMED])
        return f"no node takes sessions ({told})" if told else "no node has joined"
    held, capacity = sum(node.num_sessions for node in well), sum(node.capacity for node in well)
    return f"the nodes have {held} of at most {capacity} sessions; it is next" if capacity else "no node has a place"


def slow_updates(nodes: Sequence[NodeView]) -> list[str]:
    """A sentence for each node on which one phase took most of the last weight update."""
    found: list[str] = []
    for node in nodes:
        for name, seconds in node.metrics.items():
            if name.startswith(f"{_SLOW_UPDATE}_"):
                phase, total_s = printable(name.removeprefix(f"{_SLOW_UPDATE}_")), node.metrics.get(_SLOW_UPDATE, 0.0)
                found.append(
                    f"{node.node_id}: {phase} took {seconds:.0f} of the {total_s:.0f} s of its last weight update"
                )
    return found


def cache_line(cache: CacheView) -> str:
    """`9000 of 12000 tokens held by 3 sessions, 81% of prompts in it`."""
    hits = "" if cache.hit_rate is None else f", {cache.hit_rate:.0%} of prompts in it"
    return f"{cache.num_held_tokens} of {cache.num_tokens} tokens held by {cache.num_places} sessions{hits}"


def stages_line(status: ServiceStatus) -> Text:
    """`queued 12 > init 2 > ready 3 > run 8 > postrun 1 > ended 40`."""
    stages = {"queued": status.sessions.get("queued", 0)}
    stages.update({name: status.stages.get(name, 0) for name in STAGES})
    stages["ended"] = status.sessions.get("ended", 0)
    text = Text()
    for name, number in stages.items():
        text.append(" > " if text else "", style="dim")
        text.append(f"{name} ")
        text.append(str(number), style="bold cyan" if number else "dim")
    return text


def status_view(status: ServiceStatus, tasks: Sequence[TaskSummary]) -> RenderableType:
    lines = Text(f"gangline {status.version}; tasks: {counts(status.tasks)}; callbacks: {counts(status.callbacks)}")
    waiting = [Text(f"unplaced: {number} queued: {why}", style="yellow") for why, number in status.unplaced.items()]
    waiting += [*oldest_line(status), *(Text(line, style="yellow") for line in slow_updates(status.nodes))]
    engines = [Text(), engines_table(status.nodes)] if any(node.backends for node in status.nodes) else []
    nodes = [] if status.tenant else [Text(), nodes_table(status.nodes)]
    parts = [*nodes, *engines, *sandboxes_table(status.nodes)]
    return Group(lines, stages_line(status), *waiting, *parts, Text(), groups_table(tasks))
