"""Session results at any fsspec URL: `{task}/{session}/attempt-{n}.{fence}.msgpack`.

Objects cannot be renamed cheaply, so each is written under its final name. The lease's fence in the name keeps a late
report from overwriting the accepted one. Within an attempt the accepted result always has the highest fence, because
the session moves on to the next attempt with it. Refused results stay until their task is deleted.
"""

from __future__ import annotations

import re

from gangline.domain.errors import NotFound
from gangline.domain.ids import validated_id
from gangline.domain.session import SessionResult
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.store.objects import ObjectFolder

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
    """See `store.results.Results`. Methods also raise the errors of `ObjectFolder`'s."""

    def __init__(self, url: str) -> None:
        """Raises: InvalidRequest if the URL cannot be opened."""
        self._objects = ObjectFolder(url, "results")

    def prepare(self) -> None:
        self._objects.prepare()

    def stage(self, result: SessionResult, data: bytes | None = None) -> _Written:
        folder = _folder(result.task_id, result.session_id)
        name = f"{folder}/attempt-{int(result.attempt)}.{int(result.fence)}.msgpack"
        self._objects.put(name, encode_msgpack(result) if data is None else data)
        return _Written(name)

    def read_bytes(self, task_id: str, session_id: str, attempt: int) -> bytes:
        return self._objects.get(self._find(task_id, session_id, attempt))

    def read(self, task_id: str, session_id: str, attempt: int) -> SessionResult:
        return decode_msgpack(self.read_bytes(task_id, session_id, attempt), SessionResult)

    def locate(self, task_id: str, session_id: str, attempt: int) -> tuple[str, int]:
        return self._objects.locate(self._find(task_id, session_id, attempt))

    def remove(self, task_id: str) -> None:
        self._objects.remove(validated_id(task_id, "task_id"))

    def _find(self, task_id: str, session_id: str, attempt: int) -> str:
        """Raises: NotFound."""
        folder = _folder(task_id, session_id)
        matches = map(_NAME.fullmatch, self._objects.names(folder))
        found = [match for match in matches if match and int(match[1]) == attempt]
        if not found:
            raise NotFound(f"session {session_id} has no result of attempt {attempt}.")
        return f"{folder}/{max(found, key=lambda match: int(match[2]))[0]}"


def _folder(task_id: str, session_id: str) -> str:
    return f"{validated_id(task_id, 'task_id')}/{validated_id(session_id, 'session_id')}"
