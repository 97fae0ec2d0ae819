"""Reads files of records: JSON lines, JSON documents, MessagePack, Parquet, and PyTorch files of plain values.

JSON lines and Parquet are streamed. The others are read whole.
"""

# pyarrow has no type stubs, and records can have any structure.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import importlib
import json
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.domain.tokens import decode_msgpack
from gangline.settings.installation import extra_command

_OURS = ("provenance.json",)
"""Files in a folder of rows that contain no rows."""


def files_in(path: Path) -> list[Path]:
    """The files of records in a folder and its subfolders, by name; for a file, the file itself. Raises:
    InvalidRequest.
    """
    if not path.is_dir():
        return [path]
    suffixes = {*_kinds(), ".jsonl", ".ndjson"}
    names = (one for one in sorted(path.rglob("*")) if one.suffix in suffixes and one.name not in _OURS)
    found = [name for name in names if name.is_file() and not name.name.startswith(".")]
    if not found:
        raise InvalidRequest(f"{path} has no file of records: {', '.join(sorted(suffixes))}")
    return found


def _kinds() -> dict[str, Callable[[Path], Iterator[Any]]]:
    return {".parquet": _parquet, ".msgpack": _msgpack, ".mp": _msgpack, ".json": _document, ".pt": _torch}


def read_records(path: Path) -> Iterator[Any]:
    """Records in order. Raises: InvalidRequest if the file cannot be read."""
    if path.suffix == ".csv":
        raise InvalidRequest(f"{path} is a table without token ids: check rows, such as those of `gangline export`.")
    if not path.is_file():
        raise InvalidRequest(f"{path} is not a file")
    try:
        yield from _kinds().get(path.suffix, _lines)(path)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read as {path.suffix or 'JSON lines'}: {error}") from error


def _lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield _decoded(line)


def _decoded(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)  # Python writes NaN, which is not JSON


def _document(path: Path) -> Iterator[Any]:
    try:
        document = _decoded(path.read_bytes())
    except ValueError:  # JSON lines under another name
        yield from _lines(path)
        return
    yield from document if isinstance(document, list) else [document]


def _msgpack(path: Path) -> Iterator[Any]:
    """One array of records."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        first = mapped[0]
        if not (0x90 <= first <= 0x9F or first in (0xDC, 0xDD)):
            yield decode_msgpack(mapped[:], dict)
            return
        for record in msgspec.msgpack.decode(mapped[:], type=list[msgspec.Raw]):
            yield decode_msgpack(record, dict)


def _parquet(path: Path) -> Iterator[Any]:
    try:
        pa, pq = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise InvalidRequest(f"Parquet needs pyarrow. Run: {extra_command('parquet')}") from error

    def value(column: Any, index: int) -> Any:
        if pa.types.is_list(column.type) and pa.types.is_primitive(column.type.value_type):
            found = column[index].values
            return None if found is None else found.to_numpy(zero_copy_only=False)
        plain = column[index].as_py()
        return _decoded(plain.encode()) if isinstance(plain, str) and plain[:1] in ("[", "{") else plain

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise InvalidRequest(f"{path} is not a Parquet file: {error}") from error
    with file:
        for batch in file.iter_batches(batch_size=256):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            for index in range(batch.num_rows):
                yield {name: value(column, index) for name, column in columns.items()}


def _torch(path: Path) -> Iterator[Any]:
    """Executes no code from the file: only numbers, texts, lists, maps and tensors are read."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise InvalidRequest(f"{path} needs PyTorch to be read; JSON lines need nothing") from error
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InvalidRequest(f"{path} holds more than plain values, or is not a PyTorch file: {error}") from error
    yield from document if isinstance(document, list) else [document]
