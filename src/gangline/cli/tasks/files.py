"""Reads tasks as people write them: a JSON, JSON lines or TOML file, standard input, or a few options.

In a file, `{"from_file": PATH}` stands for the text of a file next to it, in any place for a text.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.domain.task import TaskRequest
from gangline.machine.reading.documents import is_more_than_one, parsed_json, parsed_toml
from gangline.machine.reading.files import own_file, read_text, written, written_folder
from gangline.machine.reading.paths import SourcePath
from gangline.settings.plugins import check_task, explain


def read_tasks(source: str) -> list[dict[str, Any]]:
    """The tasks in a file, or from stdin if `source` is `-`, with texts from files filled in; not yet validated.
    Raises: InvalidRequest."""
    if source == "-":
        tasks, folder = parse_tasks(sys.stdin.read(), "standard input"), Path.cwd()
    else:
        folder = Path(source).absolute().parent
        try:
            tasks = parse_tasks(Path(source).read_text("utf-8"), source)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"cannot read the task file {source}: {error}") from error
    return [_with_files(task, folder) for task in tasks]


def _with_files(value: Any, folder: Path) -> Any:
    """Raises: InvalidRequest."""
    if isinstance(value, list):
        return [_with_files(one, folder) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    if fields.keys() == {"from_file"}:
        return _text_of(fields["from_file"], folder)
    return {name: _with_files(one, folder) for name, one in fields.items()}


def _text_of(named: Any, folder: Path) -> str:
    """Other people's tasks must not read arbitrary files of this machine. Raises: InvalidRequest."""
    try:
        return read_text(SourcePath.of(folder) / str(named))
    except InvalidRequest as error:
        raise InvalidRequest(
            f"from_file must name a file in the folder of the task file, {folder}; got {named!r}: {error.message}"
        ) from error


def sent_along(named: str) -> list[dict[str, Any]]:
    """Prepare actions that write a file, or a folder's files, into the runtime.

    named: `LOCAL`, which keeps its name in the working folder, or `LOCAL=INSIDE`. Raises: InvalidRequest.
    """
    local, _, inside = named.partition("=")
    path = Path(local)
    inside = inside or path.absolute().name
    own = own_file(path)
    files = written_folder(own, inside) if own.is_folder() else {inside: written(own)}
    return [{"type": "write", "path": name, **file} for name, file in files.items()]


def parse_tasks(text: str, where: str) -> list[dict[str, Any]]:
    """Parses one task or many: a JSON object, a JSON list, one object per line, a TOML table, or TOML's `[[task]]`.

    Raises: InvalidRequest.
    """
    document: Any
    if not text.strip():
        raise InvalidRequest(f"{where} is empty: it holds no task.")
    try:
        is_json = text.lstrip()[:1] in ("{", "[") and not where.endswith(".toml")
        document = _json(text, where) if is_json else parsed_toml(text, where)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where} is neither JSON nor TOML: {error.__cause__ or error.message}") from error
    if isinstance(document, dict) and set(cast(dict[str, Any], document)) == {"task"}:
        document = cast(dict[str, Any], document)["task"]
    tasks: list[Any] = cast(list[Any], document) if isinstance(document, list) else [document]
    if not tasks or not all(isinstance(task, dict) for task in tasks):
        raise InvalidRequest(f"{where} holds no task: expected an object, or a list of them.")
    return tasks


def _json(text: str, where: str) -> Any:
    """Raises: InvalidRequest."""
    try:
        return parsed_json(text, where)
    except InvalidRequest as error:
        if not is_more_than_one(error):
            raise
    lines = enumerate(text.split("\n"), 1)
    return [parsed_json(line, f"{where}, line {number}") for number, line in lines if line.strip()]


def validated(body: dict[str, Any], where: str) -> TaskRequest:
    """Raises: InvalidRequest, naming the field; UnknownPlugin, naming the nearest match."""
    try:
        task = TaskRequest.model_validate(body)
    except ValidationError as error:
        raise InvalidRequest(f"{where}: {explain(error, TaskRequest)}") from error
    if sys.platform == "linux":  # elsewhere not every plug-in loads; the server checks too
        check_task(task)
    return task


def names_of(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The id of each task, else its name in its source, else its position in the file."""
    found: list[str] = []
    for at, task in enumerate(tasks):
        about: Any = task.get("metadata")
        own: Any = cast("Mapping[str, Any]", about).get("task") if isinstance(about, Mapping) else None
        found.append(str(task.get("task_id") or own or f"task-{at:05d}"))
    return found


def by_name(tasks: Sequence[dict[str, Any]], where: str) -> dict[str, dict[str, Any]]:
    """Name -> task. Raises: InvalidRequest for duplicate names."""
    names = names_of(tasks)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"{where}: two tasks are called {twice!r}: give each a task_id.")
    return dict(zip(names, tasks, strict=True))
