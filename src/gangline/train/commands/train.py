"""`gangline train`: lists algorithms; validates, dry-runs, runs and resumes experiments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gangline.cli.processes.serving import WatchedOption
from gangline.cli.tasks.files import read_tasks, validated
from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import DataOption, JsonOption, console, notes, open_command, print_json
from gangline.cli.terminal.tables import FactTable, prose
from gangline.domain.errors import InvalidRequest
from gangline.settings.machine import Settings
from gangline.train.commands.view import reward_chart, shown_reward

if TYPE_CHECKING:
    from gangline.domain.mistakes import Problems
    from gangline.domain.node_views import TemplateFacts
    from gangline.train.commands.run import Ran
    from gangline.train.run.experiment import Experiment
    from gangline.train.trainers.verl.experiment import VerlExperiment

train = typer.Typer(no_args_is_help=True, help="Train on groups of sessions.")


@train.command()
def algorithms(as_json: JsonOption = False) -> None:
    """List the algorithms, each by its difference from the base, GRPO."""
    from gangline.train.learning.algorithms import OVERRIDES, Algorithm, algorithm, differences

    changes = {name: differences(algorithm(name)) for name in OVERRIDES}
    if as_json:
        print_json(
            {"base": Algorithm().model_dump(), "algorithms": {name: _document(one) for name, one in changes.items()}}
        )
        return
    console().print(_table(changes))


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        notes().print(f"Warning: {warning}", markup=False, soft_wrap=True, style="yellow")


def _document(changes: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    return {setting: {"base": before, "value": after} for setting, (before, after) in changes.items()}


def _table(changes: dict[str, dict[str, tuple[Any, Any]]]) -> FactTable:
    table = FactTable("algorithm", "setting", prose("base"), prose("value"))
    for name, differing in changes.items():
        if not differing:
            table.add_row(name, "(the base)", "", "")
        for index, (setting, (before, after)) in enumerate(differing.items()):
            table.add_row("" if index else name, setting, str(before), str(after))
    return table


SpecArgument = Annotated[Path, typer.Argument(help="The experiment's YAML file.", show_default=False)]


@train.command()
def validate(spec: SpecArgument, as_json: JsonOption = False) -> None:
    """Check an experiment's settings, algorithm and tasks, without a GPU, a model or a service.

    --json prints every setting with its default; the algorithm's settings are under algorithm.settings. With `trainer:
    verl` in the file, verl itself loads and checks its configuration, and --json prints all of that.
    """
    from gangline.train.run.experiment import resolved_settings, warnings_about
    from gangline.train.trainers.verl.experiment import is_verl

    if is_verl(spec):
        _validate_verl(spec, as_json)
        return

    experiment, tasks, held_out = _read(spec)
    template, lacking = _template_of(experiment, tasks)
    warnings = warnings_about(experiment)
    if as_json:
        counts = {"num_tasks": len(tasks), "num_held_out_tasks": len(held_out)}
        found = {**counts, "warnings": warnings, "template": template, "template_lacks": lacking}
        print_json(resolved_settings(experiment) | found)
        return
    table = FactTable("setting", prose("value"))
    for name, value in _flat(experiment.model_dump(mode="json", exclude_defaults=True)):
        table.add_row(name, str(value))
    console().print(table)
    also = f" and {len(held_out)} held-out ones" if held_out else ""
    console().print(f"\n{spec} is valid: {len(tasks)} tasks{also}, {experiment.schedule.steps} steps", markup=False)
    if num := experiment.most_coalition_sessions:
        trained = experiment.schedule.groups_per_step * experiment.data.num_samples
        console().print(f"coalitions: up to {num} sessions a step alongside the {trained} that are trained on")
    _warn([*warnings, *lacking])


def _template_of(experiment: Experiment, tasks: list[dict[str, Any]]) -> tuple[TemplateFacts | None, list[str]]:
    """Facts of the model's chat template, and features it lacks for these tasks; None if the model is not available
    here.
    """
    import asyncio

    from gangline.domain.errors import GanglineError
    from gangline.domain.task import TaskRequest
    from gangline.domain.template_findings import lacks, lacks_of_tasks
    from gangline.models.engines.generate.template import template_facts

    try:
        facts = asyncio.run(template_facts(experiment.model))
    except (GanglineError, OSError, ValueError):  # the settings are valid all the same
        return None, [f"the chat template of {experiment.model} was not checked: its tokenizer is not here"]
    wanted = [TaskRequest.model_validate(task) for task in tasks]
    return facts, [*lacks(facts), *lacks_of_tasks([facts], wanted)]


def _validate_verl(spec: Path, as_json: bool) -> None:
    import asyncio

    from gangline.train.commands.verl import check_verl
    from gangline.train.trainers.verl.experiment import read_verl_experiment

    experiment = read_verl_experiment(spec)
    tasks, held_out = _tasks_of(experiment)
    config = asyncio.run(check_verl(experiment, tasks, held_out))
    if as_json:
        print_json({"num_tasks": len(tasks), "num_held_out_tasks": len(held_out), "verl": config})
        return
    console().print(f"{spec} is valid, and verl takes its settings: {len(tasks)} tasks", markup=False)


@train.command("dry-run")
def dry_run_command(
    spec: SpecArgument,
    groups: Annotated[int, typer.Option("--groups", min=1, help="Groups to sample.")] = 16,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the spread of rewards before a run: sample some groups, train nothing.

    Groups whose sessions all earn the same teach nothing. Uses a running service, or one started for it.
    """
    import asyncio

    from gangline.train.commands.dry_run import measure_spread, spread_view

    experiment, tasks, _held_out = _read(spec)
    data_dir = (data or Settings.from_environ().data_dir).absolute()
    try:
        report = asyncio.run(measure_spread(experiment, tasks, data_dir, groups))
    except (asyncio.CancelledError, KeyboardInterrupt):
        notes().print("Stopped.")
        raise typer.Exit(Exit.INTERRUPTED) from None
    if as_json:
        print_json({"report": report, "advice": report.advice()})
        return
    console().print(spread_view(report))
    _warn(report.advice())


@train.command()
def memory(
    spec: SpecArgument,
    model: Annotated[
        Path | None,
        typer.Option(help="A model's folder or config.json instead of the experiment's.", show_default=False),
    ] = None,
    places: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens computed at a time instead of learner.max_places.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the memory of a training step by its parts, and the run's disk, from the model's configuration alone.

    The experiment's tasks are not read, and no weights are loaded.
    """
    from gangline.models.language.models import resolve_model
    from gangline.train.learning.compute.memory import GIB, read_shape, run_disk, step_memory
    from gangline.train.run.experiment import read_experiment

    experiment = read_experiment(spec)
    learner = experiment.learner
    wanted = learner.gradient_checkpointing
    shape = read_shape(model or resolve_model(experiment.model))
    found = step_memory(
        shape,
        learner,
        num_places=places or learner.max_places,
        checkpointing=learner.device != "cpu" if wanted is None else wanted,
        has_reference=learner.reference_metric or experiment.algorithm.resolve().needs_reference,
    )
    disk = run_disk(
        shape,
        learner,
        keep_weights=experiment.service.keep_weights,
        keep_checkpoints=experiment.schedule.keep_checkpoints,
    )
    on_disk = {f"disk: {name}": num_bytes for name, num_bytes in disk._asdict().items()}
    parts = vars(found) | {"total": found.total} | on_disk
    if as_json:
        print_json(parts)
        return
    table = FactTable("part", "GiB#")
    for name, num_bytes in parts.items():
        table.add_row(name, f"{num_bytes / GIB:.1f}")
    console().print(table)


@train.command("run")
def run_command(
    spec: SpecArgument,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of the whole run instead of schedule.steps.", show_default=False),
    ] = None,
    data: DataOption = None,
    parent: WatchedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train through a running service, or through one started for the run.

    A stopped or killed run resumes from its last checkpoint when it is started again. Its output is in DATA/runs/NAME:
    metrics.jsonl, evaluations.jsonl, tensorboard, reward.png, checkpoints, model, experiment.json, lineage.json,
    results.json. With `trainer: verl` in the file, verl trains and writes verl_metrics.jsonl, verl.log and checkpoints.
    """
    import asyncio

    from gangline.cli.service.bring_up import ended_with
    from gangline.train.commands.run import run_experiment
    from gangline.train.run.experiment import warnings_about
    from gangline.train.trainers.verl.experiment import is_verl

    data_dir = (data or Settings.from_environ().data_dir).absolute()
    if is_verl(spec):
        if steps is not None:
            raise InvalidRequest(
                "--steps is of the reference trainer: set verl's trainer.total_training_steps instead."
            )
        _run_verl(spec, data_dir, parent, as_json)
        return
    experiment, tasks, held_out = _read(spec)
    if steps is not None:
        schedule = experiment.schedule.model_copy(update={"steps": steps})
        experiment = experiment.model_copy(update={"schedule": schedule})
    _warn(warnings_about(experiment))
    try:
        ran = asyncio.run(ended_with(parent, run_experiment(experiment, tasks, data_dir, held_out)))
    except (asyncio.CancelledError, KeyboardInterrupt):
        notes().print("Stopped. Start it again to continue from the last checkpoint.")
        raise typer.Exit(Exit.INTERRUPTED) from None
    if as_json:
        print_json(ran.results)
        return
    console().print(reward_chart(ran.records, ran.evaluations))
    console().print(
        f"\n{_outcome(ran)}\nin {ran.results.num_steps} steps and {ran.results.wall_s / 60:.1f} minutes\n"
        f"chart    {ran.chart}\nmodel    {ran.results.weights}\nrun      {ran.folder}\n"
        f"page     {open_command(f'runs/{ran.folder.name}', data)}, while a service runs",
        markup=False,
        soft_wrap=True,
    )


def _run_verl(spec: Path, data_dir: Path, parent: int | None, as_json: bool) -> None:
    import asyncio

    from gangline.cli.service.bring_up import ended_with
    from gangline.train.commands.verl import train_with_verl
    from gangline.train.trainers.verl.experiment import read_verl_experiment

    experiment = read_verl_experiment(spec)
    tasks, held_out = _tasks_of(experiment)
    try:
        metrics = asyncio.run(ended_with(parent, train_with_verl(experiment, tasks, held_out, data_dir)))
    except (asyncio.CancelledError, KeyboardInterrupt):
        notes().print("Stopped. Start it again to continue from verl's last checkpoint.")
        raise typer.Exit(Exit.INTERRUPTED) from None
    folder = data_dir / "runs" / experiment.name
    if as_json:
        print_json({"run": str(folder), "metrics": metrics})
        return
    console().print(f"\nverl has trained {metrics[-1]['step'] if metrics else 0} steps; run {folder}", markup=False)


def _outcome(ran: Ran) -> str:
    """The headline: the paired difference on held-out tasks, never a comparison of training steps."""
    if (difference := ran.results.held_out_difference) is None:
        return (
            "What was learned was not measured: there is no evaluation on held-out tasks. The rewards of training "
            "steps are of other tasks each time."
        )
    first, last = ran.evaluations[0], ran.evaluations[-1]
    return (
        f"on {difference.num_tasks} held-out tasks the mean reward changed by {difference} (the same tasks before and "
        f"after): {shown_reward(first)} at first, {shown_reward(last)} at last"
    )


def _read(spec: Path) -> tuple[Experiment, list[dict[str, Any]], list[dict[str, Any]]]:
    """Tasks and held-out tasks. Raises: InvalidRequest, UnknownPlugin, with all problems of settings and tasks."""
    from gangline.domain.mistakes import Problems
    from gangline.train.collecting.sampling.sampler import chooser_of
    from gangline.train.run.experiment import examine_experiment, task_files

    problems = Problems(str(spec))
    experiment = examine_experiment(spec, problems)
    if experiment is None:
        for file in task_files(spec):
            _right_tasks(file, 1, problems)
        problems.require_none()
    assert experiment is not None
    tasks, held_out = _examined_tasks(experiment, problems)
    problems.require_none()
    if experiment.data.sampler is not None:
        chooser_of(experiment.data.sampler, tasks, seed=experiment.seed)  # does it fit these tasks?
    return experiment, tasks, held_out


def _tasks_of(experiment: Experiment | VerlExperiment) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Tasks and held-out tasks. Raises: InvalidRequest, UnknownPlugin."""
    from gangline.domain.mistakes import Problems

    problems = Problems(experiment.name)
    found = _examined_tasks(experiment, problems)
    problems.require_none()
    return found


def _examined_tasks(
    experiment: Experiment | VerlExperiment, problems: Problems
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The valid tasks and the valid held-out tasks."""
    from gangline.train.run.evaluation import require_disjoint
    from gangline.train.run.vetted import require_vetted

    data, evaluation = experiment.data, experiment.evaluation
    held_out = [] if evaluation is None else _right_tasks(evaluation.tasks, evaluation.num_samples, problems)
    tasks = _right_tasks(data.tasks, data.num_samples, problems)
    with problems.collected():
        require_disjoint(tasks, held_out)
    if data.vetted == "required":
        for named, chosen in (("tasks", tasks), ("held-out tasks", held_out)):
            with problems.collected():
                require_vetted(chosen, named)
    return tasks, held_out


def _right_tasks(path: Path, num_samples: int, problems: Problems) -> list[dict[str, Any]]:
    tasks: list[dict[str, Any]] = []
    with problems.collected():
        for number, task in enumerate(read_tasks(str(path)), 1):
            with problems.collected():
                validated({**task, "num_samples": num_samples}, f"{path}, task {number}")
                tasks.append(task)
    return tasks


def _flat(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield prefix + name, value


def register(app: typer.Typer) -> None:
    app.add_typer(train, name="train")
