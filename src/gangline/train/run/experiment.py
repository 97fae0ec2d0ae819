"""An experiment: one YAML file with the model, the algorithm, the tasks and the service."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from pydantic import Field, ValidationError, field_validator

from gangline.domain.errors import InvalidRequest
from gangline.domain.ids import validated_id
from gangline.domain.mistakes import Problems, mistakes
from gangline.train.collecting.degenerates import DegenerateSettings
from gangline.train.collecting.group_judge import GroupJudgeSettings
from gangline.train.collecting.sampling.settings import SamplerSettings
from gangline.train.collecting.schedule import ScheduleSettings
from gangline.train.collecting.side_rollouts.coalitions import CoalitionSettings
from gangline.train.learning.algorithms import Algorithm, algorithm
from gangline.train.learning.learner_settings import LearnerSettings
from gangline.train.learning.mask_settings import FullMask, MaskSettings
from gangline.train.options import TrainingOptions
from gangline.train.run.controls import Control
from gangline.train.run.evaluation import EvaluationSettings
from gangline.train.run.hooks import HookSettings, load_hooks
from gangline.train.run.service_settings import ServiceSettings
from gangline.train.run.teacher import TeacherSettings
from gangline.train.run.tracking import TrackerName, TrackingSettings, check_trackers
from gangline.train.run.vetted import Vetted


class AlgorithmChoice(TrainingOptions):
    name: str = "grpo"
    """See `gangline train algorithms`."""
    overrides: Mapping[str, Any] = Field(default_factory=dict)
    """dotted setting -> value."""

    def resolve(self) -> Algorithm:
        """Raises: UnknownPlugin, InvalidRequest."""
        return algorithm(self.name, self.overrides)


class DataSettings(TrainingOptions):
    tasks: Path
    """As for `gangline submit`: JSON, JSON lines or TOML; relative to the experiment's file. Ids are replaced."""
    num_samples: int = Field(default=8, ge=1)
    """Sessions per group."""
    shuffle: bool = True
    """Shuffles each pass over the tasks by the experiment's seed; with a sampler, the tasks not yet drawn."""
    vetted: Vetted = "any"
    """`required` refuses tasks, including held-out tasks, that `gangline vet` did not find sound."""
    sampler: SamplerSettings | None = None
    """Chooses the next task, by measured difficulty or in stages; None uses all tasks, pass after pass."""
    seeded: bool = False
    """Derives sampling from the experiment's seed too: engines that support seeds then give the same tokens for the
    same weights. This makes vLLM slower.
    """


class Experiment(TrainingOptions):
    name: str
    """Name of the run and prefix of its task ids."""
    model: str
    """smollm2, or a model folder."""
    algorithm: AlgorithmChoice = AlgorithmChoice()
    mask: MaskSettings = FullMask()
    """Which sampled tokens are trained on, and with which weights."""
    degenerates: DegenerateSettings | None = None
    """Sessions and groups to leave out; None keeps all."""
    hooks: HookSettings = HookSettings()
    """Functions of installed distributions, by entry point name."""
    coalitions: CoalitionSettings | None = None
    """Distributes a session's advantage among players, using sessions with only some of them; None disables it."""
    data: DataSettings
    group_judge: GroupJudgeSettings | None = None
    """A model that compares the sessions of a group; None leaves the evaluator's rewards."""
    teacher: TeacherSettings | None = None
    """Scores the policy's tokens, for `loss.distillation`."""
    service: ServiceSettings = ServiceSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    learner: LearnerSettings = LearnerSettings()
    evaluation: EvaluationSettings | None = None
    """None disables evaluation on held-out tasks."""
    report_to: tuple[TrackerName, ...] = ("tensorboard",)
    """Trackers to report to, in addition to the run's own records."""
    tracking: TrackingSettings = TrackingSettings()
    control: Control = "none"
    """A control arm: the same experiment with one ingredient removed."""
    seed: int = 0

    @field_validator("name")
    @classmethod
    def _is_an_id(cls, name: str) -> str:
        return validated_id(name, "name")

    @property
    def most_coalition_sessions(self) -> int:
        """The largest number of sessions that coalitions add to a step, if no group has to be replaced."""
        if self.coalitions is None:
            return 0
        return self.schedule.groups_per_step * self.coalitions.most_coalitions * self.coalitions.samples

    def require_consistent(self) -> None:
        """Raises: UnknownPlugin, InvalidRequest."""
        algorithm = self.algorithm.resolve()
        if algorithm.follows_from_scores and self.coalitions is not None:
            raise InvalidRequest(
                "coalitions share out a group's advantages, which a critic or a token baseline replaces: leave one out."
            )
        learns_from_all = algorithm.critic is not None or algorithm.has_teacher
        if learns_from_all and self.degenerates is not None and self.degenerates.identical_rewards:
            raise InvalidRequest(
                "degenerates.identical_rewards leaves out groups by their rewards: a critic that never sees them "
                "predicts wrong values, and a teacher judges their tokens too. Set it to false."
            )
        if algorithm.compare == "roles" and self.coalitions is not None:
            raise InvalidRequest(
                "coalitions share out the sessions' common reward, and with compare `roles` each role has its own "
                "reward: leave out one of the two."
            )
        if algorithm.has_teacher != (self.teacher is not None):
            raise InvalidRequest(
                "loss.distillation (algorithm distill) needs an engine: `teacher: {url: http://HOST:PORT}`."
                if self.teacher is None
                else "the teacher has nothing to do: use algorithm distill or set loss.distillation, or leave it out."
            )
        if self.group_judge is not None and (
            self.data.num_samples < 2 or self.coalitions is not None or algorithm.advantage.baseline == "greedy"
        ):
            raise InvalidRequest(
                "group_judge compares the sessions of a group: set data.num_samples to 2 or more, and leave out "
                "coalitions and remax, whose further sessions have no group."
            )
        if self.control == "random_mask" and self.algorithm.resolve().loss.correction.level != "none":
            raise InvalidRequest(
                "control random_mask trains on tokens that no engine sampled, so they have no log-prob to correct by: "
                "set the override loss.correction.level: none."
            )


