"""The process that writes the index of Find: it receives results as stored, so the service does not decode them.

Run as `python -m gangline.server.web.indexing INDEX` it reads frames from stdin, and writes a line for each processed
frame:

    +  uint32, big-endian   MessagePack of [harness, tenant, `SessionResult`]
    -  uint32               id of a deleted session
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sqlite3
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import Message, Text, Thinking, ToolCall, ToolResult
from gangline.domain.session import SessionResult
from gangline.domain.tokens import decode_msgpack
from gangline.server.web.finding import Rule, open_index

log = logging.getLogger("gangline.server.web")

MAX_TEXT_CHARS = 100_000
"""Maximum indexed characters of a text."""
_REPEATED = 3
_FAILURE_CALL = -1
_PATCH = "patch.diff"
_NICE = 10

_GIT_HISTORY = re.compile(r"\bgit\s+(?:-\S+\s+)*(?:log|show|reflog|blame|whatchanged)\b")
_TEST_FILE = r"[\w./-]*(?:\btests?/|\btest_|_test\b)[\w./-]*"
_WRITING = r"(?:>>?|\btee\b|\bsed\s+-i\S*\b.*|\brm\b|\bmv\b|\bcp\b|\*\*\* (?:Update|Delete) File:)"
_TEST_EDITED = re.compile(rf"{_WRITING}\s*{_TEST_FILE}")
_EDITORS = ("edit", "write", "replace", "patch", "create")


def frame(kind: bytes, data: bytes) -> bytes:
    """kind: `+` or `-`."""
    return kind + len(data).to_bytes(4, "big") + data


def session_frame(harness: str, tenant: str, data: bytes) -> bytes:
    """data: MessagePack of a `SessionResult`, passed on unchanged."""
    return frame(b"+", msgspec.msgpack.encode((harness, tenant, msgspec.Raw(data))))


def add_session(index: sqlite3.Connection, result: SessionResult, harness: str, tenant: str) -> None:
    """Replaces the session's entry in the index. Raises: ValueError if the calls do not form a tree."""
    calls = list(CompletionTree(result.completions))
    spans = (span for call in calls for span in call.certificate.version_spans)
    versions = sorted({span.version for span in spans if span.end > span.start})
    index.execute("BEGIN")
    try:
        drop_session(index, result.session_id)
        row = index.execute(
            "INSERT INTO sessions(session_id, task_id, attempt, outcome, reward, cause, rules, num_calls, harness,"
            " versions, tenant) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(result.session_id, result.task_id, result.attempt, result.outcome, result.reward),
                "" if result.failure is None else result.failure.code,
                " ".join(sorted((*found_rules(calls), *(["empty_patch"] if _has_empty_patch(result) else [])))),
                len(calls),
                harness,
                " ".join(map(str, versions)),
                tenant,
            ),
        ).lastrowid
        for call, kind, text in _texts(result, calls):
            places = (_text_id(index, text), row, call, kind)
            index.execute("INSERT OR IGNORE INTO places(text, session, call, kind) VALUES (?, ?, ?, ?)", places)
    except BaseException:
        index.execute("ROLLBACK")
        raise
    index.execute("COMMIT")


def drop_session(index: sqlite3.Connection, session_id: str) -> None:
    """Remove a session. Texts that other sessions have too stay."""
    row = index.execute("SELECT id FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    if row is None:
        return
    texts = index.execute("SELECT DISTINCT text FROM places WHERE session = ?", row).fetchall()
    index.execute("DELETE FROM places WHERE session = ?", row)
    index.execute("DELETE FROM sessions WHERE id = ?", row)
    for text in texts:
        if index.execute("SELECT 1 FROM places WHERE text = ? LIMIT 1", text).fetchone() is None:
            index.execute("DELETE FROM texts WHERE rowid = ?", text)
            index.execute("DELETE FROM digests WHERE id = ?", text)


def found_rules(calls: Iterable[Completion]) -> list[Rule]:
    """Possible explanations of a failure. Each is only a hint, because rules match text without understanding it."""
    found: set[Rule] = set()
    last, num_same = "", 0
    for call in calls:
        if call.certificate.finish_reason == "length":
            found.add("cut_at_length")
        for part in (part for message in call.new_messages for part in message.parts):
            if isinstance(part, ToolResult) and part.is_error:
                found.add("tool_error")
        actions = [part for part in call.response.parts if isinstance(part, ToolCall)]
        done = " ".join(f"{action.name} {action.arguments}" for action in actions)
        num_same = num_same + 1 if done and done == last else 1
        last = done
        if num_same >= _REPEATED:
            found.add("repeated_action")
        if _GIT_HISTORY.search(done):
            found.add("git_history")
        if any(_edits_test(action) for action in actions):
            found.add("test_edited")
    return sorted(found)


def _has_empty_patch(result: SessionResult) -> bool:
    """Whether the evaluator kept the agent's patch and it is empty."""
    patches = [content for name, content in result.artifacts.items() if name.endswith(_PATCH)]
    return bool(patches) and not any(map(bytes.strip, patches))


def _edits_test(action: ToolCall) -> bool:
    arguments = action.arguments.replace("\\n", "\n")
    is_editor = any(word in action.name.lower() for word in _EDITORS)
    return bool(re.search(_TEST_FILE, arguments) if is_editor else _TEST_EDITED.search(arguments))


def _texts(result: SessionResult, calls: Iterable[Completion]) -> Iterable[tuple[int, str, str]]:
    """(call, kind, text)"""
    if result.failure is not None:
        yield _FAILURE_CALL, "failure", f"{result.failure.code} {result.failure.message}"
    for number, call in enumerate(calls):
        for message in (*call.new_messages, call.response):
            for kind, text in _pieces(message):
                if text.strip():
                    yield number, kind, text[:MAX_TEXT_CHARS]


def _pieces(message: Message) -> Iterable[tuple[str, str]]:
    for part in message.parts:
        match part:
            case Text():
                yield message.role, part.text
            case Thinking():
                yield "thinking", part.text
            case ToolCall():
                yield "tool_call", f"{part.name} {part.arguments}"
            case ToolResult():
                text = "\n".join(piece.text for piece in part.content if isinstance(piece, Text))
                yield "tool_error" if part.is_error else "tool_result", text
            case _:
                pass


def _text_id(index: sqlite3.Connection, text: str) -> int:
    data = text.encode("utf-8", "replace")
    digest = hashlib.sha256(data).digest()[:16]
    row = index.execute("SELECT id FROM digests WHERE digest = ?", (digest,)).fetchone()
    if row is None:
        new = index.execute("INSERT INTO digests(digest) VALUES (?)", (digest,)).lastrowid
        index.execute("INSERT INTO texts(rowid, text) VALUES (?, ?)", (new, data.decode()))
        return int(new or 0)
    return int(row[0])


def _main(path: Path, frames: BinaryIO) -> None:
    os.nice(_NICE)
    index = open_index(path)
    while len(head := frames.read(5)) == 5:
        data = frames.read(int.from_bytes(head[1:], "big"))
        try:
            if head[:1] == b"+":
                harness, tenant, result = decode_msgpack(data, tuple[str, str, SessionResult])
                add_session(index, result, harness, tenant)
            else:
                drop_session(index, data.decode())
        except ValueError as error:  # written by another version, or damaged; msgspec's errors are ValueErrors
            log.warning("index.passed_over message=%.200s", error)
        print(flush=True)
    index.close()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.stdin.buffer)
