"""`gangline runs`: lists, shows and compares the training runs of a data folder."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from gangline.cli.terminal.output import DataOption, JsonOption, console, notes, open_command, print_json
from gangline.cli.terminal.tables import Column, FactTable, numbers, prose
from gangline.domain.weight_updates import advice_on_phases
from gangline.settings.machine import Settings
from gangline.train.commands.view import draw_curves, reward_chart

if TYPE_CHECKING:
    from gangline.train.runs.ancestry import Ancestry, Relative
    from gangline.train.runs.records import PairedDifference
    from gangline.train.runs.store import Arm, Comparison, Run, RunSummary

runs = typer.Typer(no_args_is_help=True, help="Training runs of a data folder.")

NameArgument = Annotated[str, typer.Argument(metavar="RUN", help="Its name, or the path of its folder.")]
_LIVES_SHOWN = 5


@runs.command("list")
def list_runs(data: DataOption = None, as_json: JsonOption = False) -> None:
    """List the runs, the latest first, with their rewards on held-out tasks."""
    from gangline.train.runs.store import read_runs

    found = [run.summary for run in read_runs(_data_dir(data))]
    if as_json:
        print_json({"runs": found})
        return
    if not found:
        notes().print("There are no runs yet: gangline train run SPEC makes one.", markup=False)
        return
    console().print(_list_table(found))


@runs.command()
def show(name: NameArgument, data: DataOption = None, as_json: JsonOption = False) -> None:
    """Show a run: its curve, its result, its ancestors and descendants, each start with versions and commit."""
    from gangline.train.runs.ancestry import ancestry_of, readable_runs
    from gangline.train.runs.store import read_run

    run = read_run(_data_dir(data), name)
    ancestry = ancestry_of(run, readable_runs(_data_dir(data)))
    if as_json:
        print_json(msgspec.structs.asdict(run) | {"ancestry": ancestry})
        return
    out = console()
    out.print(reward_chart(run.records, run.evaluations))
    for title, value in _facts(run, ancestry):
        out.print(f"{title:<12}{value}", markup=False, highlight=False, soft_wrap=True)
    if Path(run.summary.folder).parent == _data_dir(data) / "runs":  # else the page does not list it
        out.print(f"{'page':<12}{open_command(f'runs/{run.summary.name}', data)}, while a service runs", markup=False)


@runs.command()
def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names of runs, the baseline first.")],
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw the runs' curves to this PNG file.", show_default=False)
    ] = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs on their held-out tasks. Runs that differ in their seed alone are one arm.

    The difference is that of the last evaluations from the first arm's, task by task, with its standard error.
    """
    from gangline.train.runs.store import compare_runs, read_run

    found = [read_run(_data_dir(data), name) for name in dict.fromkeys(names)]
    comparison = compare_runs(found)
    if picture is not None:
        draw_curves(
            {run.summary.name: run.records for run in found},
            picture,
            title="runs",
            evaluations={run.summary.name: run.evaluations for run in found},
        )
    if as_json:
        print_json(comparison)
        return
    console().print(_comparison_table(comparison))
    for line in [*_unfinished(found), *_remarks(comparison)]:
        notes().print(line, markup=False, soft_wrap=True)


def _data_dir(data: Path | None) -> Path:
    return (data or Settings.from_environ().data_dir).absolute()


def _list_table(found: list[RunSummary]) -> FactTable:
    table = FactTable(
        *("run", "state", "steps#", numbers("before", 3), numbers("after", 3)),
        *("difference#", prose("algorithm", 2), Column("updated", 1)),
    )
    for one in found:
        table.add_row(
            one.name,
            one.state,
            f"{one.num_done}/{one.num_steps}",
            _reward(one.first_evaluation),
            _reward(one.last_evaluation),
            "-" if one.held_out_difference is None else str(one.held_out_difference),
            one.algorithm if one.control == "none" else f"{one.algorithm}, control",
            one.updated_at[5:16].replace("T", " "),
        )
    return table


