"""Reads rows of Parquet and Arrow files, unpacked by a separate process.

A file of a few kilobytes may unpack to more memory than the machine has, whatever its footer says, and a damaged file
may crash the process that reads it. Here both become an error with the file's name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any, BinaryIO, cast

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.paths import MAX_FILE_BYTES
from gangline.settings.installation import extra_command

_ROWS_AT_ONCE = 256
_BATCH_BYTES = 512 << 20
"""Size limit of one column."""
_MEMORY_BYTES = 3 << 30
"""Address space of the reader process."""
_PROGRAM = "from gangline.machine.reading.tables import unpack; unpack()"
_LENGTH_BYTES = 8
_UNPACKED_BYTES, _MOST_TIMES = 256 << 20, 200
"""Limits of unpacked rows, beyond any real data set's compression."""


def rows_of_table(file: BinaryIO, kind: str, where: str) -> Generator[Any]:
    """Each row, or an `InvalidRequest` if one of its values cannot be read.

    kind: `.parquet` or `.arrow`. Raises: InvalidRequest if the file cannot be read, or pyarrow is not installed.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise InvalidRequest(f"reading Parquet and Arrow needs pyarrow. Run: {extra_command('parquet')}")
    command = [sys.executable, "-P", "-c", _PROGRAM, kind]
    with subprocess.Popen(command, stdin=file.fileno(), stdout=subprocess.PIPE, env=_environment()) as reader:
        try:
            yield from _rows(cast("BinaryIO", reader.stdout), where, os.fstat(file.fileno()).st_size)
        finally:
            reader.kill()


def _environment() -> dict[str, str]:
    """One thread, and an allocator that reserves no more than needed, because the limit applies to address space."""
    folders = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}


def _rows(answers: BinaryIO, where: str, file_bytes: int) -> Generator[Any]:
    num_bytes = 0
    while length := answers.read(_LENGTH_BYTES):
        num_bytes += int.from_bytes(length, "big")
        if num_bytes > max(_UNPACKED_BYTES, _MOST_TIMES * file_bytes):
            raise InvalidRequest(f"cannot read {where}: it unpacks to more than {_MOST_TIMES} times its size.")
        rows, error = pickle.loads(answers.read(int.from_bytes(length, "big")))
        if error is not None:
            raise InvalidRequest(f"cannot read {where}: {error}")
        if rows is None:
            return
        yield from rows
    raise InvalidRequest(
        f"cannot read {where}: its reader ended. The file is damaged, or its rows unpack to more than "
        f"{_MEMORY_BYTES >> 30} GiB of memory: write it with smaller row groups."
    )


def unpack() -> None:
    """The reader's program: reads the table from standard input and writes pickled lists of rows to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    own = _MEMORY_BYTES if most == resource.RLIM_INFINITY else min(most, _MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (own, own))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")

    def answer(rows: list[Any] | None, error: str | None) -> None:
        data = pickle.dumps((rows, error))
        answers.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
        answers.flush()

    read = _of_parquet if sys.argv[1] == ".parquet" else _of_arrow
    try:
        with os.fdopen(0, "rb") as file:
            for rows in read(file):
                answer(rows, None)
        answer(None, None)
    except MemoryError:
        answer(None, f"its rows unpack to more than {_MEMORY_BYTES >> 30} GiB of memory")
    except BrokenPipeError:
        os._exit(0)
    except Exception as error:
        answer(None, str(error)[:500] or type(error).__name__)


def _of_parquet(file: BinaryIO) -> Iterator[list[Any]]:
    import pyarrow as pa  # noqa: PLC0415 - of the extra `parquet`
    from pyarrow import parquet  # noqa: PLC0415 - of the extra `parquet`

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    with parquet.ParquetFile(file, thrift_string_size_limit=MAX_FILE_BYTES) as table:
        at_once = _rows_at_once(table.metadata)
        for batch in cast("Iterator[Any]", table.iter_batches(batch_size=at_once, use_threads=False)):
            yield from _pieces(batch)


def _rows_at_once(footer: Any) -> int:
    """Limits a batch even if every row has the longest value of its column.

    Raises: ValueError for a row that exceeds the limit of a task.
    """
    largest = 1
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            num_bytes = column.total_uncompressed_size
            if num_bytes > MAX_FILE_BYTES * max(1, group.num_rows):
                raise ValueError(f"a row of {num_bytes / group.num_rows:,.0f} bytes is longer than a task may be")
            largest = max(largest, num_bytes)
    return min(_ROWS_AT_ONCE, max(1, _BATCH_BYTES // largest))


def _of_arrow(file: BinaryIO) -> Iterator[list[Any]]:
    """A shard of `Dataset.save_to_disk`: Arrow's stream format."""
    from pyarrow import ipc  # noqa: PLC0415 - of the extra `parquet`

    with cast("Any", ipc.open_stream(file)) as batches:
        for batch in cast("Iterator[Any]", batches):
            yield from _pieces(batch)


def _pieces(batch: Any) -> Iterator[list[Any]]:
    """Lists of rows. Raises: ValueError for a row that exceeds the limit of a task."""
    for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
        piece = batch.slice(start, _ROWS_AT_ONCE)
        few = 1 if piece.nbytes > MAX_FILE_BYTES else _ROWS_AT_ONCE
        for at in range(0, piece.num_rows, few):
            part = piece.slice(at, few)
            if few == 1 and part.nbytes > MAX_FILE_BYTES:
                raise ValueError(f"a row of {part.nbytes:,} bytes is longer than a task may be")
            yield _rows_of(part)


def _rows_of(batch: Any) -> list[Any]:
    """Raises: ValueError."""
    names: list[str] = batch.schema.names
    if twice := next((name for name, times in Counter(names).items() if times > 1), None):
        raise ValueError(f"two columns are called {twice!r}: rename one")
    columns = [_column(batch, name) for name in names]
    return [_row(names, [column[at] for column in columns]) for at in range(batch.num_rows)]


def _row(names: list[str], values: list[Any]) -> Any:
    for name, value in zip(names, values, strict=True):
        if isinstance(value, Exception):
            return InvalidRequest(f"{name}: cannot be read: {value}")
    return dict(zip(names, values, strict=True))


def _column(batch: Any, name: str) -> list[Any]:
    """Its values, with numbers of classes replaced by their names. A value that cannot be read is replaced by its
    error.
    """
    values = batch.column(name)
    try:
        found: list[Any] = values.to_pylist()
    except (ValueError, OverflowError):  # a text that is not UTF-8, or a time outside Python's range
        found = [_value(value) for value in values]
    if classes := _classes_of(batch.schema, name):
        found = [classes[one] if isinstance(one, int) and 0 <= one < len(classes) else None for one in found]
    return found


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        return error


def _classes_of(schema: Any, column: str) -> list[str]:
    """Class names of a `datasets` class label column, such as A to D. The column contains their numbers, -1 for no
    class.
    """
    about: Any = json.loads(cast("dict[bytes, bytes]", schema.metadata or {}).get(b"huggingface", b"{}"))
    try:
        feature = about["info"]["features"][column]
    except (KeyError, TypeError):  # another program wrote the key, or it is null
        return []
    is_of_classes = isinstance(feature, dict) and cast("Any", feature).get("_type") == "ClassLabel"
    return cast("Any", feature).get("names") or [] if is_of_classes else []
