"""Draws a session as one picture: a block for each trace, a box for each token.

Context is grey; a sampled token is coloured by its log-prob; a bar stands before each turn, with the source of its
context above it. Long runs are shortened in their middle.
"""

# matplotlib's stubs leave much unknown.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.cli.results.known_texts import text_of
from gangline.cli.results.token_runs import Run, elided, runs_of, standing
from gangline.domain.errors import InvalidRequest
from gangline.settings.installation import extra_command

if TYPE_CHECKING:
    from gangline.cli.results.known_texts import TextOf
    from gangline.domain.session import SessionResult
    from gangline.domain.trajectory import Trace
    from gangline.server.web.tokens import TokenBytes

_LINE_CHARS = 150
_CELL_HEIGHT = 1.05
_HEAD, _TAIL = 14, 22
_SAMPLED_HEAD, _SAMPLED_TAIL = 90, 20
_MAX_TRACES = 10
_LOWEST_LOGPROB = -4.0
_GREY, _DARK, _BAR, _SPLICE = "#e7e9ee", "#5b6270", "#1f3b73", "#c2185b"


@dataclass(frozen=True)
class _Box:
    label: str
    run: Run
    logprob: float | None = None
    opens_turn: bool = False
    is_gap: bool = False


def draw_trajectory(result: SessionResult, path: Path, known: Mapping[str, TokenBytes]) -> Path:
    """Write one PNG. known: texts of ids by tokenizer; other ids are shown as numbers.

    Raises: InvalidRequest when the session has no trace, or the extra `plot` is not installed.
    """
    if result.trajectory is None or not result.trajectory.traces:
        raise InvalidRequest(f"session {result.session_id} has no trace to draw.")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequest(f"A picture needs matplotlib, which is not installed: {extra_command('plot')}") from error
    traces = result.trajectory.traces
    shown = traces[:_MAX_TRACES]
    blocks = [(trace, list(_lines(trace, text_of(trace, result.completions, known)))) for trace in shown]
    num_rows = sum(sum(map(_height, lines)) + 1.9 for _, lines in blocks) + 4.2
    figure: Any = Figure(figsize=(13.5, 0.19 * num_rows), dpi=150)
    axes: Any = figure.add_axes((0.015, 0.0, 0.97, 1.0))
    axes.set(xlim=(0, _LINE_CHARS + 2), ylim=(num_rows, 0))
    axes.axis("off")
    colours: Any = mpl.colormaps["RdYlGn"]
    y = _draw_head(axes, result, colours, num_hidden=len(traces) - len(blocks))
    for index, (trace, lines) in enumerate(blocks):
        y = _draw_trace(axes, trace, index, lines, colours, y)
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # A character that the font lacks is drawn as an empty box, as intended.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        figure.savefig(path, facecolor="white")
    return path


def _boxes(trace: Trace, known: TextOf) -> Iterator[_Box]:
    for run in runs_of(trace):
        sampled = run.kind == "sampled"
        start, end = elided(run, head=_SAMPLED_HEAD if sampled else _HEAD, tail=_SAMPLED_TAIL if sampled else _TAIL)
        for index, token_id in enumerate(run.ids):
            if index == start and end > start:
                yield _Box(f"… {end - start} more …", run, is_gap=True)
            if not start <= index < end:
                logprob = None if run.logprobs is None else run.logprobs[index]
                yield _Box(_label(token_id, known), run, logprob, opens_turn=sampled and index == 0)


def _label(token_id: int, known: TextOf) -> str:
    text = known(token_id)
    if text is None:
        return str(token_id)
    shown = "".join("↵" if char == "\n" else char if char.isprintable() else "·" for char in text)
    return shown or "·"


def _lines(trace: Trace, known: TextOf) -> Iterator[list[tuple[float, _Box]]]:
    """Boxes with their left edges, broken into lines. Each turn begins a new line."""
    line: list[tuple[float, _Box]] = []
    x = 0.0
    for box in _boxes(trace, known):
        if line and (box.opens_turn or x + _width(box) > _LINE_CHARS):
            yield line
            line, x = [], 0.0
        line.append((x, box))
        x += _width(box)
    if line:
        yield line


def _width(box: _Box) -> float:
    return len(box.label) + 0.5


def _height(line: list[tuple[float, _Box]]) -> float:
    """A line that opens a turn has the turn's title above its boxes."""
    return _CELL_HEIGHT + (0.75 if line[0][1].opens_turn else 0.17)