S = TypeVar("S", DataSettings, EvaluationSettings)


def read_experiment(path: Path) -> Experiment:
    """Raises: InvalidRequest, which lists every wrong setting; UnknownPlugin for an unknown algorithm or hook."""
    problems = Problems(str(path))
    found = examine_experiment(path, problems)
    problems.require_none()
    assert found is not None, "what is not an experiment has a problem"
    return found


def examine_experiment(path: Path, problems: Problems) -> Experiment | None:
    """The experiment, or None if its settings are malformed. Collects all problems.

    Raises: InvalidRequest if the file contains no settings at all.
    """
    document = _document(path)
    try:
        found = Experiment.model_validate(document)
    except ValidationError as error:
        problems.add(mistakes(error, Experiment))
        _examine_algorithm(document, problems)
        return None
    with problems.collected():
        found.require_consistent()
    with problems.collected():
        load_hooks(found.hooks)
    with problems.collected():
        check_trackers(found.report_to)
    changes: dict[str, Any] = {"data": _beside(path, found.data)}
    if found.evaluation is not None:
        changes["evaluation"] = _beside(path, found.evaluation)
    return found.model_copy(update=changes)


def task_files(path: Path) -> list[Path]:
    """The task files that an experiment names, even if other settings are malformed. Raises: InvalidRequest."""
    document = _document(path)
    tables: list[Any] = [document.get("data"), document.get("evaluation")]
    named = [cast("dict[str, Any]", table).get("tasks") for table in tables if isinstance(table, dict)]
    return [path.parent / file for file in named if isinstance(file, str)]


def _examine_algorithm(document: Mapping[str, Any], problems: Problems) -> None:
    """Check the algorithm's name and settings even if other settings are malformed."""
    try:
        choice = AlgorithmChoice.model_validate(document.get("algorithm", {}))
    except ValidationError:
        return  # reported already
    with problems.collected():
        choice.resolve()


def _document(path: Path) -> Mapping[str, Any]:
    """Raises: InvalidRequest."""
    import yaml  # noqa: PLC0415 - of the extra `training`

    try:
        document: object = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not YAML: {error}") from error
    if not isinstance(document, Mapping):
        raise InvalidRequest(f"{path} must be a mapping of settings, such as `name: my-run`.")
    return cast("Mapping[str, Any]", document)


def _beside(path: Path, settings: S) -> S:
    return settings.model_copy(update={"tasks": path.parent / settings.tasks})


def resolved_settings(experiment: Experiment) -> dict[str, Any]:
    """Every setting as JSON types, including derived settings: the algorithm's as `algorithm.settings`, groups in
    flight, and the settings of a service started for the run. Raises: InvalidRequest.
    """
    found = experiment.model_dump(mode="json")
    found["algorithm"]["settings"] = experiment.algorithm.resolve().model_dump(mode="json")
    found["schedule"]["groups_in_flight"] = experiment.schedule.num_in_flight
    if experiment.coalitions is not None:
        found["coalitions"]["most_sessions_per_step"] = experiment.most_coalition_sessions
    if experiment.service.url is None:
        resolved = experiment.service.resolved(experiment.model)
        for table in ("server", "node", "cluster", "up"):
            found["service"][table] = getattr(resolved, table).model_dump(mode="json")
    return found


def warnings_about(experiment: Experiment) -> list[str]:
    """Warnings about settings that are allowed but probably wrong, each with a remedy."""
    schedule, loss = experiment.schedule, experiment.algorithm.resolve().loss
    may_be_stale = schedule.staleness.max_lag > 0 and (schedule.mode == "async" or schedule.max_uses > 1)
    if may_be_stale and loss.correction.level == "none" and experiment.learner.old_logprobs == "trainer":
        return [
            f"tokens may be {schedule.staleness.max_lag} policy versions old, and are trained on as if they were "
            "fresh: loss.correction.level is none and learner.old_logprobs is trainer, so nothing compares them with "
            "the policy that sampled them. Leave out the override loss.correction.level, or set learner.old_logprobs: "
            "engine."
        ]
    return []


def digest_of(experiment: Experiment) -> str:
    """A digest that does not depend on the order of settings, the location of files, the service, trackers, or the
    numbers of steps and of checkpoints that are kept, since a run may be extended and its disk may fill.
    """
    left_out: Any = {
        "schedule": {"steps", "keep_checkpoints"},
        "data": {"tasks", "vetted"},
        "evaluation": {"tasks"},
        "service": True,
        "teacher": {"url", "api_key_env", "rows_at_once"},
        "group_judge": {"url", "api_key_env", "call_timeout_seconds", "calls_at_once"},
        "report_to": True,
        "tracking": True,
    }
    fields = experiment.model_dump(mode="json", exclude=left_out)
    return hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).hexdigest()
