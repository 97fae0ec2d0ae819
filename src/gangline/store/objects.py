"""A folder of objects at any fsspec URL: S3, a shared file system, ... Objects are written whole, and neither renamed
nor appended to.

All methods block and raise StoreError, DiskFull if there is no space. File systems raise whatever their clients do, so
every error of theirs becomes one of these.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from gangline.domain.errors import InvalidRequest, StoreError
from gangline.machine.durable import disk_full_error
from gangline.settings.installation import extra_command

try:
    from fsspec.core import url_to_fs  # pyright: ignore[reportUnknownVariableType]
except ImportError as error:
    raise InvalidRequest(
        f"results at a URL need the Python package {error.name!r}: {extra_command('artifacts')}"
    ) from error


class ObjectFolder:
    def __init__(self, url: str, what: str) -> None:
        """url: supported by fsspec or its installed plug-ins, which find their own credentials. what: for messages.

        Raises: InvalidRequest if the URL cannot be opened.
        """
        try:
            opened = cast("tuple[Any, str]", url_to_fs(url))
        except Exception as error:
            raise InvalidRequest(f"{what} cannot be stored at {url}: {error}") from error
        self._fs = opened[0]
        self._root = opened[1].rstrip("/")
        self._what = what

    def prepare(self) -> None:
        """Make the folder, and try that it can be written."""
        with self._explained():
            self._fs.makedirs(self._root, exist_ok=True)
        self.put(".written", b"")

    def put(self, name: str, data: bytes) -> None:
        path = f"{self._root}/{name}"
        with self._explained():
            try:
                self._fs.pipe_file(path, data)
            except FileNotFoundError:  # object stores have no folders, and others few new ones
                self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
                self._fs.pipe_file(path, data)

    def get(self, name: str) -> bytes:
        with self._explained():
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))

    def locate(self, name: str) -> tuple[str, int]:
        """The object's URL, and its size in bytes."""
        path = f"{self._root}/{name}"
        with self._explained():
            return str(self._fs.unstrip_protocol(path)), int(self._fs.size(path))

    def names(self, folder: str) -> list[str]:
        """Names of the entries of a folder; empty if there is no such folder."""
        path = f"{self._root}/{folder}".rstrip("/")
        with self._explained():
            self._fs.invalidate_cache(path)  # another server may have written
            try:
                found = self._fs.ls(path, detail=False)
            except FileNotFoundError:
                return []
            return sorted(str(one).rstrip("/").rsplit("/", 1)[-1] for one in found)

    def remove(self, folder: str) -> None:
        """Remove a folder with all that is in it. Idempotent."""
        path = f"{self._root}/{folder}"
        with self._explained():
            self._fs.invalidate_cache(path)
            try:
                self._fs.rm(path, recursive=True)
            except FileNotFoundError:
                return

    @contextmanager
    def _explained(self) -> Generator[None]:
        try:
            yield
        except Exception as error:
            full = disk_full_error(error, self._what) if isinstance(error, OSError) else None
            said = str(error) or type(error).__name__
            raise full or StoreError(f"{self._what} could not be stored or read: {said}") from error
