"""How a run looks: a bar a step in the terminal, curves as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gangline.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from gangline.training.run_log import StepRecord

__all__ = ["LearningView", "draw_curves", "reward_chart"]

_BAR_CHARS = 28
_SHOWN_STEPS = 24


def reward_chart(records: Sequence[StepRecord]) -> Table:
    """Steps as rows, the mean reward of each as a bar. A bar is full at the largest reward, or at 1."""
    largest = max([1.0, *(record.reward_mean for record in records)])
    table = Table("step", "reward", box=None, header_style="bold", pad_edge=False)
    table.add_column(min_width=_BAR_CHARS, no_wrap=True)
    for title in ("groups", "lag", "wait s", "train s", "weights s"):
        table.add_column(title, justify="right")
    for record in records[-_SHOWN_STEPS:]:
        lag = record.scalars().get("rollout/lag_mean", 0.0)
        table.add_row(
            str(record.step),
            f"{record.reward_mean:.2f}",
            _bar(record.reward_mean / largest),
            str(record.num_groups),
            f"{lag:.1f}",
            f"{record.waited_s:.1f}",
            f"{record.trained_s:.1f}",
            f"{record.update.total_s:.1f}",
        )
    return table


def _bar(share: float) -> Text:
    filled = round(max(share, 0.0) * _BAR_CHARS)
    return Text("█" * filled, "green") + Text("·" * (_BAR_CHARS - filled), "dim")


class LearningView:
    """On a terminal, the chart as it grows; elsewhere a line a step."""

    def __init__(self, console: Console, *, num_steps: int, before: Sequence[StepRecord] = ()) -> None:
        """before: of the steps that were done in earlier lives."""
        self._console = console
        self._num_steps = num_steps
        self._records = list(before)
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    @property
    def records(self) -> list[StepRecord]:
        return self._records

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            self._show(self._live)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, record: StepRecord) -> None:
        self._records.append(record)
        if self._live is not None:
            self._show(self._live)
            return
        self._console.print(
            f"step {record.step}/{self._num_steps}: reward {record.reward_mean:.3f}, waited {record.waited_s:.1f} s, "
            f"trained {record.trained_s:.1f} s, weights {record.update.total_s:.1f} s"
        )

    def _show(self, live: Live) -> None:
        doing = (
            f"step {len(self._records) + 1} of {self._num_steps}" if len(self._records) < self._num_steps else "done"
        )
        live.update(Group(reward_chart(self._records), Text(f"{doing} ...", "dim")), refresh=True)


def draw_curves(runs: Mapping[str, Sequence[StepRecord]], path: Path, *, title: str) -> Path:
    """Mean reward by step, a line for each run. Raises: InvalidRequest when the extra `plot` is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequest(
            "A picture needs matplotlib, which is not installed: pip install 'gangline[plot]'."
        ) from error
    figure: Any = Figure(figsize=(7.2, 3.6), dpi=150, layout="constrained")
    axes: Any = figure.subplots()
    for label, records in runs.items():
        axes.plot([one.step for one in records], [one.reward_mean for one in records], marker="o", ms=3, label=label)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, None), title=title)
    axes.grid(alpha=0.3)
    if len(runs) > 1:
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white")
    return path
