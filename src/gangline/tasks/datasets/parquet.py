"""Writes the tables of a dataset as Parquet, such that `datasets` loads JSON columns as values.

Columns of Arrow's JSON type are text in the file. `datasets` 4.7 and newer parse them on loading. So the `arguments` of
a tool call are text in OpenAI's form for other readers, and a dictionary, which chat templates expect, for trainers.

Importing this module requires the extra `parquet`.
"""

# pyarrow has no type stubs.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gangline.domain.errors import InvalidRequest
from gangline.machine.durable import replacing
from gangline.settings.installation import extra_command
from gangline.tasks.datasets.kinds import Kind

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise InvalidRequest(
        f"a dataset needs the Python package pyarrow, which is not installed: {extra_command('parquet')}"
    ) from error

_GROUP_ROWS = 256
_GROUP_BYTES = 8 << 20
"""Estimated bytes of a row group: the size of its arrays, plus one byte per character."""

_TEXT, _JSON = pa.string(), pa.json_()
_CALL = pa.struct([("id", _TEXT), ("type", _TEXT), ("function", pa.struct([("name", _TEXT), ("arguments", _JSON)]))])
_MESSAGES = pa.list_(
    pa.struct(
        [
            *((name, _TEXT) for name in ("role", "content", "reasoning_content")),
            ("tool_calls", pa.list_(_CALL)),
            ("tool_call_id", _TEXT),
            ("name", _TEXT),
        ]
    )
)
_REFERENCE = [
    *((name, _TEXT) for name in ("instance_id", "task_id", "session_id")),
    ("attempt", pa.int32()),
    ("completion_id", _TEXT),
    ("outcome", _TEXT),
    ("reward", pa.float64()),
    ("metadata", _JSON),
]
_TALK = [("messages", _MESSAGES), ("tools", _JSON), ("num_tokens", pa.int32()), *_REFERENCE]

SCHEMAS: dict[Kind, Any] = {
    Kind.messages: pa.schema(_TALK),
    Kind.tokens: pa.schema(
        [
            ("input_ids", pa.list_(pa.int32())),
            ("assistant_masks", pa.list_(pa.int8())),
            ("logprobs", pa.list_(pa.float32())),
            ("versions", pa.list_(pa.int32())),
            ("trace_id", _TEXT),
            ("role", _TEXT),
            ("trace_reward", pa.float64()),
            *_REFERENCE,
        ]
    ),
    Kind.preferences: pa.schema(
        [
            *((name, _MESSAGES) for name in ("prompt", "chosen", "rejected")),
            ("tools", _JSON),
            *_REFERENCE,
            ("rejected_task_id", _TEXT),
            ("rejected_session_id", _TEXT),
            ("rejected_reward", pa.float64()),
        ]
    ),
    Kind.verdicts: pa.schema([*_TALK, ("accepted", pa.bool_()), ("why", _TEXT), ("reward_details", _JSON)]),
    Kind.atif: pa.schema([("trajectory", _JSON), *_REFERENCE]),
}


def write_table(kind: Kind, rows: Iterable[dict[str, Any]], path: Path) -> int:
    """Write the rows to one file, atomically. Returns their number. One group of rows is in memory at a time."""
    schema, num = SCHEMAS[kind], 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, pq.ParquetWriter(aside, schema, compression="zstd") as writer:
        for group in _groups(rows):
            writer.write_table(_table(group, schema))
            num += len(group)
    return num


def _groups(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    num_bytes = 0
    for row in rows:
        group.append(row)
        num_bytes += sum(map(_size, row.values()))
        if len(group) == _GROUP_ROWS or num_bytes >= _GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, list):
        return sum(len(message["content"]) for message in value)
    return len(value) if isinstance(value, str) else 8


def _table(group: Sequence[dict[str, Any]], schema: Any) -> Any:
    columns = [_column([row[field.name] for row in group], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(values: list[Any], kind: Any) -> Any:
    if isinstance(values[0], np.ndarray):
        offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
        return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values), kind.value_type))
    if kind == _MESSAGES:
        values = [[_portable(message) for message in messages] for messages in values]
    plain = _plain(kind)
    made = pa.array(values, plain)
    return made if plain == kind else made.cast(kind)


def _portable(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments that are not valid JSON, as a model may write them, are wrapped in a JSON text."""
    if not message["tool_calls"]:
        return message
    return message | {
        "tool_calls": [call | {"function": _function(**call["function"])} for call in message["tool_calls"]]
    }


def _function(name: str, arguments: str) -> dict[str, str]:
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        arguments = msgspec.json.encode(arguments).decode()
    return {"name": name, "arguments": arguments}


def _plain(kind: Any) -> Any:
    """The type with text instead of JSON: Arrow can only create arrays of nested JSON from that."""
    if kind == _JSON:
        return _TEXT
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain(field.type)) for field in kind])
    return kind
