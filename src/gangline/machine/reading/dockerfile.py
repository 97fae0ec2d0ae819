"""Reads the facts of a Dockerfile that a runtime needs, and whether a runtime without the image can satisfy them.

Images are not built here. Without an image, a working folder, variables and copied files can be provided anywhere, but
programs installed by `RUN` cannot.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from pathlib import PurePosixPath

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.documents import MAX_DOCUMENT_BYTES
from gangline.machine.reading.files import read_text
from gangline.machine.reading.paths import SourcePath

_HARMLESS = {"LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL", "CMD"}
"""Instructions that do not matter for a runtime that runs its own commands."""


class Copy(msgspec.Struct, frozen=True):
    source: SourcePath
    """A file or folder of the build context."""
    target: str
    """Absolute path inside the runtime."""
    into: bool
    """Whether `target` is a folder that receives the file."""


class Dockerfile(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a Dockerfile that can be read without building it."""

    path: SourcePath
    base: str
    workdir: str | None
    env: dict[str, str]
    copies: tuple[Copy, ...]
    needs_image: str | None
    """The first instruction that only a built image can satisfy; None if any Linux can."""


def read_dockerfile(path: SourcePath) -> Dockerfile:
    """Raises: InvalidRequest if it cannot be read."""
    base, workdir, needs_image = "scratch", None, None
    env: dict[str, str] = {}
    copies: list[Copy] = []
    num_stages = 0
    for number, name, rest in _instructions(read_text(path, MAX_DOCUMENT_BYTES)):
        obstacle = f"line {number}: {name} {rest}"[:120]
        if name == "FROM":
            num_stages += 1
            base = rest.split()[0] if rest else base
            if num_stages == 1 and "$" not in base:
                continue
        elif name == "WORKDIR" and "$" not in rest:
            workdir = _inside(workdir or "/", _unquoted(rest))
            continue
        elif name == "ENV" and "$" not in rest and (pairs := _pairs(rest)):
            env |= pairs
            continue
        elif name == "COPY" and (found := _copies(path.parent, rest, workdir or "/")):
            copies += found
            continue
        elif name in _HARMLESS:
            continue
        needs_image = needs_image or obstacle
    return Dockerfile(path=path, base=base, workdir=workdir, env=env, copies=tuple(copies), needs_image=needs_image)


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """(line, name, rest) of each instruction, with continued lines joined. A heredoc yields instructions with unknown
    names.
    """
    found: list[tuple[int, str, str]] = []
    pending: list[str] = []
    began = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not pending):
            continue
        began = began if pending else number
        pending.append(line.rstrip())
        if pending[-1].endswith("\\"):
            pending[-1] = pending[-1][:-1]
            continue
        name, _, rest = "".join(pending).strip().partition(" ")
        pending.clear()
        found.append((began, name.upper(), rest.strip()))
    return found


def _inside(workdir: str, path: str) -> str:
    """An absolute path without `..`; nothing is above the root."""
    return posixpath.normpath(PurePosixPath(workdir) / path)


def _unquoted(rest: str) -> str:
    words = _words(rest)
    return words[0] if len(words) == 1 else rest


def _words(rest: str) -> list[str]:
    try:
        return shlex.split(rest)
    except ValueError:
        return []


def _pairs(rest: str) -> dict[str, str]:
    words = _words(rest)
    if words and all(re.match(r"[A-Za-z_]\w*=", word) for word in words):
        return dict(word.split("=", 1) for word in words)
    name, _, value = rest.partition(" ")
    return {name: value.strip()} if value.strip() and "=" not in name else {}


def _copies(context: SourcePath, rest: str, workdir: str) -> list[Copy]:
    """Empty if it copies anything other than plain files and folders of the context."""
    words = _words(rest)
    if len(words) < 2 or "$" in rest or rest.startswith(("--", "[")) or (context / ".dockerignore").is_there():
        return []
    *sources, target = words
    try:
        found = [context / source.lstrip("/") for source in sources]
    except InvalidRequest:
        return []  # docker build refuses it too
    if not all(path.is_there() for path in found) or (len(found) > 1 and not target.endswith("/")):
        return []
    into = target.endswith(("/", "/.")) or target == "."
    return [Copy(path, _inside(workdir, target), into) for path in found]
