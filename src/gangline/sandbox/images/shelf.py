"""The existing images: one record next to each. Blocking.

A record is written atomically once its image is complete; an image without a record is left from a failed build.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from gangline.machine.durable import locked, replacing
from gangline.sandbox.images.recipe import Caching, ImageKind


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The parts from which an image was made."""

    name: str
    kind: ImageKind
    digest: str
    """Digest of all parts; names the image."""
    image: str
    """The value for `runtime.image` of a task: a path, or a name with a tag."""
    caching: Caching
    key: str | None
    base: str
    base_identity: str
    framework: str
    lock_sha256: str | None
    harnesses: tuple[str, ...]
    built_at: float
    """Unix time, UTC, seconds."""
    size_bytes: int


class Shelf:
    """The records in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def records(self) -> list[ImageRecord]:
        """Newest first."""
        return sorted(self._read(), key=lambda record: record.built_at, reverse=True)

    def _read(self) -> Iterator[ImageRecord]:
        for path in self.folder.glob("*.json"):
            with suppress(OSError, msgspec.DecodeError):
                yield msgspec.json.decode(path.read_bytes(), type=ImageRecord)

    def find(self, key: str) -> ImageRecord | None:
        """The newest record with that key."""
        return next((record for record in self.records() if record.key == key), None)

    def put(self, record: ImageRecord) -> None:
        with replacing(self._path(record)) as unfinished:
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))

    def forget(self, record: ImageRecord) -> None:
        self._path(record).unlink(missing_ok=True)

    def _path(self, record: ImageRecord) -> Path:
        return self.folder / f"{record.name}-{record.digest[:12]}.{record.kind}.json"

    def old(self, num_kept: int) -> list[ImageRecord]:
        """All but the newest records of each name and kind."""
        seen: dict[tuple[str, str], int] = {}
        found: list[ImageRecord] = []
        for record in self.records():
            of_name = (record.name, record.kind)
            seen[of_name] = seen.get(of_name, 0) + 1
            if seen[of_name] > num_kept:
                found.append(record)
        return found

    @contextmanager
    def alone(self) -> Generator[None]:
        """Allows one builder at a time: the second finds the first one's image."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / ".lock", wait=True):
            yield
