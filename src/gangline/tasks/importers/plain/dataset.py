"""Imports plain datasets: each row through a preset, or with just its instruction and answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from gangline.domain.errors import InvalidRequest
from gangline.grading.untrusted.same_value import without_marks
from gangline.machine.reading.imported import Choices, Imported, plain
from gangline.tasks.importers.plain.choices import chosen_of
from gangline.tasks.importers.plain.mapping import mapped, written_files
from gangline.tasks.presets.preset import Preset
from gangline.tasks.presets.rows.answers import answers_of
from gangline.tasks.presets.rows.livecodebench import PRIVATE
from gangline.tasks.presets.rows.unsuitable import RowUnsuitable

_NAMES = ("task_id", "instance_id", "id", "name")
_ANSWERS = ("math", "stem")
"""Presets whose agents submit the text that the row has as its answer."""
_FORMULA = re.compile(r"\\[a-zA-Z]")


def name_of_row(row: Mapping[str, Any], number: int, source: str) -> str:
    """The name in a column if there is one, else `SOURCE-N`."""
    for column in _NAMES:
        value = row.get(column)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # pandas' column of numbers and nulls
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return str(value).strip()
    return f"{source}-{number:05d}"


def read_preset_row(
    row: Mapping[str, Any], name: str, preset: Preset, mapping: Mapping[str, str], choices: Choices
) -> Imported:
    """Raises: InvalidRequest, naming the column; RowUnsuitable for a row that the preset cannot grade."""
    given = plain(mapped(row, mapping, preset.name))
    body = preset.task(given)
    kept = {column: value for column, value in plain(row).items() if column != PRIVATE}  # megabytes, in the evaluator
    body["metadata"] = {"source": "rows", "task": name, "preset": preset.name, "instance": kept}
    if preset.name in _ANSWERS:
        right = body["evaluator"]["config"]["answer"]
        body["solution"] = {"answer": f"\\boxed{{{right if isinstance(right, str) else right[0]}}}"}
    elif preset.name == "swe" and isinstance(given.get("patch"), str) and given["patch"].strip():
        body["solution"] = {"patch": given["patch"]}
    own = given if preset.name != "swe" else {}  # its reader has columns of these names
    return Imported(name=name, body=_placed(body, own, choices))


def read_plain_row(
    row: Mapping[str, Any], name: str, mapping: Mapping[str, str], choices: Choices, *, is_answered: bool
) -> Imported:
    """A row with `instruction`, and `answer` if there are right answers.

    is_answered: rows of this source have answers, so a row without one cannot be graded.

    Raises: InvalidRequest; RowUnsuitable for a row that cannot be graded.
    """
    instance, own = plain(row), mapped(row, mapping)
    given = plain(own)
    body: dict[str, Any] = {"instruction": _instruction(given.get("instruction"))}
    notes: tuple[str, ...] = ()
    if is_answered:
        answer = own.get("answer")
        chosen = chosen_of(given, body["instruction"], answer, is_mapped="choices" in mapping)
        if chosen is None:
            right = _right(answer, mapping.get("answer", "answer"))
        else:
            body["instruction"], right = chosen
        check = {"kind": "answer", "value": right[0]} | ({"others": list(right[1:])} if right[1:] else {})
        config = {"source": "last_message", "part": "last_line", "checks": [check]}
        body |= {"evaluator": {"strategy": "test_on_output", "config": config}, "solution": {"answer": right[0]}}
    else:
        notes = ("without an answer a session earns 1 for its end: give tasks an evaluator, or use a preset",)
    body["metadata"] = {"source": "rows", "task": name, "instance": instance}
    return Imported(name=name, body=_placed(body, given, choices), notes=notes)


def _instruction(given: Any) -> str:
    """A text, or the only question of a conversation. Raises: InvalidRequest."""
    if isinstance(given, list) and all(isinstance(one, dict) for one in cast("list[Any]", given)):
        messages = cast("list[dict[str, Any]]", given)
        if [message.get("role") for message in messages if message.get("role") != "system"] == ["user"]:
            given = "\n\n".join(str(message.get("content") or "").strip() for message in messages)
    if not isinstance(given, str) or not given.strip():
        raise InvalidRequest("instruction: is not text, or empty")
    return given


def _right(answer: Any, column: str) -> tuple[str, ...]:
    """Raises: RowUnsuitable."""
    found = answers_of(answer, column)
    if any(_FORMULA.search(without_marks(one)) for one in found):
        raise RowUnsuitable(f"{column}: is a formula, which is compared by mathematics: import with --preset math")
    return found


def _placed(body: dict[str, Any], given: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
    """The body with the row's files and image, and the user's choices. Raises: InvalidRequest."""
    runtime: dict[str, Any] = {**body.get("runtime", {})}
    if files := written_files(given.get("files")):
        runtime["prepare"] = [*files, *(runtime.get("prepare") or [])]
    image = given.get("image")
    if isinstance(image, str) and image:
        runtime |= {"image": image, "backend": "docker"}
    chosen = {"image": choices.image, "backend": choices.runtime, "network": choices.network}
    runtime |= {field: value for field, value in chosen.items() if value is not None}
    return {**body, "runtime": runtime} if runtime else body
