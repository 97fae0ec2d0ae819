"""Transfers the agent's files to the grader's runtime: single files, and whole folders with their modes and links.

All of it is untrusted. Archives are made and unpacked only inside sandboxes, by the agent's user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import msgspec
from pydantic import BaseModel, ConfigDict, model_validator

from gangline.domain.errors import CallerError, EvaluatorError
from gangline.domain.sandbox import Sandbox, SideServices
from gangline.domain.services import ServiceName
from gangline.domain.task_values import Line, Seconds

_TAR_TIMEOUT_S = 120.0
_MAX_SAID_CHARS = 500
_UNPACK = 'place=$1; shift; mkdir -p -- "$place" && exec tar -xpf - -C "$place" "$@"'


class CollectCommand(BaseModel):
    """A command that creates files to collect from the state that the agent left."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: Line
    """Run by `sh -c` in the working folder."""
    service: ServiceName | None = None
    """The runtime's service in whose container the command runs; None is the agent's container."""
    user: str | None = None
    """User for a command in a service, if not the service's own."""
    timeout_seconds: Seconds = 60

    @model_validator(mode="after")
    def _has_users_in_services(self) -> CollectCommand:
        if self.user is not None and self.service is None:
            raise ValueError("user is of a command in a service; others run as the agent's user")
        return self


class Archive(NamedTuple):
    data: bytes
    place: str
    """Folder relative to which its names are stored."""
    excluded: Sequence[str] = ()
    """Patterns of files that are not unpacked."""


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    files: dict[str, bytes] = {}
    archives: dict[str, Archive] = {}
    """Path of a folder or file -> its tar archive."""
    missing: list[str] = []
    """Files that could not be collected, and why. These count as the agent's failures."""

    async def bring(self, runtime: Sandbox) -> list[str]:
        """Write everything to its original place in another runtime. Returns the failures."""
        for path, data in self.files.items():
            await runtime.upload(path, data)
        failed: list[str] = []
        for path, archive in self.archives.items():
            excluded = [f"--exclude={one}" for one in archive.excluded]
            command = ["sh", "-c", _UNPACK, "sh", archive.place, *excluded]
            unpacked = await runtime.exec(command, stdin=archive.data, timeout_s=_TAR_TIMEOUT_S)
            if not unpacked.ok:
                failed.append(f"{path}: {unpacked.stderr.decode(errors='replace').strip()[-_MAX_SAID_CHARS:]}")
        return failed


async def run_commands(
    runtime: Sandbox, commands: Sequence[CollectCommand], services: SideServices | None
) -> list[str]:
    """Run every command, even if others fail. Returns the failures. Raises: EvaluatorError."""
    failed: list[str] = []
    for command in commands:
        if command.service is None:
            result = await runtime.exec(command.command, timeout_s=command.timeout_seconds)
        else:
            beside = _needed(services, command.service)
            result = await beside.exec(
                command.service, command.command, timeout_s=command.timeout_seconds, user=command.user
            )
        if not result.ok:
            end = f"not done in {command.timeout_seconds:g} s" if result.timed_out else f"exit code {result.exit_code}"
            errors = result.stderr.decode(errors="replace").strip()[-_MAX_SAID_CHARS:]
            failed.append(f"{command.command[:_MAX_SAID_CHARS]}: {end}; {errors}")
    await runtime.kill()  # a command may have left a process running
    return failed


async def collected(
    runtime: Sandbox, files: Sequence[str], folders: Mapping[str, Sequence[str]], max_bytes: int
) -> Collected:
    """folders: path -> patterns of `tar --exclude`. max_bytes: for each file and each folder."""
    found = Collected(files={}, archives={}, missing=[])
    for path in files:
        try:
            found.files[path] = await runtime.download(path, max_bytes=max_bytes)
        except CallerError as error:  # no such file, too large, a link: caused by the agent
            found.missing.append(f"{path}: {error.message}")
    for path, excluded in folders.items():
        await _take(runtime, path, excluded, max_bytes, found)
    return found


async def collected_of_services(
    services: SideServices | None, wanted: Mapping[str, Mapping[str, Sequence[str]]], max_bytes: int, found: Collected
) -> None:
    """wanted: service -> path in it -> patterns to exclude. Files already collected under the same path take
    precedence.

    Raises: EvaluatorError.
    """
    for service, paths in wanted.items():
        for path, excluded in paths.items():
            if path in found.archives or path in found.files:
                found.missing.append(f"{path} of service {service}: another one has the path")
                continue
            try:
                data = await _needed(services, service).archive(service, path, max_bytes=max_bytes)
            except CallerError as error:  # no such file, too large
                found.missing.append(f"{path} of service {service}: {error.message}")
            else:
                found.archives[path] = Archive(data, str(PurePosixPath(path).parent), excluded)


def _needed(services: SideServices | None, service: str) -> SideServices:
    """Raises: EvaluatorError."""
    if services is None:
        raise EvaluatorError(f"the grader collects from service {service!r}, and the agent's runtime has no services")
    return services


async def _take(runtime: Sandbox, path: str, excluded: Sequence[str], max_bytes: int, found: Collected) -> None:
    command = ["tar", "-cf", "-", "-C", _place(path), *(f"--exclude={one}" for one in excluded), "--", _name(path)]
    taken = await runtime.exec(command, timeout_s=_TAR_TIMEOUT_S, max_output_bytes=max_bytes)
    if taken.truncated:
        found.missing.append(f"{path}: takes more than {max_bytes} bytes")
    elif not taken.ok:
        found.missing.append(f"{path}: {taken.stderr.decode(errors='replace').strip()[-_MAX_SAID_CHARS:]}")
    else:
        found.archives[path] = Archive(taken.stdout, _place(path))


def _place(path: str) -> str:
    """Folder relative to which the archive's names are stored. An absolute path keeps all its parts."""
    return "/" if path.startswith("/") else "."


def _name(path: str) -> str:
    return str(PurePosixPath(path.lstrip("/") or "."))
