"""The one entry for tasks from elsewhere: a folder of tasks, or the rows of a dataset, by their own format."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.importers.dataset import name_of_row, read_plain_row, read_preset_row
from gangline.importers.harbor.config import read_toml
from gangline.importers.harbor.registry import registered_folders
from gangline.importers.harbor.task import is_harbor_task, read_harbor_task
from gangline.importers.imported import Choices, Imported
from gangline.importers.inspect_tasks import PREFIX as INSPECT
from gangline.importers.inspect_tasks import read_inspect_sample, read_inspect_task
from gangline.importers.mapping import column_of
from gangline.importers.rows import read_rows
from gangline.importers.swe import InstanceChoices, read_instance
from gangline.importers.tau2_tasks import PREFIX as TAU2
from gangline.importers.tau2_tasks import read_tau2_task, read_tau2_tasks
from gangline.importers.terminal_bench import is_terminal_bench_task, read_terminal_bench_task, read_yaml
from gangline.importers.verifiers_tasks import PREFIX as VERIFIERS
from gangline.importers.verifiers_tasks import name_of_task, read_verifiers_task, read_verifiers_taskset
from gangline.presets.preset import Preset
from gangline.presets.rows.unsuitable import RowUnsuitable

__all__ = ["FORMATS", "Format", "Wanted", "read_source"]

Format = Literal["harbor", "terminal-bench", "swe", "rows"]
FORMATS: tuple[Format, ...] = ("harbor", "terminal-bench", "swe", "rows")
_SWE_COLUMNS = ({"problem_statement", "FAIL_TO_PASS"}, {"problem_statement", "docker_image"}, {"instance"})
"""A row with one of these sets of columns is of the SWE family."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one import."""

    choices: Choices = Choices()
    instances: InstanceChoices = InstanceChoices()
    format: Format | None = None
    """None: recognized from the files."""
    registry: Path | None = None
    """Registry of Harbor, where the source is the name of one of its datasets."""
    preset: Preset | None = None
    mapping: Mapping[str, str] = {}
    """Field -> column, for rows."""
    split: str | None = None
    filters: tuple[str, ...] = ()
    """Patterns of names, or `FIELD=PATTERN` for a field of the source; a task must match all."""
    limit: int | None = None
    """Number of tasks, left-out rows not counted."""


class _Candidate(NamedTuple):
    name: str
    """For filters, before the task is read."""
    instance: Mapping[str, Any]
    read: Callable[[], Imported]


class _Folders(NamedTuple):
    recognizes: Callable[[Path], bool]
    read: Callable[[Path, Choices], Imported]
    document: Callable[[Path], Any]


def _task_toml(folder: Path) -> Any:
    return read_toml(folder / "task.toml")


def _task_yaml(folder: Path) -> Any:
    return read_yaml(folder / "task.yaml")


_FOLDERS: dict[Format, _Folders] = {
    "harbor": _Folders(is_harbor_task, read_harbor_task, _task_toml),
    "terminal-bench": _Folders(is_terminal_bench_task, read_terminal_bench_task, _task_yaml),
}


def read_source(path: Path, wanted: Wanted) -> Generator[Imported | RowUnsuitable]:
    """The tasks in the order of the source; a row that cannot be graded is its error.

    Raises: InvalidRequest, naming the file, the row and the field; also when nothing is found.
    """
    if wanted.registry is None and not path.exists() and not str(path).startswith((INSPECT, VERIFIERS, TAU2)):
        raise InvalidRequest(f"cannot read {path}: there is no such file or folder.")
    num_seen = num_read = num_tasks = 0
    for candidate in _candidates(path, wanted):
        num_seen += 1
        if not _matches(candidate, wanted.filters):
            continue
        one = _read(candidate)
        num_read, num_tasks = num_read + 1, num_tasks + isinstance(one, Imported)
        yield one
        if num_tasks == wanted.limit:
            return
    if not num_read:
        filtered = f" that matches {' and '.join(map(repr, wanted.filters))}" if num_seen else ""
        raise InvalidRequest(f"{path}: holds no task{filtered}.")


def _read(candidate: _Candidate) -> Imported | RowUnsuitable:
    try:
        return candidate.read()
    except RowUnsuitable as error:
        return error


def _matches(candidate: _Candidate, filters: tuple[str, ...]) -> bool:
    for one in filters:
        field, equals, pattern = one.partition("=")
        value = str(column_of(candidate.instance, field, "")) if equals else candidate.name
        if not fnmatchcase(value, pattern if equals else one):
            return False
    return True


