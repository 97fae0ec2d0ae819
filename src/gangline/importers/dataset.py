"""Tasks of a plain dataset: each row through a preset, or with its instruction and answer alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangline.domain.errors import InvalidRequest
from gangline.importers.imported import Choices, Imported, plain
from gangline.importers.mapping import mapped, written_files
from gangline.presets.preset import Preset

__all__ = ["name_of_row", "read_plain_row", "read_preset_row"]

_NAMES = ("task_id", "instance_id", "id", "name")
_ANSWERS = ("math", "stem")
"""Presets whose agents hand in the text that the row has as its answer."""


def name_of_row(row: Mapping[str, Any], number: int) -> str:
    """Its own name where a column has one, else `row-N`."""
    found = (row[column] for column in _NAMES if isinstance(row.get(column), str | int) and row[column] != "")
    return str(next(found, f"row-{number:05d}"))


def read_preset_row(
    row: Mapping[str, Any], name: str, preset: Preset, mapping: Mapping[str, str], choices: Choices
) -> Imported:
    """Raises: InvalidRequest, naming the column; RowUnsuitable for a row that the preset cannot grade."""
    given = plain(mapped(row, mapping, preset.name))
    body = preset.task(given)
    body["metadata"] = {"source": "rows", "task": name, "preset": preset.name, "instance": plain(row)}
    if preset.name in _ANSWERS:
        body["solution"] = {"answer": f"\\boxed{{{body['evaluator']['config']['answer']}}}"}
    elif preset.name == "swe" and isinstance(given.get("patch"), str) and given["patch"].strip():
        body["solution"] = {"patch": given["patch"]}
    own = given if preset.name != "swe" else {}  # its reader has columns of these names
    return Imported(name=name, body=_placed(body, own, choices))


def read_plain_row(row: Mapping[str, Any], name: str, mapping: Mapping[str, str], choices: Choices) -> Imported:
    """A row with `instruction`, and `answer` where one text is right. Raises: InvalidRequest."""
    given = plain(mapped(row, mapping))
    instruction, answer = given.get("instruction"), given.get("answer")
    if not isinstance(instruction, str) or not instruction.strip():
        raise InvalidRequest("instruction: is no text, or empty")
    body: dict[str, Any] = {"instruction": instruction}
    notes: tuple[str, ...] = ()
    if answer is None:
        notes = ("without an answer a session earns 1 for its end: give tasks an evaluator, or use a preset",)
    else:
        text = answer if isinstance(answer, str) else str(answer)
        check = {"kind": "equals", "value": text.strip()}
        config = {"source": "last_message", "part": "last_line", "checks": [check]}
        body |= {"evaluator": {"strategy": "test_on_output", "config": config}, "solution": {"answer": text}}
    body["metadata"] = {"source": "rows", "task": name, "instance": plain(row)}
    return Imported(name=name, body=_placed(body, given, choices), notes=notes)


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
