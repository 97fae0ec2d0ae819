"""The entry point for importing tasks: a folder of tasks, or the rows of a dataset, in their own format.

Rows are read one at a time, from a file of JSON lines, JSON, CSV or Parquet, or a folder of such files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.csv_rows import rows_of_csv
from gangline.machine.reading.imported import Candidate, Choices, FolderFormat, Imported, LeftOut, ProgramSource
from gangline.machine.reading.lines import NumberedRow, rows_of_json, rows_of_lines, text_of
from gangline.machine.reading.paths import SourcePath, opened_source
from gangline.machine.reading.tables import rows_of_table
from gangline.settings.wings import wing_part, wing_parts
from gangline.tasks.importers.plain.dataset import name_of_row, read_plain_row, read_preset_row
from gangline.tasks.importers.plain.mapping import column_of
from gangline.tasks.importers.swe import InstanceChoices, read_instance
from gangline.tasks.presets.preset import Preset

Format = Literal["harbor", "terminal-bench", "swe", "rows"]
FORMATS: tuple[Format, ...] = ("harbor", "terminal-bench", "swe", "rows")
_SWE_COLUMNS = ({"problem_statement", "fail_to_pass"}, {"problem_statement", "docker_image"}, {"instance"})
"""A row with one of these sets of columns, in any case, belongs to the SWE family."""
_MOST_SHOWN = 3

_MAX_FILE_BYTES = 1 << 40
_MAX_FILES = 200_000
_MAX_PATH_CHARS = 3_000
_DATA = {".parquet", ".jsonl", ".json", ".arrow"}
_TABLES = {".csv", ".tsv"}
"""Read from a folder only if it has no other files of rows: otherwise tables usually describe the dataset."""
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_SHARD = re.compile(r"-\d+-of-\d+$")


def read_rows(path: Path, split: str | None = None, files: str | None = None) -> Generator[tuple[str, Any]]:
    """Each row with its place, `FILE, row N (line M)`, counted from 1. A row may have any JSON type. An unreadable row
    is returned as an `InvalidRequest`, and reading continues.

    path: a file, or the folder of a Hugging Face dataset: a copy of its repository, or written by `save_to_disk`.
    files: pattern of the files below the folder, instead of a split.

    Raises: InvalidRequest if a file cannot be read, the split is missing or not chosen, or pyarrow is missing.
    """
    wall = _wall_of(path)
    for file in _files_of(path, split) if files is None else files_like(path, files):
        with opened_source(file, wall, _MAX_FILE_BYTES) as opened:
            for number, (line, row) in enumerate(_rows_of(file, opened), 1):
                yield f"{file}, row {number}" + (f" (line {line})" if line not in (0, number) else ""), row


def _rows_of(path: Path, file: BinaryIO) -> Generator[NumberedRow]:
    """Raises: InvalidRequest."""
    kind, where = path.suffix.lower(), str(path)
    if kind in (".parquet", ".arrow"):
        yield from (NumberedRow(0, row) for row in rows_of_table(file, kind, where))
        return
    with text_of(file, where) as text:
        if kind in _TABLES:
            yield from rows_of_csv(text, kind, where)
        elif kind == ".json":
            yield from rows_of_json(text, where)
        else:
            yield from rows_of_lines(text, kind, where)


def _wall_of(path: Path) -> Path:
    """The folder that a dataset's files must not lead out of. Snapshots in Hugging Face's cache are links into their
    repository's folder.
    """
    if not path.is_dir():
        return path.resolve().parent
    whole = path.resolve()
    for above in whole.parents:
        if above.name == "snapshots" and (above.parent / "blobs").is_dir():
            return above.parent
    return whole


def _files_of(path: Path, split: str | None) -> list[Path]:
    if not path.is_dir():
        if split is not None:
            raise InvalidRequest(f"--split {split}: {path} is one file; splits are of a dataset's folder.")
        return [path]
    splits: dict[str, list[Path]] = {}
    found = _found_in(path)
    for file in [one for one in found if one.suffix in _DATA] or found:
        splits.setdefault(_split_of(file, path), []).append(file)
    if not splits:
        raise InvalidRequest(f"{path}: holds neither tasks nor a file of rows ({', '.join(sorted(_DATA | _TABLES))}).")
    if split is None and len(splits) > 1:
        raise InvalidRequest(f"{path}: has the splits {', '.join(sorted(splits))}: choose one with --split.")
    if split is not None and split not in splits:
        raise InvalidRequest(f"--split {split}: {path} has {', '.join(sorted(splits))}.")
    return splits[split] if split is not None else next(iter(splits.values()))


def files_like(path: Path, pattern: str) -> list[Path]:
    """The file itself, or the files below a folder that match, or whose names do. Raises: InvalidRequest if there are
    none, or if one of `-00000-of-00004` is missing.
    """
    if not path.is_dir():
        return [path]
    found = sorted(path.glob(pattern)) or sorted(path.glob(pattern.rpartition("/")[2]))
    if not found:
        raise InvalidRequest(f"{path}: has no file {pattern}.")
    whole = _SHARD.search(found[0].stem)
    if whole and len(found) < (num := int(whole[0].rpartition("-")[2])):
        raise InvalidRequest(f"{path}: has {len(found)} of {num} files {pattern}.")
    return found


def _found_in(root: Path) -> list[Path]:
    """Files with rows, including links. Raises: InvalidRequest for a folder with too many entries."""
    found: list[Path] = []
    num_seen = 0
    for folder, folders, names in os.walk(root):
        num_seen += len(names) + len(folders)
        if num_seen > _MAX_FILES or len(folder) > _MAX_PATH_CHARS:
            raise InvalidRequest(f"{root}: holds more than {_MAX_FILES:,} files, or too deep folders.")
        found += (
            Path(folder, name) for name in names if Path(name).suffix in _DATA | _TABLES and name not in _NOT_DATA
        )
    return sorted(found)


def _split_of(file: Path, root: Path) -> str:
    """`train` for `data/train-00000-of-00004.parquet`, `train.jsonl`, `train/0.parquet` and `train/data-....arrow`."""
    stem = _SHARD.sub("", file.stem)
    inner = [part for part in file.relative_to(root).parts[:-1] if part != "data"]
    return inner[-1] if (inner and stem in ("data", "", *inner)) or (stem.isdigit() and inner) else stem


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one import."""

    choices: Choices = Choices()
    instances: InstanceChoices = InstanceChoices()
    format: Format | None = None
    """None: detected from the files."""
    registry: Path | None = None
    """Harbor's registry, if the source is the name of one of its datasets."""
    preset: Preset | None = None
    mapping: Mapping[str, str] = {}
    """Field -> column, for rows."""
    split: str | None = None
    files: str | None = None
    """Pattern of the files of rows below the folder, instead of a split."""
    name: str | None = None
    """Name of the source, for rows without one. Default: that of the file."""
    filters: tuple[str, ...] = ()
    """Name patterns, or `FIELD=PATTERN` for a field of the source; a task must match all."""
    limit: int | None = None
    """Number of tasks, not counting omitted rows."""


