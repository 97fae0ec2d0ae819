"""Presets by name: converts dataset rows to tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import msgspec
from pydantic import ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.domain.task_template import filled
from gangline.settings.plugins import explain
from gangline.tasks.presets.rows.code import code_fields
from gangline.tasks.presets.rows.math import math_fields
from gangline.tasks.presets.rows.stem import stem_fields
from gangline.tasks.presets.rows.swe import swe_fields
from gangline.tasks.presets.samples.code import code_samples
from gangline.tasks.presets.samples.math import math_samples
from gangline.tasks.presets.samples.sample import Sample
from gangline.tasks.presets.samples.stem import stem_samples
from gangline.tasks.presets.samples.swe import swe_samples

NUM_SAMPLES = 20
"""Sample rows of each preset, for one seed."""


@dataclass(frozen=True)
class Preset:
    """A task family. Its rows have the columns of its dataset."""

    name: str
    purpose: str
    dataset: str
    """Dataset with training rows: a name on the Hugging Face hub."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Row -> fields of the template, and the row's own `evaluator` and `solution`.

    Raises: pydantic's ValidationError, InvalidRequest, RowUnsuitable.
    """
    generate: Callable[[int, int], list[Sample]]
    """(number, seed) -> samples; deterministic."""

    @property
    def template(self) -> dict[str, Any]:
        return _template(self.name)

    def task(self, row: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Body of `POST /v1/tasks` for one row. Its metadata contains the whole row.

        changes: fields of the template that replace the preset's.

        Raises: InvalidRequest, naming the row's field; RowUnsuitable, which is also an InvalidRequest.
        """
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(row)))  # Parquet dates become strings
        try:
            read = self.read(plain)
        except ValidationError as error:
            raise InvalidRequest(f"a row of preset {self.name!r}: {explain(error)}") from error
        own = {name: read.pop(name) for name in ("evaluator", "solution") if read.get(name) is not None}
        body = filled({**self.template, **(changes or {})}, plain | read)
        own = {name: value for name, value in own.items() if name not in (changes or {})}
        return {**body, **own, "metadata": {"preset": self.name, "instance": plain}}

    def solved(self, sample: Sample) -> dict[str, Any]:
        """The task of a sample, with the right answer as its reference solution."""
        kinds: dict[str, dict[str, Any]] = {
            "code": {"files": {"solution.py": sample.right}},
            "swe": {"patch": sample.right},
        }
        boxed = {"answer": f"\\boxed{{{sample.right}}}"}
        return self.task(sample.row) | {"solution": kinds.get(self.name, boxed)}

    def samples(self, number: int = NUM_SAMPLES, seed: int = 0) -> list[Sample]:
        """Generated rows, each with a right and a wrong answer."""
        return self.generate(number, seed)


@cache
def _template(name: str) -> dict[str, Any]:
    file = resources.files("gangline.tasks.presets").joinpath("templates", f"{name}.json")
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])


PRESETS: Sequence[Preset] = (
    Preset("swe", "repair a repository; hidden tests decide", "SWE-Gym/SWE-Gym", swe_fields, swe_samples),
    Preset("stem", "answer a question of science by search and code", "EricLu/SCP-116K", stem_fields, stem_samples),
    Preset(
        "math",
        "solve a problem with Python; a boxed answer",
        "agentica-org/DeepScaleR-Preview-Dataset",
        math_fields,
        math_samples,
    ),
    Preset("code", "write solution.py; hidden cases decide", "PRIME-RL/Eurus-2-RL-Data", code_fields, code_samples),
)


def find_preset(name: str) -> Preset | None:
    return next((preset for preset in PRESETS if preset.name == name), None)
