"""Session results at any fsspec URL: S3, a shared file system, ...: `{task}/{session}/attempt-{n}.{fence}.msgpack`.

Objects cannot be renamed cheaply, so each is written under its final name. The lease's fence in the name keeps a late
report from overwriting the accepted one. Within an attempt the accepted result always has the highest fence, because
the session moves on to the next attempt with it. Refused results stay until their task is deleted.
"""

from __future__ import annotations

import re
from typing import Any, cast

from gangline.domain.errors import InvalidRequest, NotFound, StoreError
from gangline.domain.ids import validated_id
from gangline.domain.session import SessionResult
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.machine.durable import disk_full_error
from gangline.settings.installation import extra_command

try:
    from fsspec.core import url_to_fs  # pyright: ignore[reportUnknownVariableType]
except ImportError as error:
    raise InvalidRequest(
        f"results at a URL need the Python package {error.name!r}: {extra_command('artifacts')}"
    ) from error

_NAME = re.compile(r"attempt-(\d+)\.(\d+)\.msgpack")


class _Written:
    """A result that is already in its final place."""

    def __init__(self, path: str) -> None:
        self._path = path

    def keep(self) -> str:
        return self._path

    def discard(self) -> None:
        return None


class ArtifactResults:
    """See `store.results.Results`.

    url: URL of the folder, supported by fsspec or its installed plug-ins. These plug-ins find their own credentials.
    Raises: InvalidRequest if the URL cannot be opened.
    """

    def __init__(self, url: str) -> None:
        try:
            opened = cast("tuple[Any, str]", url_to_fs(url))
        except (ImportError, ValueError, OSError) as error:
            raise InvalidRequest(f"results cannot be stored at {url}: {error}") from error
        self._fs = opened[0]
        self._root = opened[1].rstrip("/")

    def prepare(self) -> None:
        try:
            self._fs.makedirs(self._root, exist_ok=True)
        except OSError as error:
            raise _explained(error) from error

    def stage(self, result: SessionResult, data: bytes | None = None) -> _Written:
        folder = self._folder(result.task_id, result.session_id)
        path = f"{folder}/attempt-{int(result.attempt)}.{int(result.fence)}.msgpack"
        try:
            self._fs.makedirs(folder, exist_ok=True)
            self._fs.pipe_file(path, encode_msgpack(result) if data is None else data)
        except OSError as error:
            raise _explained(error) from error
        return _Written(path)

    def read_bytes(self, task_id: str, session_id: str, attempt: int) -> bytes:
        try:
            return self._fs.cat_file(self._find(task_id, session_id, attempt))
        except OSError as error:
            raise _explained(error) from error

    def read(self, task_id: str, session_id: str, attempt: int) -> SessionResult:
        return decode_msgpack(self.read_bytes(task_id, session_id, attempt), SessionResult)

    def locate(self, task_id: str, session_id: str, attempt: int) -> tuple[str, int]:
        try:
            path = self._find(task_id, session_id, attempt)
            return str(self._fs.unstrip_protocol(path)), int(self._fs.size(path))
        except OSError as error:
            raise _explained(error) from error

    def remove(self, task_id: str) -> None:
        try:
            self._fs.rm(f"{self._root}/{validated_id(task_id, 'task_id')}", recursive=True)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _explained(error) from error

    def _find(self, task_id: str, session_id: str, attempt: int) -> str:
        """Raises: NotFound, OSError."""
        folder = self._folder(task_id, session_id)
        self._fs.invalidate_cache(folder)  # another server may have written
        try:
            names = [str(path).rsplit("/", 1)[-1] for path in self._fs.ls(folder, detail=False)]
        except FileNotFoundError:
            names = []
        found = [match for name in names if (match := _NAME.fullmatch(name)) and int(match[1]) == attempt]
        if not found:
            raise NotFound(f"session {session_id} has no result of attempt {attempt}.")
        return f"{folder}/{max(found, key=lambda match: int(match[2]))[0]}"

    def _folder(self, task_id: str, session_id: str) -> str:
        return f"{self._root}/{validated_id(task_id, 'task_id')}/{validated_id(session_id, 'session_id')}"


def _explained(error: OSError) -> StoreError:
    return disk_full_error(error, "the results") or StoreError(f"a result could not be stored or read: {error}")