def _folder_formats() -> dict[str, FolderFormat]:
    return {name: one for name, one in wing_parts("gangline.importers").items() if isinstance(one, FolderFormat)}


def _program_of(source: str) -> ProgramSource | None:
    parts = wing_parts("gangline.importers").values()
    return next((part for part in parts if isinstance(part, ProgramSource) and source.startswith(part.prefix)), None)


def read_source(
    path: Path, wanted: Wanted, check: Callable[[Imported], object] = lambda one: None
) -> Generator[Imported | LeftOut]:
    """The tasks in source order; a row that cannot become a task is omitted.

    check: raises InvalidRequest for further tasks to omit.

    Raises: InvalidRequest, naming the file and the field; also if there are no tasks.
    """
    if wanted.registry is None and not path.exists() and _program_of(str(path)) is None:
        raise InvalidRequest(f"cannot read {path}: there is no such file or folder.")
    num_seen = num_tasks = 0
    left_out: list[str] = []
    for candidate in _candidates(path, wanted):
        num_seen += 1
        if not _matches(candidate, wanted.filters):
            continue
        one = _read(candidate, check)
        if isinstance(one, Imported):
            num_tasks += 1
        else:
            left_out.append(one.why)
        yield one
        if num_tasks == wanted.limit:
            return
    if not num_tasks:
        raise InvalidRequest(_no_task(path, wanted, left_out, is_empty=not num_seen))


def _no_task(path: Path, wanted: Wanted, left_out: list[str], *, is_empty: bool) -> str:
    if left_out:
        more = f" ... and {len(left_out) - _MOST_SHOWN} more" if len(left_out) > _MOST_SHOWN else ""
        return f"{'; '.join(left_out[:_MOST_SHOWN])}{more}"
    filtered = "" if is_empty else f" that matches {' and '.join(map(repr, wanted.filters))}"
    return f"{path}: holds no task{filtered}."


def _read(candidate: Candidate, check: Callable[[Imported], object]) -> Imported | LeftOut:
    try:
        one = candidate.read()
        check(one)
    except InvalidRequest as error:
        is_placed = error.message.startswith(candidate.where)
        return LeftOut(error.message if is_placed else f"{candidate.where}: {error.message}")
    return one


def _matches(candidate: Candidate, filters: tuple[str, ...]) -> bool:
    """True for an unreadable row, whose fields are unknown."""
    if candidate.instance is None:
        return True
    for filter_ in filters:
        field, equals, pattern = filter_.partition("=")
        value = str(column_of(candidate.instance, field, "")) if equals else candidate.name
        if not fnmatchcase(value, pattern if equals else filter_):
            return False
    return True


