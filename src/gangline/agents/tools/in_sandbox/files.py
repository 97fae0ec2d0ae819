"""The files tool: view, write, replace, insert, undo, tree and search, as the user who runs the server.

Files are read and written as a whole, in their own encoding and with their own line ends. A write creates a temporary
file in the same folder and renames it, so a reader sees either the old or the new content. Links are followed.
"""

from __future__ import annotations

import codecs
import os
import stat

from .refusal import Refused

TYPE_CHECKING = False  # `typing` takes as long to import as all the rest: see `gangline.agents.tools.in_sandbox`
if TYPE_CHECKING:
    from typing import Any

_MAX_FILE_BYTES = 16 << 20
_MAX_UNDOS = 20
_MAX_UNDO_BYTES = 64 << 20
_MAX_LINE_NUMBERS = 20
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


class Files:
    """Runs one action at a time, and remembers previous contents for undo."""

    def __init__(self) -> None:
        self._undos: list[tuple[str, bytes | None, bytes]] = []
        """Path, content before (None: the file did not exist) and content after, oldest first."""

    def act(self, order: dict[str, Any]) -> dict[str, Any]:
        """Raises: Refused, OSError."""
        actions = {
            "view": self._view,
            "write": self._write,
            "replace": self._replace,
            "insert": self._insert,
            "undo": self._undo,
            "tree": tree,
            "search": _search,
        }
        return actions[order["act"]](order)

    def _view(self, order: dict[str, Any]) -> dict[str, Any]:
        """`path`, `first_line`, `last_line` (None: to the end), `max_bytes`. Lines are numbered from 1."""
        text = _Text(_read(order["path"]), order["path"])
        lines = text.plain.split("\n")
        if lines[-1] == "":
            lines.pop()
        first = order["first_line"]
        last = len(lines) if order["last_line"] is None else min(order["last_line"], len(lines))
        if first > max(len(lines), 1):
            raise Refused("no_such_line", f"{order['path']} has {len(lines)} lines")
        taken: list[str] = []
        room = order["max_bytes"]
        for line in lines[first - 1 : last]:
            room -= len(line.encode("utf-8", "surrogatepass")) + 1
            if room < 0 and taken:
                break
            taken.append(line if room >= 0 else _front(line, order["max_bytes"]))
        return {
            "lines": taken,
            "first_line": first,
            "num_lines": len(lines),
            "is_whole": len(taken) == len(lines) and room >= 0,
        }

    def _write(self, order: dict[str, Any]) -> dict[str, Any]:
        """`path`, `text`."""
        path = order["path"]
        real = os.path.realpath(path)
        before = _read(path) if os.path.lexists(real) else None
        if before is None:
            os.makedirs(os.path.dirname(real), exist_ok=True)
        return self._put(real, before, order["text"].encode("utf-8", "surrogateescape"))

    def _replace(self, order: dict[str, Any]) -> dict[str, Any]:
        """`path`, `old`, `new`."""
        path, old = order["path"], order["old"]
        before = _read(path)
        text = _Text(before, path)
        if not old:
            raise Refused("no_match", "the text to replace is empty")
        position = text.plain.find(old)
        if position < 0:
            raise Refused("no_match", f"the text to replace is not in {path}: view the file and copy it exactly")
        if text.plain.find(old, position + 1) >= 0:
            count, lines = _places(text.plain, old)
            raise Refused(
                "many_matches",
                f"the text to replace is {count} times in {path}, on lines {lines}: add lines around it until it is"
                " unique",
            )
        result = text.plain[:position] + order["new"] + text.plain[position + len(old) :]
        answer = self._put(os.path.realpath(path), before, text.encoded(result))
        return {**answer, "line": text.plain.count("\n", 0, position) + 1}

    def _insert(self, order: dict[str, Any]) -> dict[str, Any]:
        """`path`, `after_line` (0: at the beginning), `text`, which gets a line end if it has none."""
        path, after = order["path"], order["after_line"]
        before = _read(path)
        text = _Text(before, path)
        lines = [line + "\n" for line in text.plain.split("\n")]
        lines[-1] = lines[-1][:-1]
        if lines[-1] == "":
            lines.pop()
        if after > len(lines):
            raise Refused("no_such_line", f"{path} has {len(lines)} lines")
        if after and not lines[after - 1].endswith("\n"):
            lines[after - 1] += "\n"
        added = order["text"] if order["text"].endswith("\n") else order["text"] + "\n"
        lines.insert(after, added)
        return self._put(os.path.realpath(path), before, text.encoded("".join(lines)))

    def _undo(self, order: dict[str, Any]) -> dict[str, Any]:
        """`path`: undo this tool's last change to it."""
        real = os.path.realpath(order["path"])
        place = next((n for n in reversed(range(len(self._undos))) if self._undos[n][0] == real), None)
        if place is None:
            raise Refused("nothing_to_undo", f"no change of {order['path']} is remembered")
        _path, before, after = self._undos[place]
        if not os.path.exists(real) or _read(real) != after:
            raise Refused("changed", f"{order['path']} has been changed since by something else: nothing was undone")
        if before is None:
            os.unlink(real)
        else:
            _replace_whole(real, before)
        del self._undos[place]
        return {"num_bytes": None if before is None else len(before), "is_new": False}

    def _put(self, real: str, before: bytes | None, after: bytes) -> dict[str, Any]:
        if len(after) > _MAX_FILE_BYTES:
            raise Refused("too_large", f"{real} would have {len(after)} bytes, above {_MAX_FILE_BYTES}")
        _replace_whole(real, after)
        self._undos.append((real, before, after))
        own = [n for n, undo in enumerate(self._undos) if undo[0] == real]
        if len(own) > _MAX_UNDOS:
            del self._undos[own[0]]
        while sum(len(b or b"") + len(a) for _, b, a in self._undos) > _MAX_UNDO_BYTES:
            del self._undos[0]
        return {"num_bytes": len(after), "is_new": before is None}


