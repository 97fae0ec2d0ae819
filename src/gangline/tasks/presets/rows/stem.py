r"""Columns of SCP-116K: `domain`, `problem` and `matched_solution`; or a row in verl's form.

SCP-116K has solutions but no answers. The answer is taken from a column `answer`, else the last `\boxed{...}` of the
solution, else the text after "answer" in its last line. Rows without any of these are unsuitable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gangline.tasks.presets.rows.answers import answers_of, boxes
from gangline.tasks.presets.rows.unsuitable import RowUnsuitable
from gangline.tasks.presets.rows.verl import VerlRow, question_of

_STATED = re.compile(r"\banswer(?: is)?\s*[:=]?\s*(.+?)\.?\s*$", re.IGNORECASE)
_LETTER = re.compile(r"\(?([A-H])\)?")
_CHOICE = re.compile(r"^\s*\(?([A-H])[).:]\s", re.MULTILINE)
_LONGEST_ANSWER = 200
"""Characters. Longer text is a sentence, which cannot equal a formula."""


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)

    problem: str = Field(min_length=1)
    matched_solution: str = ""
    answer: Any = None
    domain: str | None = None


def stem_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """`problem`, `answer`, and `choices`: the letters of a multiple-choice question.

    Raises: ValidationError, RowUnsuitable.
    """
    if "prompt" in row:
        verl = VerlRow.model_validate(row)
        problem, found = question_of(verl), answers_of(verl.reward_model.ground_truth, "reward_model.ground_truth")
    else:
        read = _Row.model_validate(row)
        problem = read.problem
        found = answers_of(read.answer) if read.answer is not None else _of_solution(read.matched_solution)
    answer = found[0]
    letter = _LETTER.fullmatch(answer.strip())
    choices = sorted(set(_CHOICE.findall(problem))) if letter else []
    if letter and letter[1] in choices:
        answer = letter[1]
        found = (answer,)
    return {"problem": problem, "answer": answer if len(found) == 1 else list(found), "choices": choices}


def _of_solution(text: str) -> tuple[str, ...]:
    found = (boxes(text) or [None])[-1] or _stated(text)
    if found is None:
        raise RowUnsuitable(r"matched_solution: has no \boxed{...} and states no answer; give a column `answer`")
    return (found,)


def _stated(text: str) -> str | None:
    line = (text.strip().splitlines() or [""])[-1]
    found = _STATED.search(line)
    return found[1].strip() if found and len(found[1]) <= _LONGEST_ANSWER else None
