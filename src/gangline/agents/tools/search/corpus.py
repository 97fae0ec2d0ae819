"""Reads the documents of a folder or a dataset file."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.domain.search_source import SearchSource

_TEXTS = frozenset({".txt", ".md", ".markdown", ".rst"})
_RECORDS = frozenset({".json", ".jsonl", ".parquet"})
_MAX_TITLE_CHARS = 200


class Document(msgspec.Struct, frozen=True):
    """One text. Ids may repeat: the index makes them unique."""

    id: str
    title: str
    text: str


def files_of(root: Path) -> list[Path]:
    """The files of a corpus in a fixed order; links are not followed. Raises: InvalidRequest if there are none."""
    if root.is_file():
        return [root]
    found = [
        Path(folder, name)
        for folder, _, names in os.walk(root)
        for name in names
        if Path(name).suffix.lower() in _TEXTS | _RECORDS
    ]
    files = sorted(path for path in found if path.is_file() and not path.is_symlink())
    if not files:
        known = ", ".join(sorted(_TEXTS | _RECORDS))
        raise InvalidRequest(f"the search source {root} has no documents: it needs a file or folder with {known}")
    return files


def documents(root: Path, source: SearchSource) -> Generator[Document]:
    """Every document. Raises: InvalidRequest for an unreadable file."""
    for path in files_of(root):
        name = path.name if path == root else path.relative_to(root).as_posix()
        try:
            if path.suffix.lower() in _RECORDS:
                for number, record in enumerate(_records(path), 1):
                    yield _from_record(record, f"{name}#{number}", source)
            else:
                text = path.read_text(encoding="utf-8", errors="replace")
                yield Document(name, _title_in(text) or name, text)
        except (OSError, ValueError, ImportError) as error:
            raise InvalidRequest(f"the search source cannot be read: {path}: {error}") from error


def _records(path: Path) -> Iterator[Any]:
    match path.suffix.lower():
        case ".jsonl":
            with path.open("rb") as lines:
                yield from (msgspec.json.decode(line) for line in lines if line.strip())
        case ".json":
            content = msgspec.json.decode(path.read_bytes())
            yield from cast("list[Any]", content) if isinstance(content, list) else [content]
        case _:
            from pyarrow import parquet  # noqa: PLC0415 - an extra, which few corpora need

            with parquet.ParquetFile(path) as file:
                for batch in cast("Any", file).iter_batches():  # its types are partly unknown
                    yield from batch.to_pylist()


def _from_record(record: Any, place: str, source: SearchSource) -> Document:
    fields: Mapping[str, Any] = cast("Mapping[str, Any]", record) if isinstance(record, dict) else {}
    text = fields.get(source.text_column)
    if not isinstance(text, str):
        raise ValueError(f"record {place} has no text in its column {source.text_column!r}")
    id_ = fields.get(source.id_column)
    title = fields.get(source.title_column)
    return Document(place if id_ is None else str(id_), str(title) if title else _title_in(text) or place, text)


def _title_in(text: str) -> str:
    """The first nonempty line."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    return first.lstrip("# ").strip()[:_MAX_TITLE_CHARS]
