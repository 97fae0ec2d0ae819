"""Rows of a dataset, read one after another: a file of JSON lines, JSON or Parquet, or a folder of such files."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, cast

from gangline.domain.errors import InvalidRequest
from gangline.importers.files import read_text
from gangline.installation import extra_command

__all__ = ["read_rows"]

_ROWS_AT_ONCE = 256
_DATA = {".parquet", ".jsonl", ".json", ".arrow"}
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_SHARD = re.compile(r"-\d+-of-\d+$")


def read_rows(path: Path, split: str | None = None) -> Generator[tuple[str, Any]]:
    """Each row with its place, `FILE, row N`, counted from 1. A row may be of any JSON type.

    path: a file, or a folder of a Hugging Face dataset: a copy of its repository, or one that `save_to_disk` wrote.

    Raises: InvalidRequest when a file cannot be read, the split is missing or not chosen, or pyarrow is missing.
    """
    for file in _files_of(path, split):
        rows = {".parquet": _of_parquet, ".json": _of_json, ".arrow": _of_arrow}.get(file.suffix, _of_lines)
        for number, row in enumerate(rows(file), 1):
            yield f"{file}, row {number}", row


def _files_of(path: Path, split: str | None) -> list[Path]:
    if not path.is_dir():
        if split is not None:
            raise InvalidRequest(f"--split {split}: {path} is one file; splits are of a dataset's folder.")
        return [path]
    splits: dict[str, list[Path]] = {}
    for file in sorted(one for one in path.rglob("*") if one.suffix in _DATA and one.name not in _NOT_DATA):
        splits.setdefault(_split_of(file, path), []).append(file)
    if not splits:
        raise InvalidRequest(f"{path}: holds neither tasks nor a file of rows ({', '.join(sorted(_DATA))}).")
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


def _of_json(path: Path) -> Generator[Any]:
    document = _parsed(read_text(path), str(path))
    yield from cast("list[Any]", document) if isinstance(document, list) else [document]


def _of_lines(path: Path) -> Generator[Any]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parsed(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{where} is no JSON: {error}") from error


def _of_parquet(path: Path) -> Generator[Any]:
    _need_pyarrow()
    from pyarrow import parquet  # noqa: PLC0415 - of the extra `parquet`

    try:
        with parquet.ParquetFile(path) as file:
            for batch in cast("Iterator[Any]", file.iter_batches(batch_size=_ROWS_AT_ONCE)):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error


def _of_arrow(path: Path) -> Generator[Any]:
    """A shard of `Dataset.save_to_disk`: Arrow's stream format."""
    _need_pyarrow()
    from pyarrow import ipc  # noqa: PLC0415 - of the extra `parquet`

    try:
        with path.open("rb") as file, cast("Any", ipc.open_stream(file)) as batches:
            for batch in cast("Iterator[Any]", batches):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error


def _need_pyarrow() -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise InvalidRequest(f"reading Parquet and Arrow needs pyarrow. Run: {extra_command('parquet')}")
