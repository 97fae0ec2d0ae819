"""Columns of DeepScaleR: `problem`, `answer` and `solution`; or a row in verl's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gangline.tasks.presets.rows.answers import answers_of
from gangline.tasks.presets.rows.unsuitable import RowUnsuitable
from gangline.tasks.presets.rows.verl import VerlRow, question_of


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)

    problem: str = Field(min_length=1)
    answer: Any


def math_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """`problem` and `answer`, a list if several are right. Raises: ValidationError, RowUnsuitable."""
    if "prompt" in row:
        verl = VerlRow.model_validate(row)
        problem, answer, column = question_of(verl), verl.reward_model.ground_truth, "reward_model.ground_truth"
    else:
        read = _Row.model_validate(row)
        problem, answer, column = read.problem, read.answer, "answer"
    if isinstance(answer, bool):
        raise RowUnsuitable(f"{column}: is a truth value, which is not mathematics: import without a preset")
    found = answers_of(answer, column)
    return {"problem": problem, "answer": found[0] if len(found) == 1 else list(found)}
