"""Maps columns of a plain dataset to task fields: `instruction`, `answer`, `choices`, `files`, `image`, and a preset's.

A column is a name, or a path into objects: `reward_model.ground_truth`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from gangline.domain.errors import InvalidRequest

_MISSING = object()
_PRESET_COLUMNS: dict[str, dict[str, str]] = {
    "math": {"instruction": "problem"},
    "stem": {"instruction": "problem"},
    "swe": {"instruction": "problem_statement", "answer": "patch"},
}


def parsed_mapping(given: list[str]) -> dict[str, str]:
    """Parses `FIELD=COLUMN`. Raises: InvalidRequest."""
    found: dict[str, str] = {}
    for one in given:
        field, equals, column = one.partition("=")
        if not (field and equals and column):
            raise InvalidRequest(f"--map {one}: write FIELD=COLUMN, such as --map answer=solution.")
        if field in found:
            raise InvalidRequest(f"--map {field}: is given twice.")
        found[field] = column
    return found


def column_of(row: Mapping[str, Any], path: str, default: Any = _MISSING) -> Any:
    """The value at a path; objects may be JSON text. With a default, nothing is raised. Raises: InvalidRequest."""
    value: Any = row
    for name in [path] if path in row else path.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = _read(value, path)
            except InvalidRequest:
                if default is _MISSING:
                    raise
        if not isinstance(value, Mapping) or name not in value:
            if default is not _MISSING:
                return default
            raise InvalidRequest(f"has no column {path!r}; it has {', '.join(map(str, row))}")
        value = cast("Mapping[str, Any]", value)[name]
    return value


def _read(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{column}: is not valid JSON: {error}") from error


def mapped(row: Mapping[str, Any], mapping: Mapping[str, str], preset: str | None = None) -> dict[str, Any]:
    """The row with the mapped fields as columns, under the preset's names. Raises: InvalidRequest."""
    fields = {field: column_of(row, column) for field, column in mapping.items()}
    if preset == "code":
        fields = _as_conversation(fields)
    elif fields.keys() & {"instruction", "problem"}:
        row = {name: value for name, value in row.items() if name != "prompt"}  # else it would be read as verl's row
    names = _PRESET_COLUMNS.get(preset or "", {})
    return {**row, **{names.get(field, field): value for field, value in fields.items()}}


def _as_conversation(fields: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in fields.items() if name not in ("instruction", "answer")}
    if "instruction" in fields:
        own["prompt"] = [{"role": "user", "content": fields["instruction"]}]
    if "answer" in fields:
        own["reward_model"] = {"ground_truth": fields["answer"]}
    return own


def written_files(value: Any) -> list[dict[str, Any]]:
    """Prepare actions for `files`: path -> text, a list of `{path, content}`, or JSON of either.

    Raises: InvalidRequest.
    """
    given = _read(value, "files") if isinstance(value, str) and value.strip() else value or None
    pairs: list[tuple[Any, Any]] = []
    if isinstance(given, Mapping):
        # Parquet gives every row the paths of all rows: other rows' paths are null.
        pairs = [(path, text) for path, text in cast("Mapping[Any, Any]", given).items() if text is not None]
    elif isinstance(given, list) and all(isinstance(one, Mapping) for one in cast("list[Any]", given)):
        pairs = [(one.get("path"), one.get("content")) for one in cast("list[Mapping[str, Any]]", given)]
    elif given is not None:
        raise InvalidRequest("files: is neither an object of path and text nor a list of {path, content}")
    if not all(isinstance(path, str) and isinstance(text, str) for path, text in pairs):
        raise InvalidRequest("files: paths and contents must be texts")
    return [{"type": "write", "path": path, "content": text} for path, text in pairs]
