"""One run of the reference trainer: its service, its folder and its messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gangline.cli.service.through import with_own, with_running
from gangline.cli.service.up import plan_of
from gangline.cli.terminal.output import notes
from gangline.cli.terminal.waiting import waits_told
from gangline.domain.errors import Conflict, GanglineError
from gangline.machine.durable import acquire, disk_full_at, is_disk_full
from gangline.machine.private import close_files, close_to_others, make_private_file
from gangline.machine.telemetry.logs import LineFormatter
from gangline.train.commands.view import LearningView, draw_curves
from gangline.wire.client.running import find_service

if TYPE_CHECKING:
    from gangline.train.collecting.sampling.sampler import TaskSampler
    from gangline.train.collecting.selection import Selection
    from gangline.train.collecting.task_stream import TaskStream
    from gangline.train.learning.learner import Learner
    from gangline.train.learning.mask_settings import GroupMasks
    from gangline.train.run.evaluation import Evaluation
    from gangline.train.run.experiment import Experiment
    from gangline.train.run.teacher import Teacher
    from gangline.train.run.tracking import Tracking
    from gangline.train.runs.records import EvaluationRecord, Results, StepRecord
    from gangline.wire.client.server import ServerClient

T = TypeVar("T")


class Ran(NamedTuple):
    results: Results
    records: list[StepRecord]
    evaluations: list[EvaluationRecord]
    folder: Path
    chart: Path


async def with_service(
    experiment: Experiment, data_dir: Path, body: Callable[[ServerClient, str | None], Awaitable[T]]
) -> T:
    """Runs `body` with the experiment's service and its token. Raises: errors of `body` and of the service."""
    service = experiment.service
    if service.url is not None:
        return await with_running(find_service(data_dir, service.url), body)
    return await with_own(plan_of(service.resolved(experiment.model, data_dir)), body)


async def run_experiment(
    experiment: Experiment,
    tasks: Sequence[Mapping[str, Any]],
    data_dir: Path,
    held_out: Sequence[Mapping[str, Any]] = (),
) -> Ran:
    """Trains through a running service, or one started for the run. held_out: tasks of the experiment's `evaluation`.

    Raises: errors of the trainer or the service.
    """

    async def train(client: ServerClient, token: str | None) -> Ran:
        from gangline.cli.tasks.unshown import lines_of_templates
        from gangline.domain.task import TaskRequest

        wanted = [TaskRequest.model_validate(task) for task in tasks]
        for line in await lines_of_templates(client, wanted, to_train=True):
            _warn(line)
        return await train_through(client, token, experiment, tasks, data_dir, held_out)

    return await with_service(experiment, data_dir, train)


async def train_through(
    client: ServerClient,
    token: str | None,
    experiment: Experiment,
    tasks: Sequence[Mapping[str, Any]],
    data_dir: Path,
    held_out: Sequence[Mapping[str, Any]] = (),
) -> Ran:
    """Runs all remaining steps of an experiment.

    Raises: DiskFull. Conflict if its folder is in use or belongs to another experiment. InvalidRequest if held-out
    tasks are among the training tasks.
    """
    from gangline.train.collecting.group_judge import judged
    from gangline.train.run.lineage import key_of
    from gangline.train.run.trainer import Trainer
    from gangline.train.weights.update import ServiceWeights

    _require_fitting(experiment, tasks, held_out)
    folder = data_dir / "runs" / experiment.name
    with _full_disk_told(folder), _held(folder), _logged(folder / "trainer.log"):
        model_folder = await asyncio.to_thread(_model_folder, experiment.model)
        masks = await asyncio.to_thread(_masks, experiment, model_folder)
        key = key_of(folder)
        run = f"{experiment.name}-{key}"
        sampler = await asyncio.to_thread(_sampler, folder, experiment, tasks)
        stream = stream_of(run, experiment, tasks, sampler)
        evaluation = _evaluation(run, experiment, held_out, client)
        digests = stream.digest, None if evaluation is None else evaluation.digest
        num_done = await asyncio.to_thread(_begin, folder, experiment, key, digests, model_folder)
        if num_done:
            notes().print(f"Going on after step {num_done} of {experiment.schedule.steps}")
        learner = await asyncio.to_thread(_learner, experiment, model_folder)
        weights_folder = experiment.service.weights or folder / "weights"
        tracking = await asyncio.to_thread(_tracking, experiment, folder, run, num_done)
        async with _teacher(experiment, model_folder) as teacher:
            with tracking, _view(folder, experiment, evaluation, num_done) as view:
                trainer = Trainer(
                    folder,
                    schedule=experiment.schedule,
                    algorithm=experiment.algorithm.resolve(),
                    learner=learner,
                    service=judged(client, experiment.group_judge),
                    stream=stream,
                    weights=ServiceWeights(client, weights_folder, token=token, **_pushing(experiment)),
                    selection=selection_of(run, experiment),
                    masks=masks,
                    coalitions=experiment.coalitions,
                    teacher=teacher,
                    on_step=_to_each(tracking.add, view.add),
                    evaluation=evaluation,
                    on_evaluation=_to_each(tracking.add, view.add_evaluation),
                )
                async with waits_told(client, view.say):
                    last_version = await trainer.run()
        return await asyncio.to_thread(_finish, folder, experiment, learner, model_folder, view, last_version)


