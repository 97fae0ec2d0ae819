"""The index of Find: the texts of sessions in SQLite's full-text search, each distinct text once, and the findings of
rules.

It is built from results and can be deleted. One process writes it (`indexing`); readers open it read-only meanwhile.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import msgspec

from gangline.domain.lifecycle import Outcome

VERSION = 3
"""An index of another version is rebuilt."""

Rule = Literal["tool_error", "cut_at_length", "repeated_action", "git_history", "test_edited", "empty_patch"]
MARKS = ("\x02", "\x03")
"""Around each matching word."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions(
  id INTEGER PRIMARY KEY, session_id TEXT UNIQUE NOT NULL, task_id TEXT NOT NULL, attempt INTEGER NOT NULL,
  outcome TEXT NOT NULL, reward REAL, cause TEXT NOT NULL, rules TEXT NOT NULL, num_calls INTEGER NOT NULL,
  harness TEXT NOT NULL, versions TEXT NOT NULL, tenant TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS digests(id INTEGER PRIMARY KEY, digest BLOB UNIQUE NOT NULL);
CREATE TABLE IF NOT EXISTS places(
  text INTEGER NOT NULL, session INTEGER NOT NULL, call INTEGER NOT NULL, kind TEXT NOT NULL,
  PRIMARY KEY (text, session, call, kind)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS places_by_session ON places(session);
CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5(text, tokenize = 'unicode61');
"""
_TERM = re.compile(r'"([^"]*)"|(\S+)')
_MOST_HITS = 5


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A search. All given conditions must hold."""

    words: str = ""
    """Words, and phrases in quotes; `word*` matches the beginning of a word. Empty matches all texts."""
    outcome: Outcome | None = None
    cause: str = ""
    """Code of the failure."""
    rule: Rule | None = None
    harness: str = ""
    version: int | None = None
    """Policy version that sampled at least one of the session's tokens."""
    task_id: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    limit: int = 50
    tenant: str | None = None


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """One matching text of a session."""

    call: int
    """Number of the call; -1 is the session's failure."""
    kind: str
    """`user`, `assistant`, `thinking`, `tool_call`, `tool_result`, `tool_error`, `failure`, or another role."""
    snippet: str
    """Text around the first matches, which are enclosed in the characters 2 and 3."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One session."""

    session_id: str
    task_id: str
    outcome: Outcome
    reward: float | None
    cause: str
    rules: tuple[Rule, ...]
    num_calls: int
    harness: str
    versions: tuple[int, ...]
    """Policy versions that sampled its tokens, oldest first."""
    hits: tuple[Hit, ...]
    """At most 5; empty if no words were given."""


_COLUMNS = Found.__struct_fields__[:-1]


class FindAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions, most recently indexed first."""

    sessions: tuple[Found, ...]
    has_more: bool
    num_indexed: int
    """Number of sessions searched."""
    num_waiting: int
    """Number of sessions not yet in the index, of all tenants; a tenant is told 1 or 0."""
    known: dict[str, tuple[str, ...]] = {}
    """`outcome`, `cause`, `harness` -> values in the index, sorted, at most 200 of each."""


def open_index(path: Path) -> sqlite3.Connection:
    """Open the index for its single writer. Creates it if it is missing, broken or of another version."""
    try:
        return _opened(path)
    except sqlite3.DatabaseError:
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return _opened(path)


def _opened(path: Path) -> sqlite3.Connection:
    index = sqlite3.connect(path, isolation_level=None)
    try:
        return _prepared(index)
    except sqlite3.DatabaseError:
        index.close()
        raise


def _prepared(index: sqlite3.Connection) -> sqlite3.Connection:
    index.execute("PRAGMA journal_mode = WAL")
    index.execute("PRAGMA synchronous = OFF")  # data lost in a power cut is rebuilt
    _check_version(index, (0, VERSION))
    index.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
    return index


def indexed_attempts(path: Path) -> dict[str, int]:
    """session id -> attempt, for all sessions in the index."""
    try:
        with closing(_reading(path)) as index:
            return dict(index.execute("SELECT session_id, attempt FROM sessions"))
    except sqlite3.DatabaseError:  # its writer rebuilds it
        return {}


def find(path: Path, wanted: Wanted, num_waiting: int) -> FindAnswer:
    """Blocking. Finds nothing while the index is being built."""
    try:
        with closing(_reading(path)) as index:
            mine = ("SELECT count(*) FROM sessions WHERE ? IN (tenant, '')", (wanted.tenant or "",))
            (num_indexed,) = index.execute(*mine).fetchone()
            found = list(_found(index, wanted))
            known = {name: _known(index, name, wanted.tenant) for name in ("outcome", "cause", "harness")}
    except sqlite3.DatabaseError:
        return FindAnswer(sessions=(), has_more=False, num_indexed=0, num_waiting=num_waiting)
    return FindAnswer(
        sessions=tuple(found[: wanted.limit]),
        has_more=len(found) > wanted.limit,
        num_indexed=num_indexed,
        num_waiting=num_waiting,
        known=known,
    )


def _known(index: sqlite3.Connection, column: str, tenant: str | None) -> tuple[str, ...]:
    where = f"{column} != '' AND ? IN (tenant, '')"
    query = f"SELECT DISTINCT {column} FROM sessions WHERE {where} ORDER BY 1 LIMIT 200"
    return tuple(value for (value,) in index.execute(query, (tenant or "",)))


def _reading(path: Path) -> sqlite3.Connection:
    """Raises: DatabaseError if there is no index of this version."""
    index = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
    try:
        _check_version(index, (VERSION,))
    except sqlite3.DatabaseError:
        index.close()
        raise
    return index


def _check_version(index: sqlite3.Connection, allowed: tuple[int, ...]) -> None:
    """Raises: DatabaseError."""
    (version,) = index.execute("PRAGMA user_version").fetchone()
    if version not in allowed:
        raise sqlite3.DatabaseError(f"the index has version {version}")


def _found(index: sqlite3.Connection, wanted: Wanted) -> Iterable[Found]:
    """Up to one session more than the limit."""
    conditions, values = _conditions(wanted)
    columns = ", ".join(f"s.{name}" for name in ("id", *_COLUMNS))
    terms = _terms(wanted.words)
    if not terms:
        rows = index.execute(
            f"SELECT {columns} FROM sessions s WHERE {conditions} ORDER BY s.id DESC LIMIT ?",
            (*values, wanted.limit + 1),
        )
        for row in rows:
            yield _session(row, ())
        return
    # In this order, so that rows are already sorted and only as many are read as needed.
    tables = "texts CROSS JOIN places p ON p.text = texts.rowid CROSS JOIN sessions s ON s.id = p.session"
    query = (
        f"SELECT {columns}, p.call, p.kind, texts.rowid FROM {tables} {_BY_WORDS} AND {conditions}"
        " ORDER BY texts.rowid DESC"
    )
    hits: dict[int, list[tuple[int, str, int]]] = {}
    sessions: dict[int, tuple[Any, ...]] = {}
    for row in index.execute(query, (terms, *values)):
        *session, call, kind, text = row
        if session[0] not in sessions and len(sessions) > wanted.limit:
            break
        sessions.setdefault(session[0], tuple(session))
        held = hits.setdefault(session[0], [])
        if len(held) < _MOST_HITS:
            held.append((call, kind, text))
    snippets = _Snippets(index, terms)
    for key, session in sessions.items():
        yield _session(session, tuple(snippets.hit(*hit) for hit in sorted(hits[key])))


_BY_WORDS = "WHERE texts MATCH ?"


class _Snippets:
    """Snippets of texts, each made once, because many sessions have the same prompt."""

    def __init__(self, index: sqlite3.Connection, terms: str) -> None:
        self._index = index
        self._terms = terms
        self._made: dict[int, str] = {}

    def hit(self, call: int, kind: str, text: int) -> Hit:
        if text not in self._made:
            query = f"SELECT snippet(texts, 0, ?, ?, ' ... ', 24) FROM texts {_BY_WORDS} AND rowid = ?"
            (self._made[text],) = self._index.execute(query, (*MARKS, self._terms, text)).fetchone()
        return Hit(call=call, kind=kind, snippet=self._made[text])


def _session(row: tuple[Any, ...], hits: tuple[Hit, ...]) -> Found:
    found: dict[str, Any] = dict(zip(_COLUMNS, row[1:], strict=True))
    found |= {"rules": tuple(found["rules"].split()), "versions": tuple(map(int, found["versions"].split()))}
    return Found(**found, hits=hits)


def _conditions(wanted: Wanted) -> tuple[str, list[object]]:
    given: list[tuple[str, object]] = [
        ("s.outcome = ?", wanted.outcome),
        ("s.cause = ?", wanted.cause or None),
        ("' ' || s.rules || ' ' LIKE ?", None if wanted.rule is None else f"% {wanted.rule} %"),
        ("s.harness = ?", wanted.harness or None),
        ("' ' || s.versions || ' ' LIKE ?", None if wanted.version is None else f"% {wanted.version} %"),
        ("s.task_id = ?", wanted.task_id or None),
        ("s.tenant = ?", wanted.tenant),
        ("s.reward >= ?", wanted.min_reward),
        ("s.reward <= ?", wanted.max_reward),
    ]
    held = [(condition, value) for condition, value in given if value is not None]
    return " AND ".join(["1", *(condition for condition, _ in held)]), [value for _, value in held]


def _terms(words: str) -> str:
    """The words as an FTS5 query, in which everything is quoted except the final `*` of a word."""
    terms: list[str] = []
    words = words.replace("\0", " ").encode("utf-8", "replace").decode()
    for phrase, word in _TERM.findall(words):
        text = phrase or word.replace('"', "")
        bare = text.removesuffix("*") if word else text
        if any(char.isalnum() for char in bare):
            terms.append(f'"{bare}"' + "*" * (bare != text))
    return " ".join(terms)
