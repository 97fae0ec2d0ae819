"""Definitions shared by importers of tasks: their options, their results, and conversion of metadata."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.domain.task import NetworkPolicy
from gangline.machine.reading.paths import SourcePath

T = TypeVar("T")

_LISTING_S = 600.0
_MAX_SAID_CHARS = 1000


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """Options chosen by the importing user."""

    runtime: str | None = None
    """Name of a runtime plug-in; None chooses the one that the task needs."""
    image: str | None = None
    """Replaces the task's image: an image name or a folder, as the runtime understands it."""
    python: str | None = None
    """Folder of a Python environment with the source's package; None is ours, if it has the package."""
    network: NetworkPolicy | None = None
    """None allows only the model, and refuses tasks that would be graded wrongly because of it."""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """A task that is complete except for its agent."""

    name: str
    body: dict[str, Any]
    """Body of `POST /v1/tasks` without an agent's harness, with the reference solution if the source has one."""
    notes: tuple[str, ...] = ()
    """Differences from the task's source."""


class LeftOut(msgspec.Struct, frozen=True):
    """A row or task of the source that could not be converted to a task."""

    why: str
    """Includes the file, row and column."""


class Candidate(NamedTuple):
    """A task found in a source but not read yet."""

    name: str
    """Row for filters, available before the task is read."""
    instance: Mapping[str, Any] | None
    """None if it cannot be read."""
    read: Callable[[], Imported]
    where: str = ""
    """Place of a row, for its errors."""


class FolderFormat(NamedTuple):
    """A format whose tasks are folders. An entry point of group `gangline.importers`, by name."""

    recognizes: Callable[[Path], bool]
    read: Callable[[SourcePath, Choices], Imported]
    document: Callable[[SourcePath], Any]
    """Returns the fields that filters use."""


class ProgramSource(NamedTuple):
    """Tasks listed by a program, for sources with a prefix. An entry point of the same group."""

    prefix: str
    candidates: Callable[[str, Choices, int | None], Iterable[Candidate]]
    """Source without its prefix, options, and the number of tasks wanted; None means all."""


def listed(command: Sequence[str], kind: type[T], problem: str) -> T:
    """The JSON that a source's own program prints of its tasks. Raises: InvalidRequest, which begins with `problem`."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LISTING_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidRequest(f"{problem}: {error}") from error
    if ended.returncode != 0:
        raise InvalidRequest(f"{problem}: {ended.stderr.strip()[-_MAX_SAID_CHARS:]}")
    return msgspec.json.decode(ended.stdout, type=kind)


def plain(instance: Any) -> dict[str, Any]:
    """A row or a task's file as JSON types: dates become texts, bytes base 64, infinite numbers null.

    Raises: InvalidRequest, naming the column that JSON cannot represent.
    """
    try:
        return _plain(instance)
    except _NOT_JSON as error:
        raise InvalidRequest(_why_not(instance, error)) from error


_NOT_JSON = (UnicodeEncodeError, RecursionError, TypeError, ValueError, msgspec.MsgspecError)


def _plain(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_of_library))


def _of_library(value: Any) -> Any:
    """The value of a NumPy or pandas object."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _why_not(instance: Any, error: Exception) -> str:
    for column, value in cast("Mapping[Any, Any]", instance).items() if isinstance(instance, Mapping) else ():
        try:
            _plain({column: value})
        except _NOT_JSON as found:
            return f"{ascii(column)[1:-1]}: {_reason(found)}"
    return _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if not isinstance(error, UnicodeEncodeError):
        return f"has no form in JSON: {error}"
    code = ord(error.object[error.start])
    if 0xDC80 <= code <= 0xDCFF:  # Python's escape of a byte that is not UTF-8
        return f"is not UTF-8 (byte 0x{code - 0xDC00:02x}): save the file as UTF-8"
    return f"has half of a character (the lone surrogate U+{code:04X}), which no file can hold"