def _require_fitting(
    experiment: Experiment, tasks: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]
) -> None:
    """Raises: InvalidRequest."""
    from gangline.train.run.evaluation import require_disjoint
    from gangline.train.run.vetted import require_vetted

    require_disjoint(tasks, held_out)
    if experiment.data.vetted == "required":
        require_vetted(tasks, "tasks")
        require_vetted(held_out, "held-out tasks")


@contextlib.asynccontextmanager
async def _teacher(experiment: Experiment, model_folder: Path) -> AsyncGenerator[Teacher | None]:
    """Raises: InvalidRequest if its ids mean something else to the model; EngineError."""
    from gangline.models.language.tokenizer import load_tokenizer
    from gangline.train.run.teacher import opened_teacher

    if experiment.teacher is None:
        yield None
        return
    tokenizer = await asyncio.to_thread(load_tokenizer, model_folder)
    async with opened_teacher(experiment.teacher, tokenizer, patience_s=experiment.schedule.patience_s) as teacher:
        yield teacher


def stream_of(
    run: str, experiment: Experiment, tasks: Sequence[Mapping[str, Any]], sampler: TaskSampler | None = None
) -> TaskStream:
    from gangline.train.collecting.task_stream import TaskStream

    data = experiment.data
    return TaskStream(
        run,
        tasks,
        num_samples=data.num_samples,
        shuffle=data.shuffle,
        seed=experiment.seed,
        seeded=data.seeded,
        sampler=sampler,
    )


def _sampler(folder: Path, experiment: Experiment, tasks: Sequence[Mapping[str, Any]]) -> TaskSampler | None:
    """Raises: InvalidRequest."""
    from gangline.train.collecting.sampling.history import SamplingHistory
    from gangline.train.collecting.sampling.sampler import TaskSampler, chooser_of

    data = experiment.data
    if data.sampler is None:
        return None
    chooser = chooser_of(data.sampler, tasks, seed=experiment.seed, shuffle=data.shuffle)
    return TaskSampler(chooser, SamplingHistory(folder / "sampled.jsonl"), len(tasks))


def _view(folder: Path, experiment: Experiment, evaluation: Evaluation | None, num_done: int) -> LearningView:
    from gangline.train.runs.log import read_evaluations, read_records

    steps = experiment.schedule.steps
    return LearningView(
        notes(),
        num_steps=steps,
        num_evaluations=0 if evaluation is None else evaluation.num_due(steps),
        before=[record for record in read_records(folder / "metrics.jsonl") if record.step <= num_done],
        evaluations_before=[
            read_evaluation
            for read_evaluation in read_evaluations(folder / "evaluations.jsonl")
            if read_evaluation.step <= num_done
        ],
    )


def _to_each(*calls: Callable[[T], None]) -> Callable[[T], None]:
    def call_all(record: T) -> None:
        for call in calls:
            call(record)

    return call_all


def _tracking(experiment: Experiment, folder: Path, run: str, last_step: int) -> Tracking:
    """Raises: InvalidRequest."""
    from gangline.train.run.experiment import resolved_settings
    from gangline.train.run.tracking import Tracking

    return Tracking.start(
        experiment.report_to,
        experiment.tracking,
        folder=folder,
        run=run,
        config=resolved_settings(experiment),
        last_step=last_step,
    )


def selection_of(run: str, experiment: Experiment) -> Selection:
    from gangline.train.collecting.selection import Selection
    from gangline.train.run.controls import shuffled_rewards
    from gangline.train.run.hooks import load_hooks

    hooks, is_control = load_hooks(experiment.hooks), experiment.control == "shuffled_rewards"
    return Selection(
        reward=hooks.reward,
        prepare=hooks.prepare,
        filter=hooks.filter,
        degenerates=experiment.degenerates,
        control=shuffled_rewards(experiment.seed, run) if is_control else None,
        admit=hooks.admit,
    )


