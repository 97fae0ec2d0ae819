r"""Columns of SCP-116K: `domain`, `problem` and `matched_solution`; or a row as verl has them.

SCP-116K has solutions and no answers. The answer is a column `answer`, else the last `\boxed{...}` of the solution,
else the text after "answer" in its last line. Rows without any are unsuitable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gangline.presets.rows.unsuitable import RowUnsuitable
from gangline.presets.rows.verl import VerlRow, question_of

__all__ = ["stem_fields"]

_STATED = re.compile(r"\banswer(?: is)?\s*[:=]?\s*(.+?)\.?\s*$", re.IGNORECASE)
_LETTER = re.compile(r"\(?([A-H])\)?")
_CHOICE = re.compile(r"^\s*\(?([A-H])[).:]\s", re.MULTILINE)
_LONGEST_ANSWER = 200
"""Characters. What is longer is a sentence, which no formula equals."""


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)

    problem: str = Field(min_length=1)
    matched_solution: str = ""
    answer: str | None = Field(default=None, min_length=1)
    domain: str | None = None


def stem_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """`problem`, `answer`, and `choices`: the letters of a question with choices.

    Raises: ValidationError, RowUnsuitable.
    """
    if "prompt" in row:
        verl = VerlRow.model_validate(row)
        problem, answer = question_of(verl), verl.reward_model.ground_truth
    else:
        read = _Row.model_validate(row)
        problem = read.problem
        found = read.answer or _boxed(read.matched_solution) or _stated(read.matched_solution)
        if found is None:
            raise RowUnsuitable(r"matched_solution: has no \boxed{...} and states no answer; give a column `answer`")
        answer = found
    letter = _LETTER.fullmatch(answer.strip())
    choices = sorted(set(_CHOICE.findall(problem))) if letter else []
    if letter and letter[1] in choices:
        answer = letter[1]
    return {"problem": problem, "answer": answer, "choices": choices}


def _boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, with balanced braces."""
    head, mark, rest = text.rpartition(r"\boxed{")
    depth = 1
    for at, char in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            return rest[:at].strip() or None
    return _boxed(head) if mark else None


def _stated(text: str) -> str | None:
    line = (text.strip().splitlines() or [""])[-1]
    found = _STATED.search(line)
    return found[1].strip() if found and len(found[1]) <= _LONGEST_ANSWER else None
