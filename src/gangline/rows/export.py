"""Exports session results as one file of rows, in the format that the caller chooses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from gangline.domain.session import SessionResult
from gangline.rows.rows import rows_of, write_jsonl, write_msgpack

Format = Literal["parquet", "jsonl", "msgpack"]


def export_rows(results: Iterable[SessionResult], folder: Path, *, name: str, format: Format = "parquet") -> Path:
    """Write the rows of all `results` to `folder/name.format`. Results are read one at a time.

    Raises: InvalidRequest when the format's extra is not installed; the message names it.
    """
    path = folder / f"{name}.{format}"
    rows = (row for result in results for row in rows_of(result))
    if format == "jsonl":
        write_jsonl(rows, path)
    elif format == "msgpack":
        write_msgpack(rows, path)
    else:
        from gangline.rows.parquet import write_parquet  # noqa: PLC0415 - it needs an extra

        write_parquet(rows, path)
    return path