def _candidates(path: Path, wanted: Wanted) -> Generator[_Candidate]:
    for prefix, read in ((INSPECT, _of_inspect), (VERIFIERS, _of_verifiers), (TAU2, _of_tau2)):
        if str(path).startswith(prefix):
            if wanted.format or wanted.split or wanted.preset or wanted.mapping:
                raise InvalidRequest(f"{path}: --format, --split, --preset and --map are for files, not for programs.")
            yield from read(str(path).removeprefix(prefix), wanted)
            return
    if wanted.registry is not None:
        clones = wanted.instances.repositories
        yield from _of_folders(
            path,
            "harbor",
            wanted,
            registered_folders(wanted.registry, str(path), None if clones is None else Path(clones)),
        )
        return
    kind = wanted.format or _format_of(path, wanted)
    if kind in _FOLDERS:
        yield from _of_folders(path, kind, wanted)
        return
    reader = _swe_row if kind == "swe" else _row
    for number, (where, row) in enumerate(read_rows(path, wanted.split), 1):
        if not isinstance(row, Mapping):
            raise InvalidRequest(f"{where}: is no object")
        yield reader(cast("Mapping[str, Any]", row), number, where, wanted)


def _format_of(path: Path, wanted: Wanted) -> Format:
    """Raises: InvalidRequest when the rows are of no known format."""
    for kind, folders in _FOLDERS.items():
        if path.is_dir() and (folders.recognizes(path) or any(map(folders.recognizes, path.iterdir()))):
            return kind
    if wanted.preset is not None or wanted.mapping:
        return "rows"
    where, row = next(read_rows(path, wanted.split), (str(path), None))
    columns = set(cast("Mapping[str, Any]", row)) if isinstance(row, Mapping) else set[str]()
    if any(names <= columns for names in _SWE_COLUMNS):
        return "swe"
    if row is not None and "instruction" not in columns:
        raise InvalidRequest(
            f"{where}: is of no known format. Give --preset NAME for the rows of its dataset, or --map "
            f"instruction=COLUMN; the columns are {', '.join(sorted(columns)) or 'none'}."
        )
    return "rows"


def _of_folders(path: Path, kind: Format, wanted: Wanted, found: Sequence[Path] | None = None) -> Generator[_Candidate]:
    """found: the tasks' folders; None: `path` is one, or they are in it."""
    folders = _FOLDERS[kind]
    if wanted.split is not None or wanted.preset is not None or wanted.mapping:
        raise InvalidRequest(f"{path}: --split, --preset and --map are for rows; these are folders of tasks ({kind}).")
    if found is None and not path.is_dir():
        raise InvalidRequest(f"{path}: is no folder, as tasks of {kind} are.")
    if found is None:
        found = [path.resolve()] if folders.recognizes(path) else sorted(filter(folders.recognizes, path.iterdir()))
    by_field = any("=" in one for one in wanted.filters)
    for folder in found:
        document = folders.document(folder) if by_field else None
        fields = cast("Mapping[str, Any]", document or {})
        yield _Candidate(folder.name, fields, _reading(folders.read, folder, wanted.choices))


def _of_inspect(source: str, wanted: Wanted) -> Generator[_Candidate]:
    task = read_inspect_task(source, wanted.choices)
    for sample in task.samples:
        read = partial(read_inspect_sample, task, sample, wanted.choices)
        yield _Candidate(f"{task.name}-{sample.id}", msgspec.to_builtins(sample), read)


def _of_verifiers(source: str, wanted: Wanted) -> Generator[_Candidate]:
    taskset = read_verifiers_taskset(source, wanted.choices, None if wanted.filters else wanted.limit)
    for task in taskset.tasks:
        read = partial(read_verifiers_task, taskset, task, wanted.choices)
        yield _Candidate(name_of_task(taskset, task), task.data, read)


def _of_tau2(source: str, wanted: Wanted) -> Generator[_Candidate]:
    for domain, task in read_tau2_tasks(source, wanted.choices):
        yield _Candidate(f"{domain}-{task['id']}", task, partial(read_tau2_task, domain, task, wanted.choices))


def _reading(read: Callable[[Path, Choices], Imported], folder: Path, choices: Choices) -> Callable[[], Imported]:
    return lambda: read(folder, choices)


def _swe_row(row: Mapping[str, Any], number: int, where: str, wanted: Wanted) -> _Candidate:
    inner = column_of(row, "instance.instance_id", None) if "instance" in row else None
    name = str(inner) if inner is not None else name_of_row(row, number)
    return _Candidate(name, row, lambda: read_instance(row, where, wanted.choices, wanted.instances))


def _row(row: Mapping[str, Any], number: int, where: str, wanted: Wanted) -> _Candidate:
    name = name_of_row(row, number)

    def read() -> Imported:
        try:
            if wanted.preset is None:
                return read_plain_row(row, name, wanted.mapping, wanted.choices)
            return read_preset_row(row, name, wanted.preset, wanted.mapping, wanted.choices)
        except InvalidRequest as error:
            raise type(error)(f"{where}: {error.message}") from error

    return _Candidate(name, row, read)
