"""Draws `gangline watch`, with as much as fits the terminal.

The top lines, with the service's address and throughput, are never cut. Nodes, groups, failures and engines share the
remaining lines; a section that is cut shows the number of missing lines. In a narrow terminal the least important
columns are dropped first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from gangline.cli.tasks.watching import Watched, clock_time
from gangline.cli.terminal.output import printable
from gangline.cli.terminal.tables import GAP, Column, columns_that_fit, prose
from gangline.cli.terminal.views import (
    OUTCOME_COLOURS,
    counts,
    engine_figures,
    engine_state,
    node_state,
    oldest_line,
    stages_line,
)
from gangline.domain.node_numbers import NodeNumbers
from gangline.domain.views import Event, NodeView, ServiceStatus, TaskSummary

_LEAST_CUT = 16
_UNBOUNDED = 10_000
_ROOMY = 30
"""Lines from which sections are separated by empty lines."""


@dataclass(frozen=True)
class _Section:
    columns: tuple[Column, ...]
    rows: list[tuple[Text, ...]] = field(default_factory=list[tuple[Text, ...]])


class Picture:
    """Draws a `Watched` into the available space."""

    def __init__(self, watched: Watched, title: str = "gangline") -> None:
        self._watched = watched
        self._title = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status = self._watched.status
        if status is None:
            yield Text("connecting ...", style="dim")
            return
        top = Group(*_top(self._watched, status, self._title))
        yield top
        height = options.height or _UNBOUNDED
        num_top = len(console.render_lines(top, options.update(height=None)))
        if not status.nodes and not status.tenant:
            yield Text("No node has joined: start one with `gangline node`.", style="yellow")
            num_top += 1
        sections = [section for section in _sections(self._watched) if section.rows]
        yield from _fitted(sections, height - num_top, options.max_width, apart=height >= _ROOMY)


def shared_lines(wants: Sequence[int], room: int) -> list[int]:
    """Lines for each section: one at a time in turn, until all have enough or the space is used up."""
    given = [0] * len(wants)
    while room > 0 and given != list(wants):
        for index, want in enumerate(wants):
            if room > 0 and given[index] < want:
                given[index] += 1
                room -= 1
    return given


def _fitted(sections: Sequence[_Section], room: int, width: int, *, apart: bool) -> RenderResult:
    heading = 2 if apart else 1
    sections = sections[: max(0, room // (heading + 1))]
    given = shared_lines([len(section.rows) for section in sections], room - heading * len(sections))
    for section, num_lines in zip(sections, given, strict=True):
        if apart:
            yield Text()
        yield _table(section, num_lines, width)


def _table(section: _Section, num_lines: int, width: int) -> Table:
    num_missing = len(section.rows) - num_lines
    shown = section.rows[: num_lines - 1] if num_missing else section.rows
    wide = columns_that_fit(section.columns, shown, width, lambda _: _LEAST_CUT)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold", collapse_padding=True)
    for index, cells in wide.items():
        table.add_column(section.columns[index].title, no_wrap=True, overflow="ellipsis", max_width=cells)
    for row in shown:
        table.add_row(*(row[index] for index in wide))
    if num_missing:
        table.add_row(Text(f"... {num_missing + 1} more", style="dim"))
    return table


# -- the top ----------------------------------------------------------------------------------------------------------


def _top(watched: Watched, status: ServiceStatus, title: str) -> list[Text]:
    lines = [_heading(status, title), stages_line(status), _throughput(watched, status)]
    for oldest in oldest_line(status):
        oldest.no_wrap, oldest.overflow = True, "ellipsis"
        lines.append(oldest)
    lines.append(_exactness(watched))
    if (outage := watched.outage()) is not None:
        lines.insert(1, _outage_line(*outage, status))
    return [line for line in lines if line]


def _heading(status: ServiceStatus, title: str) -> Text:
    text = Text.assemble((title, "bold"), f" {status.version}  {clock_time(status.at)} UTC")
    text.append(f"  tasks: {counts(status.tasks)}")
    return text


def _outage_line(why: str, lasted_s: float, is_over: bool, status: ServiceStatus) -> Text:
    if is_over:
        return Text(f"The server answers again; it was away for {lasted_s:.0f} s.", style="yellow")
    since = clock_time(status.at)
    return Text(
        f"The server has not answered for {lasted_s:.0f} s; retrying. This was at {since}. {printable(why)}",
        style="bold red",
        no_wrap=True,
        overflow="ellipsis",
    )


def _throughput(watched: Watched, status: ServiceStatus) -> Text:
    pieces = [f"{watched.ended_per_minute():,.0f} sessions/min"]
    if (rate := watched.sampled_per_s()) is not None:
        pieces.append(f"{rate:,.0f} tokens/s")
    if status.num_waiting:
        pieces.append(f"{status.num_waiting} resting after a fault")
    if len(status.queued) > 1:
        pieces.append(f"{len(status.queued)} submitters")
    if pending := status.callbacks.get("pending", 0):
        pieces.append(f"{pending} callbacks pending")
    return Text(" · ".join(pieces))


def _exactness(watched: Watched) -> Text:
    counted = [numbers for _, numbers in watched.numbers() if numbers is not None]
    num_contexts = sum(numbers.contexts for numbers in counted)
    if not num_contexts:
        return Text()
    num_diverged = sum(numbers.contexts_diverged for numbers in counted)
    num_untrainable = sum(numbers.untrainable for numbers in counted)
    text = Text(f"contexts: {1 - num_diverged / num_contexts:.2%} exact of {num_contexts:,}")
    text.append(f" · {num_diverged:,} diverged", style="yellow" if num_diverged else "")
    text.append(f" · {num_untrainable:,} untrainable", style="yellow" if num_untrainable else "")
    return text


# -- the sections -----------------------------------------------------------------------------------------------------


def _sections(watched: Watched) -> list[_Section]:
    numbers = watched.numbers()
    return [_nodes(numbers), _groups(watched.tasks), _failures(watched), _engines([node for node, _ in numbers])]


_NODE_COLUMNS = (
    Column("node"),
    *(Column(stage) for stage in ("init", "ready", "run", "postrun")),
    Column("outside", 4),
    Column("calls", 3),
    Column("gate", 2),
    Column("version", 6),
    Column("heard", 5),
    prose("state", 1),
)


def _nodes(nodes: Sequence[tuple[NodeView, NodeNumbers | None]]) -> _Section:
    return _Section(_NODE_COLUMNS, [_node_row(node, numbers) for node, numbers in sorted(nodes, key=_worst_first)])


def _worst_first(entry: tuple[NodeView, Any]) -> tuple[bool, str]:
    return node_state(entry[0]) == "up", entry[0].node_id


def _node_row(node: NodeView, numbers: NodeNumbers | None) -> tuple[Text, ...]:
    state = node_state(node)
    end = (Text(_age(node.age_s)), Text(state, style="" if state == "up" else "bold red"))
    if numbers is None:
        held = Text(f"{node.num_sessions}/{node.capacity} in all")
        return (Text(printable(node.node_id)), Text(), Text(), held, *[Text()] * 5, *end)
    pools = (
        _of(numbers.init, numbers.init_workers),
        _of(numbers.ready, numbers.ready_slots),
        _of(numbers.run, numbers.run_slots),
        _of(numbers.postrun, numbers.postrun_workers),
    )
    gate = Text(f"closed, {numbers.gate_calls_waiting} wait", style="yellow") if numbers.gate_closed else Text("open")
    version = "" if numbers.policy_version is None else str(numbers.policy_version)
    figures = (Text(str(numbers.external_sessions)), Text(str(numbers.calls_in_flight)), gate, Text(version))
    return (Text(printable(node.node_id)), *pools, *figures, *end)


def _of(num: int, size: int) -> Text:
    return Text(f"{num}/{size}", style="bold cyan" if num else "dim")


_GROUP_COLUMNS = (
    Column("group"),
    Column("ended"),
    Column("reward", 1),
    Column("state", 4),
    prose("outcomes", 3),
)


def _groups(tasks: Sequence[TaskSummary]) -> _Section:
    return _Section(_GROUP_COLUMNS, [_group_row(task) for task in tasks])


def _group_row(task: TaskSummary) -> tuple[Text, ...]:
    ended = Text(f"{task.num_samples - task.num_open}/{task.num_samples}")
    reward, outcomes = Text("" if task.mean_reward is None else f"{task.mean_reward:.3f}"), Text()
    for outcome, num in task.outcomes.items():
        outcomes.append(", " if outcomes else "").append(f"{num} {outcome}", OUTCOME_COLOURS.get(outcome, ""))
    return Text(printable(task.task_id)), ended, reward, Text(task.status), outcomes


_FAILURE_COLUMNS = (
    Column("failed", 1),
    Column("session"),
    prose("what broke"),
    prose("", 2),
)


def _failures(watched: Watched) -> _Section:
    """Newest first."""
    return _Section(_FAILURE_COLUMNS, [_failure_row(event) for event in reversed(watched.failures)])


def _failure_row(event: Event) -> tuple[Text, ...]:
    data = event.data
    again = event.kind == "session.requeued"
    what = ": ".join(str(data[name]) for name in ("boundary", "code") if data.get(name))
    return (
        Text(clock_time(event.at)),
        Text(printable(event.session_id or event.task_id or "")),
        Text(printable(f"{what} (runs again)" if again else what), style="yellow" if again else "red"),
        Text(printable(str(data.get("message") or ""))),
    )


_ENGINE_COLUMNS = (
    Column("engine"),
    Column("node", 2),
    Column("kind", 5),
    Column("state"),
    Column("first token", 3),
    Column("tokens/s", 3),
    Column("calls", 3),
    prose("sessions", 4),
    prose("error", 1),
)


def _engines(nodes: Sequence[NodeView]) -> _Section:
    """Failing engines first."""
    found = [(node, backend) for node in nodes for backend in node.backends]
    found.sort(key=lambda one: (one[1].get("state") == "healthy", one[0].node_id))
    return _Section(_ENGINE_COLUMNS, [_engine_row(node, backend) for node, backend in found])


def _engine_row(node: NodeView, backend: dict[str, Any]) -> tuple[Text, ...]:
    def cell(name: str) -> Text:
        value = backend.get(name)
        return Text("" if value is None else printable(str(value)))

    return (
        cell("url") + (f" ({printable(str(backend['role']))})" if backend.get("role") else ""),
        Text(printable(node.node_id)),
        cell("engine"),
        engine_state(backend),
        *engine_figures(backend),
        cell("error"),
    )


def _age(seconds: float) -> str:
    """`8 s`, `12 min`, `3 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