def _draw_head(axes: Any, result: SessionResult, colours: Any, *, num_hidden: int) -> float:
    reward = "no reward" if result.reward is None else f"reward {result.reward:.3g}"
    axes.text(0, 1.2, f"{result.session_id}   {result.outcome}   {reward}", fontsize=13, fontweight="bold", va="center")
    hidden = f"  ·  {num_hidden} more traces not drawn" if num_hidden else ""
    num_sampled = sum(len(completion.sampled_ids) for completion in result.completions)
    facts = f"{len(result.completions)} model calls, {num_sampled} sampled tokens{hidden}"
    axes.text(0, 2.5, facts, fontsize=9, color=_DARK, va="center")
    _draw_legend(axes, colours, x=78.0, y=2.5)
    return 4.2


def _draw_legend(axes: Any, colours: Any, *, x: float, y: float) -> None:
    _draw_cell(axes, x, y - 0.4, 2, _GREY)
    axes.text(x + 3, y, "context, mask 0", fontsize=8, va="center", color=_DARK)
    axes.text(x + 21, y, "sampled, log-prob", fontsize=8, va="center", color=_DARK)
    steps = 24
    for step in range(steps):
        logprob = _LOWEST_LOGPROB * (1 - step / (steps - 1))
        _draw_cell(axes, x + 41 + step * 0.6, y - 0.4, 0.6, _colour(colours, logprob))
    axes.text(x + 40.4, y, f"≤ {_LOWEST_LOGPROB:g}", fontsize=8, va="center", ha="right", color=_DARK)
    axes.text(x + 56, y, "0", fontsize=8, va="center", color=_DARK)
    axes.plot([x + 60.5] * 2, [y - 0.55, y + 0.55], color=_BAR, linewidth=2.2, solid_capstyle="butt")
    axes.text(x + 61.5, y, "a turn begins", fontsize=8, va="center", color=_DARK)


def _draw_trace(
    axes: Any, trace: Trace, index: int, lines: list[list[tuple[float, _Box]]], colours: Any, y: float
) -> float:
    title = f"trace {index}   {trace.role}, {standing(trace)}"
    axes.text(0, y + 0.3, title, fontsize=9.5, fontweight="bold", va="center", color=_BAR)
    y += 1.1
    for line in lines:
        y += _height(line)
        for x, box in line:
            _draw_box(axes, trace, box, x, y - _CELL_HEIGHT - 0.12, colours)
    return y + 0.6


def _draw_box(axes: Any, trace: Trace, box: _Box, x: float, top: float, colours: Any) -> None:
    run = box.run
    sampled = run.kind == "sampled"
    if not box.is_gap:
        fill = _GREY if box.logprob is None else _colour(colours, box.logprob)
        hatch = "////" if sampled and box.logprob is None else None
        _draw_cell(axes, x, top, _width(box), fill, hatch=hatch, edge=_SPLICE if run.spliced else "white")
    colour = _SPLICE if run.spliced else "#111111" if sampled and not box.is_gap else _DARK
    axes.text(
        x + _width(box) / 2,
        top + 0.52,
        box.label,
        fontsize=7.6,
        family="DejaVu Sans Mono",
        ha="center",
        va="center_baseline",
        color=colour,
        style="italic" if box.is_gap else "normal",
        parse_math=False,
    )
    if box.opens_turn:
        axes.plot([x, x], [top - 0.6, top + _CELL_HEIGHT], color=_BAR, linewidth=2.2, solid_capstyle="butt")
        axes.text(x + 0.5, top - 0.33, _turn_title(trace, run.turn), fontsize=6.6, va="center", color=_BAR)


def _turn_title(trace: Trace, turn: int) -> str:
    from gangline.rows.audit import turn_class

    certificate = trace.certificates[turn]
    words = {"first": "first prompt", "split": "context: its own prompt", "spliced": "context NOT exact (spliced)"}
    name = turn_class(trace, turn)
    how = words.get(name, f"context exact ✓ {name.removeprefix('exact_')}")
    masked = "" if certificate.untrainable is None else f" · masked: {certificate.untrainable}"
    return f"turn {turn} · {how} · {certificate.finish_reason}{masked}"


def _draw_cell(
    axes: Any, x: float, y: float, width: float, fill: Any, *, hatch: str | None = None, edge: str = "white"
) -> None:
    from matplotlib.patches import Rectangle

    cell = Rectangle(
        (x, y), width, 1.05, facecolor=fill, edgecolor="#9aa1ad" if hatch else edge, linewidth=0.5, hatch=hatch
    )
    axes.add_patch(cell)


def _colour(colours: Any, logprob: float) -> Any:
    share = 1 - min(max(logprob, _LOWEST_LOGPROB), 0.0) / _LOWEST_LOGPROB
    return colours(0.12 + 0.72 * share)
