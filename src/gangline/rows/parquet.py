"""Rows as Parquet: token arrays as lists of numbers, spans and splices as structs, deeper values as JSON text.

Importing this module needs the extra `parquet`; no other module of the package imports it.
"""

# pyarrow has no type stubs.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from gangline.domain.completion import OWN_EVIDENCE
from gangline.domain.errors import InvalidRequest
from gangline.domain.experts import RowExperts
from gangline.domain.masks import RowMask
from gangline.domain.trajectory import SharedPrefix, Splice, TurnSpan
from gangline.machine.durable import replacing
from gangline.rows.rows import Row
from gangline.settings import plugins
from gangline.settings.installation import extra_command

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise InvalidRequest(
        "Parquet needs the Python package pyarrow, which is not installed. The formats jsonl and msgpack need nothing. "
        f"Run: {extra_command('parquet')}"
    ) from error

_ROWS_IN_A_GROUP = 256
_IDS_IN_A_GROUP = 1 << 21
"""A group ends with the row that reaches this."""

_ARRAYS: dict[str, Any] = {
    "prompt_ids": pa.int32(),
    "response_ids": pa.int32(),
    "loss_mask": pa.int8(),
    "response_logprobs": pa.float32(),
    "response_versions": pa.int32(),
}
_JSON = ("lineage", "certificates", "prompt_messages", "response_messages", "tools", "metadata")
_NUMBER_TYPES = {int: pa.int32(), float: pa.float64(), bytes: pa.large_binary()}


def _struct(kind: type[msgspec.Struct]) -> Any:
    """Returns a struct type for fields that are numbers, bytes and texts, or None."""
    fields: list[tuple[str, Any]] = []
    for field in msgspec.structs.fields(kind):
        possible = set(get_args(field.type)) or {field.type}
        found = [arrow for type_, arrow in _NUMBER_TYPES.items() if type_ in possible]
        fields.append((field.name, found[0] if found else pa.string()))
    return pa.struct(fields)


_STRUCTS: dict[str, Any] = {"spans": _struct(TurnSpan), "splices": _struct(Splice)}
_STRUCT: dict[str, Any] = {
    "shared_prefix": _struct(SharedPrefix),
    **dict(zip(OWN_EVIDENCE, map(_struct, (RowExperts, RowMask)), strict=True)),
}
_TEXTS = ("response_texts",)
_NUMBERS = {"attempt": pa.int32(), "reward": pa.float64(), "session_reward": pa.float64()}


def _type(name: str) -> Any:
    if name in _ARRAYS:
        return pa.list_(_ARRAYS[name])
    if name in _STRUCTS:
        return pa.list_(_STRUCTS[name])
    if name in _TEXTS:
        return pa.list_(pa.string())
    return _STRUCT.get(name) or _NUMBERS.get(name, pa.string())


_NAMES = [name for name in Row.__struct_fields__ if name != "evidence"]
SCHEMA = pa.schema([(name, _type(name)) for name in _NAMES])
_WIDER = SCHEMA.append(pa.field("evidence", pa.string()))
"""Schema of files that are written when a plug-in adds evidence."""


def write_parquet(rows: Iterable[Row], path: Path) -> int:
    """Write rows. Returns their number. Memory is bounded by one group of rows.

    Raises: InvalidRequest when only a later group has evidence of a plug-in that is not installed here.
    """
    num = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    groups = _groups(rows)
    first = next(groups, [])
    schema = _WIDER if plugins.names("evidence") or any(row.evidence for row in first) else SCHEMA
    with replacing(path) as aside, pq.ParquetWriter(aside, schema, compression="zstd") as writer:
        for group in chain([first] if first else [], groups):
            if schema is SCHEMA and any(row.evidence for row in group):
                raise InvalidRequest("some rows have evidence of a plug-in: install it here, or write jsonl or msgpack")
            writer.write_batch(_batch(group, schema))
            num += len(group)
            group.clear()  # `first` would keep its rows in memory
    return num


def _batch(group: Sequence[Row], schema: Any) -> Any:
    columns = [_column(name, [getattr(row, name) for row in group]) for name in schema.names]
    return pa.record_batch(columns, schema=schema)


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    group: list[Row] = []
    num_ids = 0
    for row in rows:
        group.append(row)
        num_ids += len(row.prompt_ids) + len(row.response_ids)
        if len(group) == _ROWS_IN_A_GROUP or num_ids >= _IDS_IN_A_GROUP:
            yield group
            group, num_ids = [], 0
    if group:
        yield group


def _column(name: str, values: Sequence[Any]) -> Any:
    if name in _ARRAYS:
        offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
        return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values), _ARRAYS[name]))
    if name == "evidence":
        return pa.array([msgspec.json.encode(value).decode() if value else None for value in values], pa.string())
    if name in _JSON:
        return pa.array([msgspec.json.encode(value).decode() for value in values], pa.string())
    if name in _STRUCTS:
        values = [[msgspec.structs.asdict(item) for item in items] for items in values]
    if name in _STRUCT:
        values = [None if item is None else msgspec.structs.asdict(item) for item in values]
    return pa.array(values, _type(name))


def read_parquet(path: Path) -> Iterator[Row]:
    """Yields rows, with one group at a time in memory. Raises: InvalidRequest when the file contains no rows."""
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise InvalidRequest(f"{path} is not a Parquet file: {error}") from error
    names = file.schema_arrow.names
    if names not in (SCHEMA.names, _WIDER.names):
        raise InvalidRequest(f"{path} holds no rows of ours: its columns are {', '.join(names)}")
    with file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group).combine_chunks()
            columns = {name: table.column(name) for name in names}
            for index in range(table.num_rows):
                found = {name: _value(name, column, index) for name, column in columns.items()}
                if found.get("evidence") is None:
                    found.pop("evidence", None)
                yield msgspec.convert(found, Row, dec_hook=_as_it_is)


def _value(name: str, column: Any, index: int) -> Any:
    if name in _ARRAYS:
        return column[index].values.to_numpy()
    value = column[index].as_py()
    return json.loads(value) if value is not None and name in (*_JSON, "evidence") else value


def _as_it_is(_kind: Any, value: Any) -> Any:
    return value
