"""What the agent left, carried from its runtime into the grader's: files, and whole folders with their modes and links.

All of it is the agent's claim. Archives are made and unpacked inside sandboxes only, by the agent's user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.contracts import RuntimeHandle
from gangline.domain.errors import CallerError

__all__ = ["CollectCommand", "Collected", "collected", "run_commands"]

_TAR_TIMEOUT_S = 120.0
_MAX_SAID_CHARS = 500


class CollectCommand(BaseModel):
    """A command that makes files to collect of the state that the agent left."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    command: str = Field(min_length=1)
    """Given to `sh -c` in the working folder."""
    timeout_seconds: float = Field(default=60, gt=0)


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    files: dict[str, bytes] = {}
    archives: dict[str, bytes] = {}
    """Path of a folder, or of a file -> tar archive of it."""
    missing: list[str] = []
    """What could not be taken, and why: the agent's doing."""

    async def bring(self, runtime: RuntimeHandle) -> list[str]:
        """Write everything to its old place in another runtime. Returns what could not be."""
        for path, data in self.files.items():
            await runtime.upload(path, data)
        failed: list[str] = []
        for path, archive in self.archives.items():
            unpacked = await runtime.exec(
                ["tar", "-xpf", "-", "-C", _place(path)], stdin=archive, timeout_s=_TAR_TIMEOUT_S
            )
            if not unpacked.ok:
                failed.append(f"{path}: {unpacked.stderr.decode(errors='replace').strip()[-_MAX_SAID_CHARS:]}")
        return failed


async def run_commands(runtime: RuntimeHandle, commands: Sequence[CollectCommand]) -> list[str]:
    """Run each, whatever becomes of the others. Returns how those ended that failed."""
    failed: list[str] = []
    for one in commands:
        result = await runtime.exec(one.command, timeout_s=one.timeout_seconds)
        if not result.ok:
            end = f"not done in {one.timeout_seconds:g} s" if result.timed_out else f"exit code {result.exit_code}"
            said = result.stderr.decode(errors="replace").strip()[-_MAX_SAID_CHARS:]
            failed.append(f"{one.command[:_MAX_SAID_CHARS]}: {end}; {said}")
    await runtime.kill()  # a command may have left something that runs
    return failed


async def collected(
    runtime: RuntimeHandle, files: Sequence[str], folders: Mapping[str, Sequence[str]], max_bytes: int
) -> Collected:
    """
    folders: path -> patterns of `tar --exclude`.
    max_bytes: for each file and each folder.
    """
    found = Collected(files={}, archives={}, missing=[])
    for path in files:
        try:
            found.files[path] = await runtime.download(path, max_bytes=max_bytes)
        except CallerError as error:  # no such file, too large, a link: the agent's doing
            found.missing.append(f"{path}: {error.message}")
    for path, excluded in folders.items():
        await _take(runtime, path, excluded, max_bytes, found)
    return found


async def _take(runtime: RuntimeHandle, path: str, excluded: Sequence[str], max_bytes: int, found: Collected) -> None:
    command = ["tar", "-cf", "-", "-C", _place(path), *(f"--exclude={one}" for one in excluded), "--", _name(path)]
    taken = await runtime.exec(command, timeout_s=_TAR_TIMEOUT_S, max_output_bytes=max_bytes)
    if taken.truncated:
        found.missing.append(f"{path}: takes more than {max_bytes} bytes")
    elif not taken.ok:
        found.missing.append(f"{path}: {taken.stderr.decode(errors='replace').strip()[-_MAX_SAID_CHARS:]}")
    else:
        found.archives[path] = taken.stdout


def _place(path: str) -> str:
    """The folder that the archive's names begin in: an absolute path keeps all its parts."""
    return "/" if path.startswith("/") else "."


def _name(path: str) -> str:
    return str(PurePosixPath(path.lstrip("/") or "."))
