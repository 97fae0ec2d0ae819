"""Parses patches written by git or stored in datasets: finds their files, and restores a lost end.

Git quotes names with characters beyond ASCII, quotes, backslashes or control characters (`"a/test_\\303\\251.py"`), and
marks the end of a name with spaces by a tab. Lines of a hunk are counted, so that `--- a/x` inside a hunk does not
count as a file name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

_HUNK = re.compile(r"@@ -\d{1,9}(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_ESCAPES = {b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r"}
_SIDES = {
    "--- ": "before",
    "rename from ": "before",
    "copy from ": "before",
    "+++ ": "after",
    "rename to ": "after",
    "copy to ": "after",
}
_BINARY = "GIT binary patch"


class PatchedFile(NamedTuple):
    """A file that a patch changes, creates, moves or removes. Names are relative to the repository's top."""

    before: str | None
    """None: the patch creates it, possibly as a copy of another file."""
    after: str | None
    """None: the patch removes it."""
    has_content: bool = True
    """False: the patch creates it empty."""


@dataclass
class _Part:
    """The part of a patch about one file."""

    head: list[str] = field(default_factory=list[str])
    """Its lines outside hunks."""
    missing_old: int = 0
    """Lines announced by its last hunk but missing."""
    missing_new: int = 0

    def take(self, line: str) -> None:
        if (self.missing_old > 0 or self.missing_new > 0) and line[:1] in ("", " ", "-", "+", "\\"):
            self.missing_old -= line[:1] in ("", " ", "-")
            self.missing_new -= line[:1] in ("", " ", "+")
        elif found := _HUNK.match(line):
            self.missing_old, self.missing_new = int(found[1] or 1), int(found[2] or 1)
        else:
            self.head.append(line)


def files_of(patch: str) -> list[PatchedFile]:
    """In the order of the patch. Names that are not UTF-8 contain lone surrogates."""
    return [_file(part.head) for part in _parts(patch)]


def names_of(patch: str) -> list[str]:
    """Names of all its files, before and after, sorted."""
    return sorted({name for file in files_of(patch) for name in (file.before, file.after) if name is not None})


def completed(patch: str) -> str:
    """Restores the parts of a patch that datasets lose by stripping its text or converting line ends to CRLF.

    These are the last line feed, empty context lines at the end, and the end of binary data.
    """
    if (ended := patch.split("\n")[:-1]) and all(line.endswith("\r") for line in ended):
        patch = patch.replace("\r\n", "\n").removesuffix("\r")
    if not (parts := _parts(patch)):
        return patch
    whole, last = patch if patch.endswith("\n") else f"{patch}\n", parts[-1]
    if _BINARY in last.head and not whole.endswith("\n\n"):
        return f"{whole}\n"
    return whole + " \n" * last.missing_old if last.missing_old == last.missing_new else whole


def _parts(patch: str) -> list[_Part]:
    parts: list[_Part] = []
    lines = patch.removesuffix("\n").split("\n")
    for line in lines:
        is_within = bool(parts) and (parts[-1].missing_old > 0 or parts[-1].missing_new > 0)
        is_plain = line.startswith("--- ") and (not parts or any(one.startswith("+++ ") for one in parts[-1].head))
        if not is_within and (line.startswith("diff --git ") or is_plain):
            parts.append(_Part())
        if parts:
            parts[-1].take(line)
    return parts


def _file(head: list[str]) -> PatchedFile:
    lines = [line.removesuffix("\r") for line in head]
    is_new, is_gone = (any(line.startswith(word) for line in lines) for word in ("new file mode", "deleted file mode"))
    found = {word: rest for line in lines for word in _SIDES if (rest := line.removeprefix(word)) != line}
    if not found:
        name = _name_of_both(lines[0].removeprefix("diff --git "))
        has_content = not is_new or any(line.startswith(("Binary files", _BINARY)) for line in lines)
        return PatchedFile(None if is_new else name, None if is_gone else name, has_content)
    names = {_SIDES[word]: _name(rest, is_prefixed=len(word) == 4) for word, rest in found.items()}
    if "copy from " in found:
        names["before"] = None
    return PatchedFile(names.get("before"), names.get("after"))


def _name(text: str, *, is_prefixed: bool) -> str | None:
    name = _unquoted(found[1]) if (found := _QUOTED.match(text)) else text.split("\t")[0]
    if name == "/dev/null":
        return None
    return (name.partition("/")[2] or name) if is_prefixed else name


def _name_of_both(text: str) -> str | None:
    """The name in `a/NAME b/NAME`, which is the same on both sides."""
    first = text if text.startswith('"') else text[: (len(text) - 1) // 2]
    return _name(first, is_prefixed=True)


def _unquoted(text: str) -> str:
    raw = text.encode(errors="surrogateescape")
    return _ESCAPED.sub(_character, raw).decode(errors="surrogateescape")


def _character(found: re.Match[bytes]) -> bytes:
    code = found[1]
    return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else _ESCAPES.get(code, code)
