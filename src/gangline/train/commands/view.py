"""Displays a run: a bar for each step and evaluation in the terminal, and curves as a PNG."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from gangline.cli.terminal.tables import FactTable, numbers
from gangline.domain.errors import InvalidRequest
from gangline.domain.weight_updates import advice_on_phases
from gangline.settings.installation import extra_command

if TYPE_CHECKING:
    from gangline.train.runs.records import EvaluationRecord, StepRecord


_BAR_CHARS = 20
_SHOWN_ROWS = 24
_RECENT = 5
"""Latest steps used for an estimate; the first steps take longer."""


def reward_chart(records: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord] = ()) -> FactTable:
    """One row per step, with its mean reward as a bar, and rows for evaluations. A full bar is the largest reward, or
    1.
    """
    from gangline.train.runs.records import StepRecord

    largest = max([1.0, *(record.reward_mean for record in (*records, *evaluations))])
    rows = sorted([*records, *evaluations], key=lambda record: record.step)
    titles = ("groups", "lag", "wait s", "train s", "weights s")
    columns = [numbers(title, goes) for goes, title in enumerate(titles, 1)]
    table = FactTable("step", "reward#", "", *columns)
    for record in rows[-_SHOWN_ROWS:]:
        is_step = isinstance(record, StepRecord)
        name, colour = (str(record.step), "green") if is_step else ("held out", "cyan")
        bar = _bar(record.reward_mean / largest, colour)
        table.add_row(name, f"{record.reward_mean:.2f}", bar, *(_step_cells(record) if is_step else ()))
    return table


def _step_cells(record: StepRecord) -> list[str]:
    lag = record.scalars().get("rollout/lag_mean", 0.0)
    seconds = (record.waited_s, record.trained_s, _update_s(record))
    return [str(record.num_groups), f"{lag:.1f}", *(f"{second:.1f}" for second in seconds)]


def _update_s(record: StepRecord) -> float:
    return 0.0 if record.update is None else record.update.total_s


def notes_on(record: StepRecord) -> list[str]:
    """Remarks on a step, in addition to its numbers."""
    notes = [f"{number} sampled tokens were not trained on: {why}" for why, number in record.left_out.items()]
    notes += _early_ends(record, record.num_sessions)
    num_dull, num_all = record.num_one_reward + record.num_not_admitted, record.num_groups + record.num_not_admitted
    if num_dull:
        notes.append(f"{num_dull} of {num_all} groups had one reward: nothing to learn")
    if record.update is not None and (summary := advice_on_phases(record.update.phases)) is not None:
        notes.append(summary)
    if record.update is None:
        notes.append(f"no weights were pushed, the policy stays at version {record.version}")
    return notes


def _early_ends(record: StepRecord | EvaluationRecord, num_sessions: int) -> list[str]:
    """A remark if sessions did not end as `completed`, since a reward of 0 may come from that."""
    if not record.early_ends:
        return []
    counts = ", ".join(f"{number} {end}" for end, number in sorted(record.early_ends.items()))
    return [f"{sum(record.early_ends.values())} of {num_sessions} sessions did not complete: {counts}"]


def shown_reward(record: EvaluationRecord) -> str:
    """The mean, and its standard error if known."""
    error = "" if record.standard_error is None else f" ± {record.standard_error:.2f}"
    return f"{record.reward_mean:.2f}{error}"


def _bar(share: float, colour: str) -> Text:
    filled = round(max(share, 0.0) * _BAR_CHARS)
    return Text("█" * filled, colour) + Text("·" * (_BAR_CHARS - filled), "dim")


def remaining_s(
    records: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord], *, num_steps: int, num_evaluations: int
) -> float | None:
    """Estimated seconds until the run ends, from its latest steps and evaluations; None before the first step.

    num_evaluations: total for the run.
    """
    if not records:
        return None
    steps_left = max(num_steps - len(records), 0)
    step_s = statistics.mean([record.waited_s + record.trained_s + _update_s(record) for record in records[-_RECENT:]])
    evaluations_left = max(num_evaluations - len(evaluations), 0)
    evaluation_s = statistics.mean([evaluation.took_s for evaluation in evaluations[-_RECENT:]]) if evaluations else 0.0
    return float(steps_left * step_s + evaluations_left * evaluation_s)


class LearningView:
    """On a terminal, a growing chart above a progress bar; otherwise one line per step and evaluation.

    Both show an estimate of the remaining time.
    """

    def __init__(
        self,
        console: Console,
        *,
        num_steps: int,
        num_evaluations: int = 0,
        before: Sequence[StepRecord] = (),
        evaluations_before: Sequence[EvaluationRecord] = (),
    ) -> None:
        """num_evaluations: total for the run. before, evaluations_before: records from earlier starts of the run."""
        self._console = console
        self._num_steps = num_steps
        self._num_evaluations = num_evaluations
        self._records = list(before)
        self._evaluations = list(evaluations_before)
        self._last_record_at = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}")
        )
        self._bar = self._progress.add_task("", total=num_steps + num_evaluations, left="")
        self._live = (
            Live(console=console, get_renderable=self._renderable, refresh_per_second=2, transient=True)
            if console.is_terminal
            else None
        )

    @property
    def records(self) -> list[StepRecord]:
        return self._records

    @property
    def evaluations(self) -> list[EvaluationRecord]:
        return self._evaluations

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, record: StepRecord) -> None:
        self._records.append(record)
        self._note(
            f"step {record.step}/{self._num_steps}: reward {record.reward_mean:.3f}, waited {record.waited_s:.1f} s, "
            f"trained {record.trained_s:.1f} s, weights {_update_s(record):.1f} s"
        )
        if self._live is None:
            for note in notes_on(record):
                self._console.print(f"step {record.step}/{self._num_steps}: {note}", markup=False, soft_wrap=True)

    def add_evaluation(self, record: EvaluationRecord) -> None:
        self._evaluations.append(record)
        self._note(
            f"held out, after step {record.step}/{self._num_steps}: reward {shown_reward(record)}, "
            f"{record.num_sessions} sessions, {record.num_invalid} did not count, took {record.took_s:.1f} s"
        )
        for note in _early_ends(record, record.num_sessions + record.num_invalid):
            self._console.print(
                f"held out, after step {record.step}/{self._num_steps}: {note}", markup=False, soft_wrap=True
            )

    def say(self, line: str) -> None:
        """Print a line above the chart."""
        self._console.print(line, markup=False, soft_wrap=True)

    def _note(self, line: str) -> None:
        self._last_record_at = time.monotonic()
        if self._live is None:
            left = self._left()
            self._console.print(f"{line}; {left}" if left else line)

    def _left(self) -> str:
        estimate = remaining_s(
            self._records, self._evaluations, num_steps=self._num_steps, num_evaluations=self._num_evaluations
        )
        if not estimate:
            return ""
        return f"about {_duration(max(estimate - (time.monotonic() - self._last_record_at), 1.0))} left"

    def _renderable(self) -> Group:
        """Also called by the display's thread, so it only reads."""
        num_done = len(self._records) + len(self._evaluations)
        if len(self._records) < self._num_steps:
            doing = f"step {len(self._records) + 1} of {self._num_steps}"
        else:
            doing = f"{self._num_steps} steps done"
        self._progress.update(self._bar, completed=num_done, description=doing, left=self._left())
        lines = [f"step {record.step}: {note}" for record in self._records[-1:] for note in notes_on(record)]
        notes = [Text(line, no_wrap=False, overflow="fold") for line in lines]
        return Group(reward_chart(self._records, self._evaluations), *notes, self._progress)


