"""Tasks as people write them: a JSON, JSON lines or TOML file, standard input, or a few options."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.domain.task import TaskRequest
from gangline.plugins import check_task, explain

__all__ = ["parse_tasks", "read_tasks", "validated"]


def read_tasks(source: str) -> list[dict[str, Any]]:
    """The tasks in a file, or on stdin when `source` is `-`, not yet validated. Raises: InvalidRequest."""
    if source == "-":
        return parse_tasks(sys.stdin.read(), "standard input")
    try:
        return parse_tasks(Path(source).read_text(), source)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the task file {source}: {error}") from error


def parse_tasks(text: str, where: str) -> list[dict[str, Any]]:
    """One task or many: a JSON object, a JSON list, an object a line, a TOML table, or TOML's `[[task]]`.

    Raises: InvalidRequest.
    """
    document: Any
    try:
        is_json = text.lstrip()[:1] in ("{", "[") and not where.endswith(".toml")
        document = _json(text) if is_json else tomllib.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{where} is neither JSON nor TOML: {error}") from error
    if isinstance(document, dict) and set(cast(dict[str, Any], document)) == {"task"}:
        document = cast(dict[str, Any], document)["task"]
    tasks: list[Any] = cast(list[Any], document) if isinstance(document, list) else [document]
    if not tasks or not all(isinstance(task, dict) for task in tasks):
        raise InvalidRequest(f"{where} holds no task: expected an object, or a list of them.")
    return tasks


def _json(text: str) -> Any:
    """Raises: ValueError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def validated(body: dict[str, Any], where: str) -> TaskRequest:
    """Raises: InvalidRequest, naming the field; UnknownPlugin, naming the nearest."""
    try:
        task = TaskRequest.model_validate(body)
    except ValidationError as error:
        raise InvalidRequest(f"{where}: {explain(error)}") from error
    check_task(task)
    return task
