"""verl's prompts, a `TensorDict` of its data set's columns, and the tasks made from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from gangline.domain.errors import InvalidRequest
from gangline.train.trainers.own_engine import Sampling
from gangline.train.trainers.verl.settings import GanglineSettings
from gangline.wire.client.rollouts import refuse_held_out


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, to be attempted by `num_samples` sessions."""

    uid: str
    """verl's id of the group."""
    partition: Literal["train", "val"]
    global_steps: int
    """The trainer's step at which it was requested."""
    num_samples: int | None
    """None: as many as verl's configuration sets."""
    columns: dict[str, Any]
    """All columns of the row, including `uid` and `global_steps`."""


def prompts_in(batch: TensorDict) -> list[Prompt]:
    """The rows of a batch from verl's trainer. Raises: InvalidRequest for a uid that verl would truncate."""
    columns: list[tuple[str, Any]] = [(str(key), batch.get(key)) for key in cast("list[Any]", list(batch.keys()))]
    return [_prompt({name: _cell(name, values, row) for name, values in columns}) for row in range(len(batch))]


def _cell(name: str, values: Any, row: int) -> Any:
    if isinstance(values, NonTensorData):
        return cast("Any", values).data
    if isinstance(values, NonTensorStack):
        cell = cast("Any", values)[row]
        return cell.data if isinstance(cell, NonTensorData) else cell
    if isinstance(values, Tensor):
        return values[row]
    raise InvalidRequest(f"column {name} of verl's prompts is of a type that is not known here: {type(values)}.")


def _prompt(columns: dict[str, Any]) -> Prompt:
    is_validation = bool(columns.pop("validate", False))
    num_samples = columns.pop("__rollout_n__", None)
    if not bool(columns.pop("__do_sample__", True)) and not is_validation:
        raise InvalidRequest("verl asks for a greedy session in training, which has no log-probs to train with.")
    uid = str(columns["uid"])
    if "_" in uid:
        raise InvalidRequest(f"the uid {uid!r} has a `_`, at which verl's buffer would cut it.")
    return Prompt(
        uid=uid,
        partition="val" if is_validation else "train",
        global_steps=int(columns["global_steps"]),
        num_samples=None if num_samples is None else int(num_samples),
        columns=columns,
    )


class TaskMaker:
    """Tasks for prompts."""

    def __init__(self, settings: GanglineSettings) -> None:
        """Raises: InvalidRequest if the template cannot be read."""
        self._column = settings.task_column
        self._template = None if settings.task_template is None else _read(settings)

    def task(self, prompt: Prompt, task_id: str, num_samples: int, sampling: Sampling) -> dict[str, Any]:
        """Raises: InvalidRequest if there is neither the column nor a template, or if a training task is held out."""
        written = prompt.columns.get(self._column)
        if written is not None:
            task = _parsed(written, f"column {self._column} of prompt {prompt.uid}")
        elif self._template is not None:
            task = self._template | {"instruction": _instruction(prompt)}
        else:
            raise InvalidRequest(
                f"the data set has no column {self._column!r} with tasks, and no task_template is set for its prompts."
            )
        if prompt.partition == "train":
            refuse_held_out({**task, "task_id": task_id})
        named = {**task, "task_id": task_id, "num_samples": num_samples, "held_out": prompt.partition == "val"}
        return sampling.in_task(named)


def _read(settings: GanglineSettings) -> dict[str, Any]:
    path = settings.task_template
    assert path is not None
    try:
        return _parsed(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise InvalidRequest(f"the task template {path} cannot be read: {error.strerror}.") from error


def _parsed(text: Any, what: str) -> dict[str, Any]:
    try:
        found: Any = json.loads(text)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{what} is not a task as JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{what} must be a task as a JSON object.")
    return cast("dict[str, Any]", found)


def _instruction(prompt: Prompt) -> str:
    messages = cast("list[Mapping[str, Any]]", prompt.columns.get("raw_prompt") or [])
    questions = [message["content"] for message in messages if message.get("role") == "user"]
    if not questions or not isinstance(questions[-1], str):
        raise InvalidRequest(f"prompt {prompt.uid} has no user message of text to make an instruction of.")
    return questions[-1]
