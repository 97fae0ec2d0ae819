"""Columns of DeepScaleR: `problem`, `answer` and `solution`; or a row as verl has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gangline.presets.rows.verl import VerlRow, question_of

__all__ = ["math_fields"]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)

    problem: str = Field(min_length=1)
    answer: str = Field(min_length=1)


def math_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """`problem` and `answer`. Raises: ValidationError."""
    if "prompt" in row:
        verl = VerlRow.model_validate(row)
        return {"problem": question_of(verl), "answer": verl.reward_model.ground_truth}
    read = _Row.model_validate(row)
    return {"problem": read.problem, "answer": read.answer}
