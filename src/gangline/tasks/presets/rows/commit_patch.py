"""Reads the patch of a commit in R2E-Gym's form: `parsed_commit_content`, JSON of its `ParsedCommit`.

Source: R2E-Gym 69bc953, `commit_models/diff_classes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_MARKS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}
_TEST_FOLDERS = {"tests", "Tests", "test", "Test"}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Range(_Part):
    start: int
    length: int | None = None

    def __str__(self) -> str:
        return str(self.start) if self.length is None else f"{self.start},{self.length}"


class _Descriptor(_Part):
    old_range: _Range
    new_range: _Range
    section: str = ""


class _Line(_Part):
    content: str
    type: Literal["context", "added", "deleted", "note"]


class _Lines(_Part):
    all_lines: tuple[_Line, ...] = ()


class _Hunk(_Part):
    descriptor: _Descriptor
    line_group: _Lines

    def lines(self) -> Iterator[str]:
        about = self.descriptor
        yield f"@@ -{about.old_range} +{about.new_range} @@ {about.section}".rstrip()
        for line in self.line_group.all_lines:
            yield f"{_MARKS[line.type]}{line.content}"


class _File(_Part):
    path: str


class _Header(_Part):
    file: _File
    misc_line: str | None = None
    """For example `new file mode 100644`."""


class _FileDiff(_Part):
    header: _Header
    minus_file: _File | None = None
    plus_file: _File | None = None
    hunks: tuple[_Hunk, ...] = ()

    def is_source(self) -> bool:
        *folders, name = self.header.file.path.split("/")
        is_test = name.startswith("test_") or name.endswith("_test.py") or _TEST_FOLDERS & set(folders)
        return name.endswith(".py") and not is_test

    def lines(self) -> Iterator[str]:
        path = self.header.file.path
        yield f"diff --git a/{path} b/{path}"
        if self.header.misc_line:
            yield self.header.misc_line
        if self.minus_file is not None and self.plus_file is not None:
            yield f"--- {self.minus_file.path}"
            yield f"+++ {self.plus_file.path}"
        for hunk in self.hunks:
            yield from hunk.lines()


class _Commit(_Part):
    file_diffs: tuple[_FileDiff, ...] = Field(default=())


def patch_of_commit(commit: Any) -> str:
    """The changes of Python files except tests: R2E-Gym's images already contain the fix's tests.

    Raises: pydantic's ValidationError.
    """
    files = (file for file in _Commit.model_validate(commit).file_diffs if file.is_source())
    lines = [line for file in files for line in file.lines()]
    return "\n".join([*lines, ""]) if lines else ""