def _duration(seconds: float) -> str:
    """`40 s`, `7 min`, `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def draw_curves(
    runs: Mapping[str, Sequence[StepRecord]],
    path: Path,
    *,
    title: str,
    evaluations: Mapping[str, Sequence[EvaluationRecord]] | None = None,
) -> Path:
    """Mean reward by step, one line per run. evaluations: drawn as dashed lines with diamonds and standard errors, in
    the run's colour. Raises: InvalidRequest if the extra `plot` is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequest(f"A picture needs matplotlib, which is not installed: {extra_command('plot')}") from error
    figure: Any = Figure(figsize=(7.2, 3.6), dpi=150, layout="constrained")
    axes: Any = figure.subplots()
    for label, records in runs.items():
        steps = axes.plot(
            [record.step for record in records], [record.reward_mean for record in records], marker="o", ms=3
        )
        steps[0].set_label(label)
        if found := (evaluations or {}).get(label):
            axes.errorbar(
                [one.step for one in found],
                [one.reward_mean for one in found],
                yerr=[one.standard_error or 0.0 for one in found],
                color=steps[0].get_color(),
                linestyle="--",
                marker="D",
                ms=7,
                capsize=4,
            )
    what = "mean reward (diamonds: on held-out tasks)" if evaluations else "mean reward"
    axes.set(xlabel="step", ylabel=what, ylim=(0, None), title=title)
    axes.grid(alpha=0.3)
    if len(runs) > 1:
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white")
    return path