def _search(order: dict[str, Any]) -> dict[str, Any]:
    from .search import search  # only here: it takes 5 ms to import, and most sessions never need it

    return search(order)


class _Text:
    """A file's content as text with plain line ends, and its conversion back."""

    def __init__(self, data: bytes, path: str) -> None:
        """Raises: Refused if it is not text."""
        self._encoding = next((name for bom, name in _BOMS if data.startswith(bom)), "utf-8")
        if self._encoding == "utf-8" and b"\0" in data:
            raise Refused("binary", f"{path} is a binary file: it has NUL bytes")
        try:
            text = data.decode(self._encoding)
        except UnicodeDecodeError:
            if self._encoding != "utf-8":
                raise Refused("binary", f"{path} is not text in {self._encoding}") from None
            self._encoding = "latin-1"
            text = data.decode(self._encoding)
        num_ends = text.count("\n")
        self._is_crlf = num_ends > 0 and text.count("\r\n") == num_ends
        self.plain = text.replace("\r\n", "\n") if self._is_crlf else text

    def encoded(self, plain: str) -> bytes:
        text = plain.replace("\n", "\r\n") if self._is_crlf else plain
        try:
            return text.encode(self._encoding)
        except UnicodeEncodeError:
            if self._encoding == "latin-1":
                raise Refused(
                    "encoding", "the file is neither UTF-8 nor able to hold these characters: write it anew as UTF-8"
                ) from None
            raise


def _read(path: str) -> bytes:
    """A regular file's content. Raises: Refused."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Refused("not_found", f"{path} does not exist in {os.getcwd()}") from None
    except (PermissionError, NotADirectoryError, OSError) as error:
        raise Refused("failed", f"{path} cannot be opened: {error.strerror}") from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        if stat.S_ISDIR(found.st_mode):
            raise Refused("is_folder", f"{path} is a folder")
        raise Refused("not_a_file", f"{path} is not a regular file")
    with os.fdopen(fd, "rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise Refused("too_large", f"{path} has more than {_MAX_FILE_BYTES} bytes: use the shell")
    return data


def _replace_whole(real: str, data: bytes) -> None:
    """Write a temporary file next to `real`, with its mode, and rename it. Raises: Refused."""
    folder, name = os.path.split(real)
    if os.path.isdir(real):
        raise Refused("is_folder", f"{real} is a folder")
    beside = os.path.join(folder, f".{name[:200]}.{os.getpid()}.new")
    try:
        mode = stat.S_IMODE(os.stat(real).st_mode) if os.path.exists(real) else None
        if mode is not None and not os.access(real, os.W_OK):
            raise PermissionError(13, "Permission denied", real)
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise Refused("failed", f"{real} cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(fd, "wb") as file:
            if mode is not None:
                os.fchmod(fd, mode)
            file.write(data)
        os.rename(beside, real)
    except OSError as error:
        os.unlink(beside)
        raise Refused("failed", f"{real} cannot be written: {error.strerror}") from None


def _places(text: str, part: str) -> tuple[int, str]:
    """The number of (possibly overlapping) occurrences of `part`, and the first lines on which one begins."""
    numbers: list[str] = []
    count, line, seen = 0, 1, 0
    position = text.find(part)
    while position >= 0:
        count += 1
        line += text.count("\n", seen, position)
        seen = position
        if len(numbers) <= _MAX_LINE_NUMBERS:
            numbers.append(str(line) if len(numbers) < _MAX_LINE_NUMBERS else "...")
        position = text.find(part, position + 1)
    return count, ", ".join(numbers)


def _front(line: str, max_bytes: int) -> str:
    return line.encode("utf-8", "surrogatepass")[:max_bytes].decode("utf-8", "ignore")


def tree(order: dict[str, Any]) -> dict[str, Any]:
    """`path`, `max_depth`, `max_entries`: a folder's entries, nearest first; version control folders are not
    entered.
    """
    path = order["path"]
    if not os.path.isdir(path):
        raise Refused("not_found", f"{path} is not a folder in {os.getcwd()}")
    entries: list[dict[str, Any]] = []
    level = [("", path)]
    for _ in range(order["max_depth"]):
        below: list[tuple[str, str]] = []
        for shown, folder in level:
            try:
                found = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:  # unreadable or gone
                continue
            for entry in found:
                if len(entries) == order["max_entries"]:
                    return {"entries": entries, "is_whole": False}
                name = os.path.join(shown, entry.name)
                entries.append(_entry(name, entry))
                if entry.is_dir(follow_symlinks=False) and entry.name not in (".git", ".hg", ".svn"):
                    below.append((name, entry.path))
        level = below
    return {"entries": entries, "is_whole": True}


def _entry(name: str, entry: os.DirEntry[str]) -> dict[str, Any]:
    kind = "other"
    if entry.is_symlink():
        kind = "link"
    elif entry.is_dir(follow_symlinks=False):
        kind = "folder"
    elif entry.is_file(follow_symlinks=False):
        kind = "file"
    size = entry.stat(follow_symlinks=False).st_size if kind == "file" else None
    return {"path": os.fsencode(name).decode(errors="replace"), "kind": kind, "num_bytes": size}
