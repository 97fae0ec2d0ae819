"""Takes an agent's changes in a repository as one patch, whatever it did to `.git`, its HOME or git's settings.

Nothing in the agent's `.git` is read. In the agent's runtime, a separate index and object store, in a folder cleared
from outside, record the files of its working tree. The new objects go to the clean runtime, whose untouched repository
has all other objects and makes the patch. So the agent's settings, hooks, filters, attributes, index flags and objects
have no effect, and none of its commands run.

The patch contains the files that `git add -A` adds. Files ignored by `.gitignore` files of the working tree, or by the
clean repository's own `info/exclude`, are left out unless the base commit has them. So are submodules and repositories
in folders of the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from gangline.domain.errors import CallerError, EvaluatorError
from gangline.domain.sandbox import ExecResult, Sandbox

_GIT_TIMEOUT_S = 300.0
_MAX_LISTING_BYTES = 256 << 20
_MAX_OBJECTS_BYTES = 256 << 20
_MAX_SHOWN_CHARS = 2_000
_FOLDER = ".gangline-patch"
_SETTINGS = {
    "safe.directory": "*",  # the image's repository often belongs to another user
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
}
GIT_ENV = {
    "GIT_CONFIG_COUNT": str(len(_SETTINGS)),
    **{f"GIT_CONFIG_KEY_{at}": name for at, name in enumerate(_SETTINGS)},
    **{f"GIT_CONFIG_VALUE_{at}": value for at, value in enumerate(_SETTINGS.values())},
    "GIT_TERMINAL_PROMPT": "0",
}
NO_CONFIG = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}

_BASE = """
git rev-parse HEAD && prefix=$(git rev-parse --show-prefix) && printf '%s\\n' "$prefix" &&
exclude=$(git rev-parse --git-path info/exclude) && { [ ! -f "$exclude" ] || cat -- "$exclude"; }
"""
_TAKE = """
cd -- "$1" && git init -q --template= && printf %s "$2" > "$GIT_DIR/info/exclude" &&
git update-index -z --index-info || exit
git update-index -q --refresh > "$GIT_DIR/refreshed" 2>&1
git add -A --ignore-errors -- . 2> "$GIT_DIR/left_out" || cat "$GIT_DIR/left_out" >&2
tree=$(git write-tree --missing-ok) && printf '%s\\n' "$tree" &&
git cat-file --batch-all-objects --batch-check='%(objectname)' > "$GIT_DIR/new" &&
git pack-objects -q --stdout < "$GIT_DIR/new"
"""
"""An index with the base commit's files but without their modification times, so that every file is read. The refresh
avoids storing unchanged files.
"""
_DIFF = "git diff-tree -p --binary -M --no-color --no-ext-diff --no-textconv --ignore-submodules=all"


class Base(NamedTuple):
    """The agent's starting point, from the clean runtime's repository."""

    commit: str
    prefix: str
    """Path from the repository's top to `repo_dir`: empty, or ending with a slash."""
    exclude: str
    """Content of `info/exclude`."""


class Patch(NamedTuple):
    data: bytes
    is_whole: bool
    """False if its end is cut off."""
    left_out: str
    """Git's message about unreadable files."""


async def base_of(clean: Sandbox, repo_dir: str) -> Base:
    """Raises: EvaluatorError if there is no repository."""
    result = await run(clean, ["sh", "-c", _BASE], cwd=repo_dir)
    if not result.ok:
        folder = PurePosixPath(clean.workdir) / repo_dir
        raise EvaluatorError(f"the clean runtime has no repository in {folder}: {said(result)}")
    commit, prefix, exclude = result.stdout.decode(errors="replace").split("\n", 2)
    return Base(commit, prefix, exclude)


