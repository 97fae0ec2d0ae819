"""Provider `local`: searches documents on the node's disk. It needs no network.

The documents of a folder or a dataset file are in a full-text index: SQLite's FTS5 with BM25, in a file that is built
once and then only read. The file's name is the digest of the corpus's files (path, size, modification time) and
columns, so that a changed corpus gets a new index. One process builds it, in a temporary file, while others wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sqlite3
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from gangline.agents.tools.contract import ToolFailed
from gangline.agents.tools.search.provider import Hit, Page
from gangline.domain.errors import InvalidRequest
from gangline.domain.search_source import SearchSource
from gangline.machine.durable import locked


class LocalProvider:
    """One open index. Created by `open`."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._reading = asyncio.Lock()

    @classmethod
    async def open(cls, source: SearchSource, index_folder: Path) -> LocalProvider:
        """Raises: InvalidRequest if the corpus cannot be read; OSError."""
        return cls(Index(await asyncio.to_thread(index_file, source, index_folder)))

    async def search(self, query: str, max_results: int) -> Sequence[Hit]:
        async with self._reading:
            return await asyncio.to_thread(self._index.search, query, max_results)

    async def page(self, address: str) -> Page:
        async with self._reading:
            page = await asyncio.to_thread(self._index.page, address)
        if page is None:
            raise ToolFailed(f"there is no document {address!r}: use an address that a search returned")
        return page

    async def close(self) -> None:
        self._index.close()


_VERSION = "1"
"""Changed together with the tables, so that an index of another version is never opened."""
_MAX_TERMS = 64
_WORD = re.compile(r"\w+")
_TABLES = """
    CREATE TABLE documents (number INTEGER PRIMARY KEY, id TEXT UNIQUE, title TEXT, text TEXT);
    CREATE VIRTUAL TABLE found USING fts5 (
        title, text, content='documents', content_rowid='number', tokenize='porter unicode61'
    );
"""
_TITLE_WEIGHT = 3.0
_EXCERPT_TOKENS = 40


def index_file(source: SearchSource, folder: Path) -> Path:
    """Path of a source's index in a cache folder; built if missing, which is slow: do not call it on the event loop.

    Raises: InvalidRequest if the corpus cannot be read; OSError.
    """
    root = Path(source.path or "").expanduser().resolve()
    path = folder / f"{_digest(root, source)}.sqlite"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with locked(path.with_suffix(".lock"), wait=True):
        if not path.exists():
            beside = path.with_suffix(".new")
            beside.unlink(missing_ok=True)
            _build(root, source, beside)
            beside.rename(path)
    return path


def _digest(root: Path, source: SearchSource) -> str:
    digest = hashlib.sha256(f"{_VERSION}\n{source.text_column}\n{source.title_column}\n{source.id_column}\n".encode())
    for path in files_of(root):
        stat = path.stat()
        digest.update(f"{path}\n{stat.st_size}\n{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _build(root: Path, source: SearchSource, path: Path) -> None:
    """Nothing is synced to disk: an index lost in a crash is built again."""
    database = sqlite3.connect(path)
    try:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("PRAGMA synchronous = OFF")
        database.executescript(_TABLES)
        insert = "INSERT OR IGNORE INTO documents (id, title, text) VALUES (?, ?, ?)"
        for number, document in enumerate(documents(root, source), 1):
            values = [value.encode(errors="replace").decode() for value in (document.title, document.text)]
            if not database.execute(insert, (document.id, *values)).rowcount:
                database.execute(insert, (f"{document.id}#{number}", *values))
        database.execute("INSERT INTO found (found) VALUES ('rebuild')")
        database.execute("INSERT INTO found (found) VALUES ('optimize')")
        database.commit()
    finally:
        database.close()


def match_of(query: str) -> str:
    """Converts any query text to an FTS5 expression that matches any of its words; empty if it has no words.

    Each word is a quoted string, so the query cannot contain FTS5 syntax.
    """
    words = dict.fromkeys(word.casefold() for word in _WORD.findall(query))
    return " OR ".join(f'"{word}"' for word in list(words)[:_MAX_TERMS])


class Index:
    """An open index. Its methods block for milliseconds. Use it from one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False)

    def search(self, query: str, max_results: int) -> list[Hit]:
        match = match_of(query)
        if not match:
            return []
        rows = self._database.execute(
            "SELECT documents.title, documents.id, snippet(found, 1, '', '', ' ... ', ?) FROM found"
            " JOIN documents ON documents.number = found.rowid"
            f" WHERE found MATCH ? ORDER BY bm25(found, {_TITLE_WEIGHT}) , found.rowid LIMIT ?",
            (_EXCERPT_TOKENS, match, max_results),
        )
        return [Hit(title, id_, " ".join(excerpt.split())) for title, id_, excerpt in rows]

    def page(self, id_: str) -> Page | None:
        given = id_.encode(errors="replace").decode()
        row = self._database.execute("SELECT title, text FROM documents WHERE id = ?", (given,)).fetchone()
        return None if row is None else Page(row[0], id_, row[1])

    def close(self) -> None:
        self._database.close()


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
