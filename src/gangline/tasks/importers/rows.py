"""Rows of a dataset, read one after another: a file of JSON lines, JSON, CSV or Parquet, or a folder of such files."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.csv_rows import rows_of_csv
from gangline.machine.reading.lines import NumberedRow, rows_of_json, rows_of_lines, text_of
from gangline.machine.reading.paths import opened_source
from gangline.machine.reading.tables import rows_of_table

__all__ = ["read_rows"]

_MAX_FILE_BYTES = 1 << 40
_MAX_FILES = 200_000
_MAX_PATH_CHARS = 3_000
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
    wall = _wall_of(path)
    for file in _files_of(path, split):
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
    """The folder that a dataset's files may not lead out of. Snapshots in the cache of Hugging Face are links into the
    folder of their repository."""
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


def _found_in(root: Path) -> list[Path]:
    """Files with rows, links among them. Raises: InvalidRequest for a folder with too much in it."""
    found: list[Path] = []
    num_seen = 0
    for folder, folders, names in os.walk(root):
        num_seen += len(names) + len(folders)
        if num_seen > _MAX_FILES or len(folder) > _MAX_PATH_CHARS:
            raise InvalidRequest(f"{root}: holds more than {_MAX_FILES:,} files, or too deep folders.")
        found += (Path(folder, one) for one in names if Path(one).suffix in _DATA | _TABLES and one not in _NOT_DATA)
    return sorted(found)


def _split_of(file: Path, root: Path) -> str:
    """`train` of `data/train-00000-of-00004.parquet`, `train.jsonl`, `train/0.parquet` and `train/data-....arrow`."""
    stem = _SHARD.sub("", file.stem)
    inner = [part for part in file.relative_to(root).parts[:-1] if part != "data"]
    return inner[-1] if (inner and stem in ("data", "", *inner)) or (stem.isdigit() and inner) else stem