def _candidates(path: Path, wanted: Wanted) -> Generator[Candidate]:
    if (program := _program_of(str(path))) is not None:
        if wanted.format or wanted.split or wanted.preset or wanted.mapping:
            raise InvalidRequest(f"{path}: --format, --split, --preset and --map are for files, not for programs.")
        limit = None if wanted.filters else wanted.limit
        yield from program.candidates(str(path).removeprefix(program.prefix), wanted.choices, limit)
        return
    if wanted.registry is not None:
        clones = wanted.instances.repositories
        yield from _of_folders(
            path,
            "harbor",
            wanted,
            wing_part("harbor_folders")(wanted.registry, str(path), None if clones is None else Path(clones)),
        )
        return
    kind = wanted.format or _format_of(path, wanted)
    if kind in _folder_formats():
        yield from _of_folders(path, kind, wanted)
        return
    rows = _Rows(path, wanted, kind)
    yield from rows.candidates()


def _format_of(path: Path, wanted: Wanted) -> str:
    """Raises: InvalidRequest if the rows have no known format."""
    for kind, folders in _folder_formats().items():
        if path.is_dir() and (folders.recognizes(path) or any(map(folders.recognizes, path.iterdir()))):
            return kind
    if wanted.preset is not None or wanted.mapping:
        return "rows"
    rows = read_rows(path, wanted.split)
    where, row = next((one for one in rows if isinstance(one[1], Mapping)), (str(path), None))
    columns = set[str](row or ())
    if any(names <= {name.casefold() for name in columns} for names in _SWE_COLUMNS):
        return "swe"
    if row is not None and "instruction" not in columns:
        raise InvalidRequest(
            f"{where}: is of no known format. Give --preset NAME for the rows of its dataset, or --map "
            f"instruction=COLUMN; the columns are {', '.join(sorted(columns)) or 'none'}."
        )
    return "rows"


def _of_folders(
    path: Path, kind: str, wanted: Wanted, found: Sequence[SourcePath] | None = None
) -> Generator[Candidate]:
    """found: the tasks' folders; None: `path` itself, or its subfolders."""
    folders = _folder_formats()[kind]
    if wanted.split is not None or wanted.preset is not None or wanted.mapping:
        raise InvalidRequest(f"{path}: --split, --preset and --map are for rows; these are folders of tasks ({kind}).")
    if found is None and not path.is_dir():
        raise InvalidRequest(f"{path}: is not a folder, as tasks of {kind} are.")
    if found is None:
        found = _tasks_in(path, folders.recognizes)
    by_field = any("=" in filter_ for filter_ in wanted.filters)
    for folder in found:
        document = folders.document(folder) if by_field else None
        fields = cast("Mapping[str, Any]", document or {})
        yield Candidate(folder.name, fields, partial(folders.read, folder, wanted.choices))


def _tasks_in(path: Path, recognizes: Callable[[Path], bool]) -> list[SourcePath]:
    """The folder itself if it is a task, else the tasks in it. Raises: InvalidRequest for a link."""
    if recognizes(path):
        return [SourcePath.of(path.resolve())]
    found = sorted(filter(recognizes, path.iterdir()))
    for one in found:
        (SourcePath.of(path) / one.name).has_folder()
    return [SourcePath.of(one) for one in found]


class _Rows:
    """The rows of one source."""

    def __init__(self, path: Path, wanted: Wanted, kind: str) -> None:
        self._path = path
        self._wanted = wanted
        self._is_swe = kind == "swe"
        self._name = wanted.name or re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().stem).strip("-._") or "row"

    def candidates(self) -> Generator[Candidate]:
        for number, (where, row) in enumerate(read_rows(self._path, self._wanted.split, self._wanted.files), 1):
            if not isinstance(row, Mapping):
                why = row.message if isinstance(row, InvalidRequest) else "is not an object"
                yield Candidate(where, None, partial(_refuse, why), where)
                continue
            fields = cast("Mapping[str, Any]", row)
            inner = column_of(fields, "instance.instance_id", None) if self._is_swe else None
            name = str(inner) if inner is not None else name_of_row(fields, number, self._name)
            yield Candidate(name, fields, self._reader(fields, name, where), where)

    def _reader(self, row: Mapping[str, Any], name: str, where: str) -> Callable[[], Imported]:
        """Raises: InvalidRequest for a file that cannot be read to its end."""
        wanted = self._wanted
        if self._is_swe:
            return partial(read_instance, row, where, wanted.choices, wanted.instances)
        if wanted.preset is not None:
            return partial(read_preset_row, row, name, wanted.preset, wanted.mapping, wanted.choices)
        is_answered = "answer" in wanted.mapping or "answer" in row or self._are_answered
        return partial(read_plain_row, row, name, wanted.mapping, wanted.choices, is_answered=is_answered)

    @cached_property
    def _are_answered(self) -> bool:
        """Whether any row has an answer; if so, a row without one cannot be graded."""
        rows = (row for _, row in read_rows(self._path, self._wanted.split, self._wanted.files))
        return any("answer" in row for row in rows if isinstance(row, Mapping))


def _refuse(why: str) -> Imported:
    raise InvalidRequest(why)
