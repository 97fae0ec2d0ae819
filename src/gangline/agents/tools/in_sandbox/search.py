"""Searches files, with ripgrep if the sandbox has it, else in Python.

Both include hidden and Git-ignored files, and skip version control folders, links and binary files.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import signal
import subprocess
from typing import Any, Generator, Iterator

from .refusal import Refused

_SKIPPED = (".git", ".hg", ".svn")
_MAX_FILE_BYTES = 16 << 20
_MAX_TEXT = 500
"""Maximum characters of a returned line."""


def search(order: dict[str, Any]) -> dict[str, Any]:
    """`pattern`, `is_regex`, `path`, `glob` (None: all files), `max_matches`."""
    path = order["path"]
    if not os.path.exists(path):
        raise Refused("not_found", f"{path} does not exist in {os.getcwd()}")
    if "\n" in order["pattern"]:
        raise Refused("bad_pattern", "the pattern has a line break: lines are searched one by one")
    ripgrep = shutil.which("rg")
    found = _here(order) if ripgrep is None else _by_ripgrep(ripgrep, order)
    matches: list[dict[str, Any]] = []
    try:
        for name, line, text in found:
            if len(matches) == order["max_matches"]:
                return {"matches": matches, "is_whole": False}
            shown = os.fsencode(name).decode(errors="replace")
            matches.append({"path": shown, "line": line, "text": text[:_MAX_TEXT]})
    finally:
        found.close()
    return {"matches": matches, "is_whole": True}


def _here(order: dict[str, Any]) -> Generator[tuple[str, int, str], None, None]:
    try:
        pattern = re.compile(order["pattern"] if order["is_regex"] else re.escape(order["pattern"]))
    except re.error as error:
        raise Refused("bad_pattern", f"the pattern cannot be read: {error}") from None
    for name in _files(order["path"]):
        if order["glob"] is not None and not _fits(name, order["path"], order["glob"]):
            continue
        for number, line in enumerate(_lines(name), 1):
            if pattern.search(line):
                yield name, number, line


def _files(path: str) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in sorted(names):
            yield os.path.join(folder, name)


def _fits(name: str, root: str, glob: str) -> bool:
    """A glob without a slash matches names in any folder, as in ripgrep."""
    relative = os.path.relpath(name, root)
    return fnmatch.fnmatch(relative if "/" in glob else os.path.basename(name), glob)


def _lines(name: str) -> list[str]:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # a link, gone, or unreadable
        return []
    with os.fdopen(fd, "rb") as file:
        if not os.path.isfile(f"/proc/self/fd/{fd}"):
            return []
        data = file.read(_MAX_FILE_BYTES)
    if b"\0" in data:
        return []
    lines = data.decode(errors="replace").split("\n")
    return [line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def _by_ripgrep(program: str, order: dict[str, Any]) -> Generator[tuple[str, int, str], None, None]:
    argv = [program, "--no-config", "--null", "--line-number", "--no-heading", "--with-filename", "--color=never"]
    argv += ["--hidden", "--no-ignore", "--no-messages", "--sort=path", f"--max-filesize={_MAX_FILE_BYTES}"]
    argv += [option for name in _SKIPPED for option in ("--glob", f"!{name}")]
    argv += [] if order["glob"] is None else ["--glob", order["glob"]]
    argv += [] if order["is_regex"] else ["--fixed-strings"]
    process = subprocess.Popen(
        [*argv, "--regexp", order["pattern"], "--", order["path"]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        try:
            for line in process.stdout:
                name, _, rest = line.partition(b"\0")
                number, _, text = rest.partition(b":")
                yield os.fsdecode(name), int(number), text.decode(errors="replace").rstrip("\r\n")
            error = process.stderr.read(1000).decode(errors="replace")
        finally:
            process.send_signal(signal.SIGKILL)
    if process.returncode == 2 and error:
        raise Refused("bad_pattern", f"the pattern cannot be read: {error.strip()}")
