"""`gangline train dry-run`: samples some groups of an experiment and reports the spread of their rewards."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group as Lines
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from gangline.cli.terminal.output import notes
from gangline.cli.terminal.tables import FactTable, prose
from gangline.train.commands.run import selection_of, stream_of, with_service

if TYPE_CHECKING:
    from gangline.train.run.dry_run import GroupSpread, SpreadReport
    from gangline.train.run.experiment import Experiment
    from gangline.wire.client.server import ServerClient

_SHOWN_GROUPS = 32


async def measure_spread(
    experiment: Experiment, tasks: Sequence[Mapping[str, Any]], data_dir: Path, num_groups: int
) -> SpreadReport:
    """Raises: the service's errors."""
    from gangline.train.collecting.group_judge import judged
    from gangline.train.run.dry_run import DryRun

    run = f"{experiment.name}-dry-{secrets.token_hex(3)}"
    plain = experiment.model_copy(update={"control": "none"})
    progress = Progress(
        TextColumn("groups"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=notes(), transient=True
    )
    bar = progress.add_task("", total=num_groups)

    def count(_group: GroupSpread) -> None:
        progress.advance(bar)

    async def measure(client: ServerClient, _token: str | None) -> SpreadReport:
        dry_run = DryRun(
            judged(client, experiment.group_judge),
            stream_of(run, plain, tasks),
            num_groups=num_groups,
            num_samples=experiment.data.num_samples,
            num_in_flight=experiment.schedule.num_in_flight,
            compares=experiment.algorithm.resolve().advantage.baseline != "none",
            selection=selection_of(run, plain),
            on_group=count,
        )
        with progress:
            return await dry_run.measure()

    return await with_service(experiment, data_dir, measure)


def spread_view(report: SpreadReport) -> Lines:
    """A line per group, the least informative first, then the overall figures."""
    table = FactTable("task", "mean#", "deviation#", prose("rewards"))
    for group in sorted(report.groups, key=lambda one: one.deviation)[:_SHOWN_GROUPS]:
        table.add_row(
            group.task_id,
            "-" if group.reward_mean is None else f"{group.reward_mean:.2f}",
            f"{group.deviation:.2f}",
            " ".join(f"{reward:.3g}" for reward in group.rewards),
            style="" if group.is_informative else "dim",
        )
    return Lines(table, Text(), *map(Text, _figures(report)))


def _figures(report: SpreadReport) -> list[str]:
    num_sessions = sum(report.outcomes.values())
    lines = [
        f"{report.share_informative:.0%} of {len(report.groups)} groups have different rewards",
        f"{report.num_valid} of {num_sessions} sessions can be trained on, {report.sessions_per_s:.2f} sessions/s",
    ]
    if report.reward_mean is not None:
        lines.append(
            f"reward {report.reward_mean:.3f} on average; deviation within groups {report.deviation_within or 0:.3f}, "
            f"between tasks {report.deviation_between or 0:.3f}"
        )
    if report.tokens_per_session is not None:
        lines.append(f"{report.tokens_per_session:.0f} trained tokens a session")
    lines += [f"{number} sessions: {why}" for why, number in (report.invalid | report.degenerate).items()]
    return lines