def _masks(experiment: Experiment, model_folder: Path) -> GroupMasks:
    """Raises: InvalidRequest if a thinking marker is not a single token of the model."""
    from gangline.models.language.tokenizer import load_tokenizer
    from gangline.train.learning.mask_settings import ActionOnlyMask, GroupMasks
    from gangline.train.run.controls import controlled_mask
    from gangline.train.run.hooks import load_hooks

    needs_tokenizer = isinstance(experiment.mask, ActionOnlyMask)
    encode = load_tokenizer(model_folder).encode if needs_tokenizer else None
    control = partial(controlled_mask, experiment.control, experiment.seed)
    return GroupMasks(experiment.mask, encode, load_hooks(experiment.hooks).mask, control)


def _evaluation(
    run: str, experiment: Experiment, held_out: Sequence[Mapping[str, Any]], client: ServerClient
) -> Evaluation | None:
    from gangline.train.run.evaluation import Evaluation

    if (settings := experiment.evaluation) is None:
        return None
    seed = experiment.seed if experiment.data.seeded else None
    return Evaluation(run, held_out, client, num_samples=settings.num_samples, every=settings.every, seed=seed)


def _begin(folder: Path, experiment: Experiment, key: str, digests: tuple[str, str | None], model_folder: Path) -> int:
    """Records the inputs of the run. Returns the number of completed steps.

    digests: digests of the tasks and of the held-out tasks. Raises: Conflict.
    """
    from gangline.train.run.checkpoint import Checkpoints, checkpoint_digest
    from gangline.train.run.lineage import begin_life

    found = Checkpoints(folder / "checkpoints").latest(_warn)
    num_done = 0 if found is None else found[1].step
    begin_life(
        folder,
        experiment,
        key=key,
        tasks_digest=digests[0],
        held_out_digest=digests[1],
        model_folder=model_folder,
        first_step=num_done + 1,
        checkpoint_digest="" if found is None else checkpoint_digest(found[0]),
    )
    return num_done


def _warn(line: str) -> None:
    notes().print(f"Warning: {line}", markup=False, soft_wrap=True, style="yellow")


def _finish(
    folder: Path,
    experiment: Experiment,
    learner: Learner,
    model_folder: Path,
    view: LearningView,
    last_version: int,
) -> Ran:
    from gangline.train.run.lineage import write_results

    weights = folder / "model"
    save_model(learner, model_folder, weights)
    if experiment.service.weights is None:
        shutil.rmtree(folder / "weights", ignore_errors=True)  # the last weights are the model's
    records, evaluations = view.records, view.evaluations
    results = write_results(folder, records, evaluations, last_version=last_version, weights=weights)
    name = experiment.name
    chart = draw_curves({name: records}, folder / "reward.png", title=name, evaluations={name: evaluations})
    close_files(folder)  # libraries wrote some of them
    return Ran(results, records, evaluations, folder, chart)


@contextlib.contextmanager
def _full_disk_told(folder: Path) -> Generator[None]:
    """Raises: DiskFull for any write of the run that failed."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, GanglineError) and (full := disk_full_at(error, folder)) is not None:
            raise full from error
        raise


class _LogFile(logging.FileHandler):
    """Skips write errors of a full disk: the run's own error reports it once."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not is_disk_full(sys.exc_info()[1] or Exception()):
            super().handleError(record)


@contextlib.contextmanager
def _held(folder: Path) -> Generator[None]:
    close_to_others(folder)
    try:
        lock = acquire(folder / "run.lock")
    except BlockingIOError:
        raise Conflict(f"another trainer is at work in {folder}. Wait for it, or stop it.") from None
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _logged(path: Path) -> Generator[None]:
    """Sends the trainer's messages about single groups to a file instead of the terminal."""
    make_private_file(path)
    handler, log = _LogFile(path), logging.getLogger("gangline")
    handler.setFormatter(LineFormatter("text"))
    propagated, level = log.propagate, log.level
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagated
        log.setLevel(level)
        handler.close()


def _model_folder(name: str) -> Path:
    from gangline.models.language.models import resolve_model

    return resolve_model(name)


def _learner(experiment: Experiment, model_folder: Path) -> Learner:
    from transformers.utils import logging as hf_logging

    from gangline.train.learning.learner import Learner

    hf_logging.disable_progress_bar()
    return Learner(model_folder, experiment.algorithm.resolve(), experiment.learner, seed=experiment.seed)


def _pushing(experiment: Experiment) -> dict[str, Any]:
    return {"mode": experiment.service.update_mode, "keep_last": experiment.service.keep_weights}


def save_model(learner: Learner, model_folder: Path, target: Path) -> None:
    """Saves the whole trained model: weights, configuration, tokenizer."""
    learner.save_weights(target)
    for pattern in ("*.json", "*.jinja", "*.model", "*.txt"):
        for path in model_folder.glob(pattern):
            if not (target / path.name).exists() and not path.name.endswith(".index.json"):  # of other files
                shutil.copyfile(path, target / path.name)
