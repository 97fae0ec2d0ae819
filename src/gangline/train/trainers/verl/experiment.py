"""An experiment whose trainer is verl: one YAML file, and the resulting arguments of verl's own command."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, ValidationError, field_validator

from gangline.domain.errors import InvalidRequest
from gangline.domain.ids import validated_id
from gangline.domain.mistakes import mistakes
from gangline.machine.durable import write_whole
from gangline.train.options import TrainingOptions
from gangline.train.run.evaluation import EvaluationSettings
from gangline.train.run.service_settings import ServiceSettings
from gangline.train.run.vetted import Vetted
from gangline.train.trainers.verl.settings import KEY, MANAGER

_AFTER_THE_LAST = 1_000_000
"""Steps between validations; verl always validates after its last step."""
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$")
_MANAGER_KEY = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class"


class VerlData(TrainingOptions):
    tasks: Path
    """As for `gangline submit`; relative to the experiment's file. Ids are replaced."""
    num_samples: int = Field(default=8, ge=1)
    """Sessions per prompt."""
    vetted: Vetted = "any"
    """`required` refuses tasks, including held-out tasks, that `gangline vet` did not find sound."""


class VerlExperiment(TrainingOptions):
    trainer: Literal["verl"]
    name: str
    """Name of the run."""
    model: str
    """Folder or name, for verl."""
    python: Path
    """Environment in which verl and Gangline are installed, such as `.venv-verl`, or its interpreter; relative to the
    experiment's file."""
    environment: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables of verl's processes, in addition to those of this process."""
    data: VerlData
    evaluation: EvaluationSettings | None = None
    """Held-out tasks for verl's validation. `every`: as `trainer.test_freq`. None disables validation."""
    service: ServiceSettings = ServiceSettings()
    """The service whose nodes use verl's engines."""
    settings: Mapping[str, Any] = Field(default_factory=dict)
    """verl's own settings, by dotted key as on its command line, with `+` before keys that verl's configuration does
    not contain.
    """

    @field_validator("name")
    @classmethod
    def _is_an_id(cls, name: str) -> str:
        return validated_id(name, "name")

    @property
    def interpreter(self) -> Path:
        return self.python / "bin" / "python" if self.python.is_dir() else self.python


def _document(path: Path) -> Mapping[str, Any]:
    """Raises: InvalidRequest."""
    import yaml  # noqa: PLC0415 - of the extra `training`

    class Numbers(yaml.SafeLoader):
        """Reads `1e-6` as a number, as OmegaConf does for verl's own files. PyYAML reads it as text, because it has no
        dot.
        """

    Numbers.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
    try:
        document: object = yaml.load(path.read_text(), Numbers)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not YAML: {error}") from error
    return cast("Mapping[str, Any]", document) if isinstance(document, Mapping) else {}


def is_verl(path: Path) -> bool:
    """Whether the file names verl as its trainer. Raises: InvalidRequest if it cannot be read."""
    return _document(path).get("trainer") == "verl"


def read_verl_experiment(path: Path) -> VerlExperiment:
    """Raises: InvalidRequest, which names the setting and its problem."""
    try:
        found = VerlExperiment.model_validate(_document(path))
    except ValidationError as error:
        raise InvalidRequest(f"{path} does not fit: {'; '.join(mistakes(error, VerlExperiment))}.") from error
    folder = path.parent.absolute()
    changes: dict[str, Any] = {
        "python": folder / found.python,
        "data": found.data.model_copy(update={"tasks": folder / found.data.tasks}),
    }
    if found.evaluation is not None:
        changes["evaluation"] = found.evaluation.model_copy(update={"tasks": folder / found.evaluation.tasks})
    if not (changed := found.model_copy(update=changes)).interpreter.is_file():
        raise InvalidRequest(
            f"python: there is no interpreter at {changed.interpreter}. Make an environment with "
            "Gangline's extra `verl` (docs/guides/verl.md), and name its folder."
        )
    return changed


def write_data(folder: Path, tasks: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]) -> None:
    """verl's data sets, `train.jsonl` and `val.jsonl`. Without held-out tasks, `val.jsonl` contains a task that never
    runs.
    """
    for name, chosen in (("train.jsonl", tasks), ("val.jsonl", held_out or tasks[:1])):
        lines = "".join(json.dumps(_row(number, task)) + "\n" for number, task in enumerate(chosen))
        write_whole(folder / name, lines.encode())


def _row(number: int, task: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": str(task.get("instruction", ""))}],
        "data_source": "gangline",
        "extra_info": {"index": number},
        "gangline_task": json.dumps({key: value for key, value in task.items() if key != "task_id"}),
    }


def arguments_of(experiment: VerlExperiment, folder: Path, server_url: str) -> list[str]:
    """Arguments of `python -m verl.trainer.main_ppo`. folder: the run's, with the data sets.

    Explicit settings of the experiment override derived ones.
    """
    evaluation = experiment.evaluation
    ours: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": experiment.model,
        "actor_rollout_ref.rollout.n": experiment.data.num_samples,
        _MANAGER_KEY: MANAGER,
        f"+{KEY}.url": server_url,
        "data.train_files": str(folder / "train.jsonl"),
        "data.val_files": str(folder / "val.jsonl"),
        "trainer.project_name": "gangline",
        "trainer.experiment_name": experiment.name,
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.logger": ["console", "file"],
        "trainer.val_before_train": evaluation is not None,
        "trainer.test_freq": -1 if evaluation is None else evaluation.every or _AFTER_THE_LAST,
    }
    if evaluation is not None:
        ours["actor_rollout_ref.rollout.val_kwargs.n"] = evaluation.num_samples
    given = {key.lstrip("+") for key in experiment.settings}
    kept = {key: value for key, value in ours.items() if key.lstrip("+") not in given}
    return [f"{key}={_hydra(value)}" for key, value in {**kept, **experiment.settings}.items()]


def _hydra(value: Any) -> str:
    """A value in Hydra's grammar of overrides."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return "{" + ",".join(f"{key}:{_hydra(one)}" for key, one in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_hydra(one) for one in cast("Sequence[Any]", value)) + "]"
    return "'" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"