def _facts(run: Run, ancestry: Ancestry) -> list[tuple[str, str]]:
    one = run.summary
    facts = [
        ("run", f"{one.name}: {one.state}, {one.num_done} of {one.num_steps} steps, {one.wall_s / 60:.1f} minutes"),
        ("model", one.model),
        ("algorithm", f"{one.algorithm}, seed {one.seed}" + ("" if one.control == "none" else f", {one.control}")),
    ]
    if (difference := one.held_out_difference) is not None:
        facts.append(("held out", f"{_reward(one.first_evaluation)} to {_reward(one.last_evaluation)}: {difference}"))
    for title, relatives in (("ancestors", ancestry.ancestors), ("descendants", ancestry.descendants)):
        facts += [(title if relative is relatives[0] else "", _relative(relative)) for relative in relatives]
    life = run.lives[-1]
    digests = {"experiment": life.experiment_digest, "tasks": life.tasks_digest, "model": life.model_digest}
    if life.checkpoint_digest:
        digests["checkpoint"] = life.checkpoint_digest
    facts.append(("digests", ", ".join(f"{what} {digest[:12]}" for what, digest in digests.items())))
    updates = [record.update for record in run.records if record.update is not None]
    if updates:
        phases = {name: fmean(update.phases[name] for update in updates) for name in updates[0].phases}
        times = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
        facts.append(("weights", f"{len(updates)} pushed, {sum(phases.values()):.1f} s each: {times}"))
        facts += [("", summary)] if (summary := advice_on_phases(phases)) is not None else []
    for number, life in list(enumerate(run.lives, 1))[-_LIVES_SHOWN:]:
        commit = "" if life.commit is None else f", commit {life.commit[:12]}"
        facts.append((f"start {number}", f"{life.started_at} at step {life.first_step}, {life.gangline}{commit}"))
    return [*facts, ("folder", one.folder)]


def _relative(one: Relative) -> str:
    gone = "" if one.is_here else ", which is not here any more"
    return f"{one.run}{gone}: {one.by} after step {one.step}, generation {one.generation}"


def _comparison_table(comparison: Comparison) -> FactTable:
    table = FactTable(prose("runs"), "held out#", "seeds#", "difference#", prose("settings"))
    for arm in comparison.arms:
        table.add_row(
            ", ".join(arm.runs),
            _reward(arm.reward_mean),
            str(len(arm.runs)) if arm.deviation_of_seeds is None else f"{len(arm.runs)} ± {arm.deviation_of_seeds:.3f}",
            "-" if arm.difference is None else _exactly(arm.difference),
            ", ".join(f"{name}={_shown(value)}" for name, value in arm.settings.items()),
        )
    return table


def _exactly(difference: PairedDifference) -> str:
    error = "" if difference.standard_error is None else f" ± {difference.standard_error:.3f}"
    return f"{difference.mean:+.3f}{error}"


def _unfinished(found: list[Run]) -> list[str]:
    unfinished = [run.summary for run in found if run.summary.num_done < run.summary.num_steps]
    return [f"{one.name} has done {one.num_done} of {one.num_steps} steps." for one in unfinished]


def _remarks(comparison: Comparison) -> list[str]:
    base, *others = comparison.arms
    return [remark for arm in others if (remark := _remark(base, arm)) is not None]


def _remark(base: Arm, arm: Arm) -> str | None:
    names = f"{arm.runs[0]} and {base.runs[0]}"
    if (difference := arm.difference) is None:
        return f"{names} cannot be compared: their held-out tasks differ, or one was not evaluated."
    error = difference.standard_error
    if error is not None and abs(difference.mean) < 2 * error:
        return f"{names}: no difference can be seen on {difference.num_tasks} held-out tasks ({_exactly(difference)})."
    return None


def _reward(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _shown(value: Any) -> str:
    return "default" if value is None else str(value)


def register(app: typer.Typer) -> None:
    app.add_typer(runs, name="runs")
