"""Rows of a dataset, read one after another: a file of JSON lines, JSON, CSV or Parquet, or a folder of such files."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, cast

from gangline.domain.errors import InvalidRequest
from gangline.importers.files import read_text
from gangline.importers.plain.tables import NumberedRow, opened_text, rows_of_csv
from gangline.installation import extra_command

__all__ = ["read_rows"]

_ROWS_AT_ONCE = 256
_LINES = {".jsonl", ".json", ".ndjson"}
_BEGINS_LIST = re.compile(r"\s*\[\s*(?:\{|$)")
_DATA = {".parquet", ".jsonl", ".json", ".arrow"}
_TABLES = {".csv", ".tsv"}
"""Rows of a folder only where it has none of the others: beside them, tables are mostly about the dataset."""
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_SHARD = re.compile(r"-\d+-of-\d+$")


def read_rows(path: Path, split: str | None = None) -> Generator[tuple[str, Any]]:
    """Each row with its place, `FILE, row N (line M)`, counted from 1. A row may be of any JSON type, and is an
    `InvalidRequest` where it cannot be read: the others are read.

    path: a file, or a folder of a Hugging Face dataset: a copy of its repository, or one that `save_to_disk` wrote.

    Raises: InvalidRequest when a file cannot be read, the split is missing or not chosen, or pyarrow is missing.
    """
    for file in _files_of(path, split):
        readers = {".parquet": _of_parquet, ".arrow": _of_arrow, ".json": _of_json}
        read = readers.get(file.suffix, rows_of_csv if file.suffix.lower() in _TABLES else _of_lines)
        for number, (line, row) in enumerate(read(file), 1):
            yield f"{file}, row {number}" + (f" (line {line})" if line not in (0, number) else ""), row


def _files_of(path: Path, split: str | None) -> list[Path]:
    if not path.is_dir():
        if split is not None:
            raise InvalidRequest(f"--split {split}: {path} is one file; splits are of a dataset's folder.")
        return [path]
    splits: dict[str, list[Path]] = {}
    files = sorted(one for one in path.rglob("*") if one.name not in _NOT_DATA)
    for file in [one for one in files if one.suffix in _DATA] or [one for one in files if one.suffix in _TABLES]:
        splits.setdefault(_split_of(file, path), []).append(file)
    if not splits:
        raise InvalidRequest(f"{path}: holds neither tasks nor a file of rows ({', '.join(sorted(_DATA | _TABLES))}).")
    if split is None and len(splits) > 1:
        raise InvalidRequest(f"{path}: has the splits {', '.join(sorted(splits))}: choose one with --split.")
    if split is not None and split not in splits:
        raise InvalidRequest(f"--split {split}: {path} has {', '.join(sorted(splits))}.")
    return splits[split] if split is not None else next(iter(splits.values()))


def _split_of(file: Path, root: Path) -> str:
    """`train` of `data/train-00000-of-00004.parquet`, `train.jsonl`, `train/0.parquet` and `train/data-....arrow`."""
    stem = _SHARD.sub("", file.stem)
    inner = [part for part in file.relative_to(root).parts[:-1] if part != "data"]
    return inner[-1] if (inner and stem in ("data", "", *inner)) or (stem.isdigit() and inner) else stem


def _of_json(path: Path) -> Generator[NumberedRow]:
    """A list, one object, or JSON lines under that name. Raises: InvalidRequest."""
    try:
        document = _parsed(read_text(path).removeprefix("\ufeff"))
    except InvalidRequest as error:
        if "Extra data" in error.message:
            yield from _of_lines(path)
            return
        raise InvalidRequest(f"{path} {error.message}") from error
    rows = cast("list[Any]", document) if isinstance(document, list) else [document]
    yield from (NumberedRow(0, row) for row in rows)


def _of_lines(path: Path) -> Generator[NumberedRow]:
    """Raises: InvalidRequest, also when a file of another name does not begin with JSON."""
    is_guess = path.suffix not in _LINES
    with opened_text(path) as lines:
        try:
            for number, line in enumerate(lines, 1):
                if number == 1 and _BEGINS_LIST.match(line):
                    yield from _of_json(path)
                    return
                if not line.strip():
                    continue
                row = _or_error(line)
                if isinstance(row, InvalidRequest) and is_guess:
                    raise InvalidRequest(
                        f"{path}, line {number} {row.message}. Rows are read from JSON lines, JSON, CSV, TSV, Parquet "
                        "and Arrow, by the end of the file's name."
                    )
                is_guess = False
                yield NumberedRow(number, row)
        except (OSError, UnicodeError) as error:
            raise InvalidRequest(f"cannot read {path}: {error}") from error


def _or_error(line: str) -> Any:
    try:
        return _parsed(line)
    except InvalidRequest as error:
        return error


def _parsed(text: str) -> Any:
    """Raises: InvalidRequest."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise InvalidRequest("is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequest(f"is no JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise InvalidRequest(f"has the column {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _of_parquet(path: Path) -> Generator[NumberedRow]:
    _need_pyarrow()
    from pyarrow import parquet  # noqa: PLC0415 - of the extra `parquet`

    try:
        with parquet.ParquetFile(path) as file:
            for batch in cast("Iterator[Any]", file.iter_batches(batch_size=_ROWS_AT_ONCE)):
                yield from _of_batch(batch, path)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error


def _of_arrow(path: Path) -> Generator[NumberedRow]:
    """A shard of `Dataset.save_to_disk`: Arrow's stream format."""
    _need_pyarrow()
    from pyarrow import ipc  # noqa: PLC0415 - of the extra `parquet`

    try:
        with path.open("rb") as file, cast("Any", ipc.open_stream(file)) as batches:
            for batch in cast("Iterator[Any]", batches):
                yield from _of_batch(batch, path)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error


def _of_batch(batch: Any, path: Path) -> Generator[NumberedRow]:
    """Raises: InvalidRequest."""
    names: list[str] = batch.schema.names
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidRequest(f"cannot read {path}: two columns are called {twice!r}: rename one")
    columns = [_column(batch, name) for name in names]
    for at in range(batch.num_rows):
        values = [column[at] for column in columns]
        wrong = next(((name, one) for name, one in zip(names, values, strict=True) if isinstance(one, Exception)), None)
        row = dict(zip(names, values, strict=True))
        yield NumberedRow(0, row if wrong is None else InvalidRequest(f"{wrong[0]}: cannot be read: {wrong[1]}"))


def _column(batch: Any, name: str) -> list[Any]:
    """Its values, with the names of classes for their numbers; what cannot be read is its error."""
    values = batch.column(name)
    try:
        found: list[Any] = values.to_pylist()
    except (ValueError, OverflowError):  # a text that is no UTF-8, a time that Python does not have
        found = [_value(one) for one in values]
    if classes := _classes_of(batch.schema, name):
        found = [classes[one] if isinstance(one, int) and 0 <= one < len(classes) else None for one in found]
    return found


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        return error


def _classes_of(schema: Any, column: str) -> list[str]:
    """Names of a column of `datasets`' class labels, such as A to D; it is written as their numbers, -1 for none."""
    about: Any = json.loads(cast("dict[bytes, bytes]", schema.metadata or {}).get(b"huggingface", b"{}"))
    feature = about.get("info", {}).get("features", {}).get(column)
    is_of_classes = isinstance(feature, dict) and cast("Any", feature).get("_type") == "ClassLabel"
    return cast("Any", feature).get("names") or [] if is_of_classes else []


def _need_pyarrow() -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise InvalidRequest(f"reading Parquet and Arrow needs pyarrow. Run: {extra_command('parquet')}")
