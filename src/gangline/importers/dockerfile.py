"""The facts in a Dockerfile that a runtime needs, and whether a runtime without that image can satisfy them.

No image is built here. Without one, a working folder, variables and copied files can be had anywhere; programs that
`RUN` installs cannot.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path, PurePosixPath

import msgspec

from gangline.importers.files import read_text

__all__ = ["Copy", "Dockerfile", "read_dockerfile"]

_HARMLESS = {"LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL", "CMD"}
"""Instructions without meaning for a runtime that runs its own commands."""


class Copy(msgspec.Struct, frozen=True):
    source: Path
    """A file or folder of the build context."""
    target: str
    """Absolute, inside."""
    into: bool
    """Whether `target` is a folder that the file goes into."""


class Dockerfile(msgspec.Struct, frozen=True, kw_only=True):
    """As far as it can be read without building it."""

    path: Path
    base: str
    workdir: str | None
    env: dict[str, str]
    copies: tuple[Copy, ...]
    needs_image: str | None
    """The first instruction that only a built image can satisfy; None: any Linux can."""


def read_dockerfile(path: Path) -> Dockerfile:
    """Raises: InvalidRequest when it cannot be read."""
    base, workdir, needs_image = "scratch", None, None
    env: dict[str, str] = {}
    copies: list[Copy] = []
    num_stages = 0
    for number, name, rest in _instructions(read_text(path)):
        obstacle = f"line {number}: {name} {rest}"[:120]
        if name == "FROM":
            num_stages += 1
            base = rest.split()[0] if rest else base
            if num_stages == 1 and "$" not in base:
                continue
        elif name == "WORKDIR" and "$" not in rest:
            workdir = str(PurePosixPath(workdir or "/") / _unquoted(rest))
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
    """(line, name, rest) of each, continued lines joined. A heredoc is returned as instructions of no known name."""
    found: list[tuple[int, str, str]] = []
    pending, began = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not pending):
            continue
        began = began if pending else number
        whole = pending + line.rstrip()
        if whole.endswith("\\"):
            pending = whole[:-1]
            continue
        pending = ""
        name, _, rest = whole.strip().partition(" ")
        found.append((began, name.upper(), rest.strip()))
    return found


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


def _copies(context: Path, rest: str, workdir: str) -> list[Copy]:
    """Empty where it is more than plain files and folders of the context."""
    words = _words(rest)
    if len(words) < 2 or "$" in rest or rest.startswith(("--", "[")) or (context / ".dockerignore").exists():
        return []
    *sources, target = words
    found = [context / source.lstrip("/") for source in sources]
    inside = all(path.resolve().is_relative_to(context.resolve()) and path.exists() for path in found)
    if not inside or (len(found) > 1 and not target.endswith("/")):
        return []
    into = target.endswith(("/", "/.")) or target == "."
    return [Copy(path, str(PurePosixPath(workdir) / target), into) for path in found]