async def take_patch(runtime: Sandbox, clean: Sandbox, repo_dir: str, base: Base, limit: int) -> Patch:
    """The agent's changes in `repo_dir` of `runtime` since `base`, up to `limit` bytes of them.

    Raises: EvaluatorError if they cannot be determined, whatever the cause.
    """
    listed = await run(
        clean, ["git", "ls-tree", "-r", "-z", "--full-tree", base.commit], cwd=repo_dir, limit=_MAX_LISTING_BYTES
    )
    if not listed.ok or listed.truncated:
        raise EvaluatorError(f"the clean repository's files cannot be listed: {said(listed)}")
    entries = listed.stdout.split(b"\0")[:-1]
    is_submodule = re.compile(rb"160000 ").match
    own = await private_home(runtime)
    folder, top = _places(runtime, repo_dir, base)
    hidden = [entry.split(b"\t", 1)[1].decode(errors="surrogateescape") for entry in entries if is_submodule(entry)]
    if PurePosixPath(own).is_relative_to(top):
        hidden.append(str(PurePosixPath(own).relative_to(top)))
    exclude = "\n".join([base.exclude, *map(_pattern, hidden), ""])
    taken = await run(
        runtime,
        ["sh", "-c", _TAKE, "sh", folder, exclude],
        cwd=None,
        env={
            **NO_CONFIG,
            "HOME": own,
            "XDG_CONFIG_HOME": own,
            "GIT_DIR": f"{own}/git",
            "GIT_WORK_TREE": top,
            "GIT_DEFAULT_HASH": "sha256" if len(base.commit) == 64 else "sha1",
        },
        stdin=b"".join(entry + b"\0" for entry in entries if not is_submodule(entry)),
        limit=_MAX_OBJECTS_BYTES,
    )
    if not taken.ok or taken.truncated:
        why = f"more than {_MAX_OBJECTS_BYTES} bytes" if taken.truncated else said(taken)
        raise EvaluatorError(f"what the agent changed in {folder} cannot be read: {why}")
    tree, objects = taken.stdout.split(b"\n", 1)
    stored = await run(clean, ["git", "unpack-objects", "-q"], cwd=repo_dir, stdin=objects)
    made = await run(clean, ["sh", "-c", f'{_DIFF} "$@"', "sh", base.commit, tree.decode()], cwd=repo_dir, limit=limit)
    if not (stored.ok and made.ok):
        raise EvaluatorError(f"no patch can be made of what the agent changed: {said(stored)} {said(made)}")
    return Patch(made.stdout, not made.truncated, said(taken) if taken.stderr else "")


async def private_home(runtime: Sandbox) -> str:
    """An empty folder, even if the agent put something in its place. Raises: EvaluatorError."""
    own = f"{runtime.home}/{_FOLDER}"
    try:
        await runtime.clear(own)
    except CallerError as error:
        raise EvaluatorError(f"could not clear the grader's {own}: {error.message}") from error
    made = await run(runtime, ["mkdir", "-p", "--", f"{own}/git/info"], cwd=None)
    if not made.ok:
        raise EvaluatorError(f"could not make the grader's {own}: {said(made)}")
    return own


async def run(
    runtime: Sandbox,
    command: list[str],
    *,
    cwd: str | None,
    env: dict[str, str] | None = None,
    stdin: bytes | None = None,
    limit: int = 1 << 20,
) -> ExecResult:
    """Raises: EvaluatorError on a timeout."""
    how: dict[str, Any] = {"timeout_s": _GIT_TIMEOUT_S, "max_output_bytes": limit}
    result = await runtime.exec(command, cwd=cwd, env={**GIT_ENV, **(env or {})}, stdin=stdin, **how)
    if result.timed_out:
        raise EvaluatorError(f"{' '.join(command[:2])} was not done in {_GIT_TIMEOUT_S:g} s")
    return result


def said(result: ExecResult) -> str:
    return (result.stderr or result.stdout).decode(errors="replace").strip()[-_MAX_SHOWN_CHARS:]


def _places(runtime: Sandbox, repo_dir: str, base: Base) -> tuple[str, str]:
    """`repo_dir`, and the top of its repository."""
    folder = os.path.normpath(PurePosixPath(runtime.workdir) / repo_dir)
    return folder, os.path.normpath(PurePosixPath(folder) / ("../" * base.prefix.count("/")))


def _pattern(path: str) -> str:
    """A `.gitignore` pattern that matches only this path."""
    return "/" + re.sub(r"([\\*?\[\] ])", r"\\\1", path)
