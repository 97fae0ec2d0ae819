"""Finds a benchmark's files on this machine, or fetches them; or says what is missing and how to bring it."""

from __future__ import annotations

import os
import shlex
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

from gangline.domain.errors import InvalidRequest
from gangline.settings.installation import extra_command
from gangline.tasks.benchmarks.catalogue import Benchmark
from gangline.tasks.importers.source import files_like

_GIT_S = 3600.0
_COMMIT_CHARS = 40


def brought(one: Benchmark, given: Path | None, split: str | None) -> Path:
    """The file or folder to read. given: the user's copy.

    Raises: InvalidRequest, which says what is missing, where it is fetched from and how to bring it.
    """
    pattern = one.pattern(split)
    if one.kind == "program":
        if given is not None:
            raise InvalidRequest(
                f"--from: {one.name} is listed by a program, not read from files. {_how(one, pattern)}"
            )
        return Path(one.source)
    if given is not None:
        _require_revision(one, given)
        return _whole(one, given, pattern)
    return _of_hub(one, pattern) if one.kind == "hub" else _of_git(one)


def missing(one: Benchmark, pattern: str, why: str) -> InvalidRequest:
    """The error for files that are not on this machine."""
    size = f" ({one.megabytes:g} MB)" if one.megabytes else ""
    files = f", {pattern}{size}" if pattern else ""
    return InvalidRequest(f"{one.name}: {why}. It is at {one.url}{files}. {_how(one, pattern)}")


def _how(one: Benchmark, pattern: str) -> str:
    if one.kind == "program":
        commands = " && ".join(one.commands).replace("{revision}", one.revision)
        return f"Install it with `{commands}`, and name its environment: --python /opt/tau2."
    folder = one.name
    if one.kind == "hub":
        include = f" --include {shlex.quote(pattern)}"
        fetch = f"hf download {one.source} --repo-type dataset --revision {one.revision}{include} --local-dir {folder}"
    else:
        fetch = f"git clone {one.source} {folder} && git -C {folder} checkout {one.revision}"
    return (
        f"On a machine with a network run `{fetch}`, copy the folder {folder} here, and give it with --from {folder}."
    )


def _require_revision(one: Benchmark, given: Path) -> None:
    """Refuse a copy that is known to be of another commit: a snapshot of Hugging Face's cache, or a clone.

    Raises: InvalidRequest.
    """
    if not given.exists():
        raise InvalidRequest(f"--from {given}: there is no such file or folder.")
    at = ""
    if given.resolve().parent.name == "snapshots":
        at = given.resolve().name
    elif (given / ".git").exists():
        done = subprocess.run(["git", "-C", given, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        at = done.stdout.strip()
    if one.is_pinned and len(at) == _COMMIT_CHARS and at != one.revision:
        raise InvalidRequest(
            f"--from {given}: is at {at}, and {one.name} is pinned to {one.revision}. Bring that revision, or name the "
            f"benchmark {one.name}@{at}."
        )


def _whole(one: Benchmark, folder: Path, pattern: str) -> Path:
    """Raises: InvalidRequest if the split's files are missing."""
    if pattern:
        try:
            files_like(folder, pattern)
        except InvalidRequest as error:
            raise missing(one, pattern, error.message.rstrip(".")) from error
    return folder


def _of_hub(one: Benchmark, pattern: str) -> Path:
    """A folder of the cache of Hugging Face's library. Raises: InvalidRequest."""
    try:
        hub: Any = import_module("huggingface_hub")  # an optional dependency, and slow to import
    except ImportError as error:
        why = f"it is fetched by the package huggingface_hub, which is not installed (`{extra_command('importers')}`)"
        raise missing(one, pattern, why) from error

    def found(*, local: bool) -> Path:
        folder = hub.snapshot_download(
            one.source, repo_type="dataset", revision=one.revision, allow_patterns=[pattern], local_files_only=local
        )
        files_like(Path(folder), pattern)
        return Path(folder)

    try:
        if one.is_pinned:  # a commit's files do not change
            return found(local=True)
    except (OSError, InvalidRequest):
        pass
    try:
        return found(local=False)
    except Exception as error:  # of the library, of its HTTP client, of the file system: whatever keeps the files away
        text = " ".join(str(error).split())[:300]
        raise missing(one, pattern, f"its files are not here, and Hugging Face did not give them ({text})") from error


def _of_git(one: Benchmark) -> Path:
    """A clone at the revision, in the user's cache. Raises: InvalidRequest."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "gangline" / "benchmarks" / one.name / one.revision.replace("/", "-")
    if (folder / ".whole").exists() and one.is_pinned:
        return folder
    steps = (
        ("init", "--quiet", "."),
        ("fetch", "--quiet", "--depth", "1", one.source, one.revision),
        ("checkout", "--quiet", "--force", "FETCH_HEAD"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        try:
            done = subprocess.run(
                ["git", *step],
                cwd=folder,
                env=os.environ | {"GIT_TERMINAL_PROMPT": "0"},
                capture_output=True,
                text=True,
                timeout=_GIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise missing(one, "", f"git could not fetch it ({error})") from error
        if done.returncode:
            text = " ".join(done.stderr.split())[-300:]
            raise missing(one, "", f"its files are not here, and git could not fetch them ({text})")
    (folder / ".whole").touch()
    return folder
