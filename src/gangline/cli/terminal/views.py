"""Tables of tasks, sessions, nodes for `status`, `submit --wait` and `watch`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from gangline.cli.terminal.output import printable
from gangline.cli.terminal.tables import Column, FactTable, prose
from gangline.domain.lifecycle import STAGES
from gangline.domain.node_views import CacheView
from gangline.domain.sandbox import in_binary_units
from gangline.domain.views import HEARTBEAT_REFUSED, PULLING, NodeView, ServiceStatus, SessionView, TaskSummary

_SILENT_AFTER_S = 30.0
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
    if node.age_s > _SILENT_AFTER_S:
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
    table = FactTable("node", Column("url", 2), "sessions", Column("heard", 1), prose("state"))
    for node in nodes:
        held = f"{node.num_sessions}/{node.capacity}"
        table.add_row(node.node_id, node.url, held, f"{node.age_s:.0f} s ago", node_state(node))
    return table


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
    waiting += [Text(line, style="yellow") for line in slow_updates(status.nodes)]
    return Group(lines, stages_line(status), *waiting, Text(), nodes_table(status.nodes), Text(), groups_table(tasks))
