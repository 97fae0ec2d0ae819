"""Reads results for `show`, `audit` and `export` from the files of a data folder, or from a server."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gangline.cli.terminal.output import run
from gangline.domain.errors import Conflict, NotFound
from gangline.domain.ids import validated_id
from gangline.settings.machine import Settings
from gangline.wire.client.running import Service, find_service

if TYPE_CHECKING:
    from gangline.domain.session import SessionResult
    from gangline.domain.task import TaskRequest
    from gangline.domain.views import Annotation

_PAGE = 500

RequestOf = Callable[[str], "TaskRequest | None"]
"""Task id -> the task as submitted; None if it is no longer stored."""


class Records(Protocol):
    def task(self, task_id: str) -> Iterator[SessionResult] | None:
        """Results of the task's ended sessions, by sample index; None for an unknown task."""
        ...

    def session(self, session_id: str) -> SessionResult | None:
        """Result of the session's last attempt; None if the session is unknown or has not ended."""
        ...

    def read(self, task_id: str, session_id: str) -> SessionResult | None:
        """The same with a known task, which avoids a search."""
        ...

    def task_ids(self) -> list[str]:
        """All tasks that have or may have results."""
        ...

    def requests(self) -> AbstractContextManager[RequestOf]:
        """For looking up many tasks."""
        ...

    def annotations(self, dataset: str) -> list[Annotation]:
        """Annotations of a dataset's sessions, newest first."""
        ...


def open_records(data_dir: Path | None, server_url: str | None, verdicts: str | None = None) -> Records:
    """Opens the named server, or the environment's; else the files of the data folder; else the service running on it.

    verdicts: name of a `gangline regrade`, whose rewards replace the recorded ones.
    Raises: ServerUnavailable when there are no results and no service; NotFound for unknown verdicts.
    """
    recorded = _recorded(data_dir, server_url)
    return recorded if verdicts is None else RegradedRecords(recorded, regrades_file(data_dir, verdicts))


def regrades_file(data_dir: Path | None, name: str) -> Path:
    """Raises: InvalidRequest when the name is invalid."""
    folder = (data_dir or Settings.from_environ().data_dir).absolute() / "regrades"
    return folder / f"{validated_id(name, 'the name of verdicts')}.jsonl"


def _recorded(data_dir: Path | None, server_url: str | None) -> Records:
    settings = Settings.from_environ()
    remote = server_url or (settings.server_url if data_dir is None else None)
    results = (data_dir or settings.data_dir) / "server" / "results"
    if remote is None and results.is_dir():
        return FileRecords(results)
    return ServerRecords(find_service(data_dir, server_url))


def find_results(records: Records, name: str) -> Iterator[SessionResult]:
    """Results of a task or a session. Raises: NotFound, InvalidRequest when `name` is not an id."""
    validated_id(name, "the name of a task or session")
    session = records.session(name)
    if session is not None:
        return iter([session])
    task = records.task(name)
    if task is None:
        raise NotFound(f"no result of a task or session {name!r}: `gangline status` lists the tasks, ended or not.")
    return task


def find_results_of(records: Records, names: Sequence[str]) -> Iterator[SessionResult]:
    """Results of tasks and sessions by name, or of tasks by patterns such as `swe-*`; each task once.

    Raises: NotFound when a name or a pattern has no result.
    """
    known: list[str] | None = None
    chosen: dict[str, None] = {}
    for name in names:
        if not _is_pattern(name):
            chosen[name] = None
            continue
        known = records.task_ids() if known is None else known
        matching = [task_id for task_id in known if fnmatchcase(task_id, name)]
        if not matching:
            raise NotFound(f"no task matches {name!r}: `gangline list tasks` shows them.")
        chosen |= dict.fromkeys(matching)
    return (result for name in chosen for result in _ended(records, name, is_named=name in names))


def _is_pattern(name: str) -> bool:
    return any(mark in name for mark in "*?[")


def _ended(records: Records, name: str, *, is_named: bool) -> Iterator[SessionResult]:
    """Results of a task that matched a pattern; it may have none yet."""
    return find_results(records, name) if is_named else records.task(name) or iter(())


def harness_of(records: Records, task_id: str) -> str | None:
    """The harness named by the task; None if the task is no longer stored."""
    with records.requests() as request_of:
        task = request_of(task_id)
    return None if task is None else task.agent.harness


class FileRecords:
    """Files written by the server: `results/{task}/{session}/attempt-{n}.msgpack`. Works whether or not it runs."""

    def __init__(self, folder: Path) -> None:
        from gangline.store.results.files import ResultStore

        self._folder = folder
        self._store = ResultStore(folder)

    def task(self, task_id: str) -> Iterator[SessionResult] | None:
        folder = self._folder / task_id
        if not folder.is_dir():
            return None
        sessions = sorted((path.name for path in folder.iterdir()), key=_by_number)
        found = (self.read(task_id, session_id) for session_id in sessions)
        return (result for result in found if result is not None)

    def session(self, session_id: str) -> SessionResult | None:
        for folder in self._folder.glob(f"*/{session_id}"):
            return self.read(folder.parent.name, session_id)
        return None

    def task_ids(self) -> list[str]:
        return sorted(path.name for path in self._folder.glob("[!.]*") if path.is_dir())

    @contextmanager
    def requests(self) -> Generator[RequestOf]:
        from gangline.store.sql.reader import TaskReader

        database = self._folder.parent / "gangline.db"
        if not database.is_file():
            yield lambda _task_id: None
            return
        with TaskReader(database) as reader:

            def request_of(task_id: str) -> TaskRequest | None:
                try:
                    return reader.request(task_id)
                except NotFound:
                    return None

            yield request_of

    def annotations(self, dataset: str) -> list[Annotation]:
        from gangline.store.sql.reader import TaskReader

        database = self._folder.parent / "gangline.db"
        if not database.is_file():
            return []
        with TaskReader(database) as reader:
            page = reader.annotations(limit=_PAGE, dataset=dataset)
            found = [*page.annotations]
            while page.next is not None:
                page = reader.annotations(limit=_PAGE, before=page.next, dataset=dataset)
                found += page.annotations
        return found

    def read(self, task_id: str, session_id: str) -> SessionResult | None:
        attempts = self._store.attempts(task_id, session_id)
        return self._store.read(task_id, session_id, attempts[-1]) if attempts else None


def _by_number(session_id: str) -> tuple[str | int, ...]:
    """Sorts `task.10` after `task.9`."""
    return tuple(int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", session_id))


class ServerRecords:
    def __init__(self, address: Service) -> None:
        self._address = address

    def task(self, task_id: str) -> Iterator[SessionResult] | None:
        """Fetches results one by one: a group may exceed memory."""
        ended = run(self._ended(task_id))
        return None if ended is None else (result for one in ended if (result := self.session(one)) is not None)

    def session(self, session_id: str) -> SessionResult | None:
        return run(self._session(session_id))

    def read(self, task_id: str, session_id: str) -> SessionResult | None:
        return self.session(session_id)

    def task_ids(self) -> list[str]:
        return run(self._task_ids())

    @contextmanager
    def requests(self) -> Generator[RequestOf]:
        yield lambda task_id: run(self._request(task_id))

    def annotations(self, dataset: str) -> list[Annotation]:
        return run(self._annotations(dataset))

    async def _annotations(self, dataset: str) -> list[Annotation]:
        async with self._address.client() as client:
            page = await client.annotations(limit=_PAGE, dataset=dataset)
            found = [*page.annotations]
            while page.next is not None:
                page = await client.annotations(limit=_PAGE, before=page.next, dataset=dataset)
                found += page.annotations
        return found

    async def _task_ids(self) -> list[str]:
        async with self._address.client() as client:
            page = await client.tasks(limit=_PAGE)
            found = [task.task_id for task in page.tasks]
            while page.next is not None:
                page = await client.tasks(limit=_PAGE, before=page.next)
                found += [task.task_id for task in page.tasks]
        return sorted(found)

    async def _request(self, task_id: str) -> TaskRequest | None:
        from gangline.domain.task import TaskRequest

        async with self._address.client() as client:
            try:
                return TaskRequest.model_validate((await client.task(task_id)).request)
            except NotFound:
                return None

    async def _ended(self, task_id: str) -> list[str] | None:
        async with self._address.client() as client:
            try:
                task = await client.task(task_id)
            except NotFound:
                return None
        return [session.session_id for session in task.sessions if session.state == "ended"]

    async def _session(self, session_id: str) -> SessionResult | None:
        async with self._address.client() as client:
            try:
                return await client.session_result(session_id)
            except NotFound:
                return None
            except Conflict as error:
                raise NotFound(f"session {session_id!r} has not ended yet; `gangline status` shows it.") from error


class RegradedRecords:
    """Results with the rewards of later verdicts. Sessions without a verdict are left out."""

    def __init__(self, records: Records, path: Path) -> None:
        """path: the file of verdicts. Raises: NotFound."""
        from gangline.rows.regraded import read_regrades

        if not path.exists():
            raise NotFound(f"there are no verdicts in {path}: `gangline regrade` makes them.")
        self._records = records
        self._verdicts = read_regrades(path)

    def task(self, task_id: str) -> Iterator[SessionResult] | None:
        found = self._records.task(task_id)
        return None if found is None else (one for result in found if (one := self._changed(result)) is not None)

    def session(self, session_id: str) -> SessionResult | None:
        return self._changed(self._records.session(session_id))

    def read(self, task_id: str, session_id: str) -> SessionResult | None:
        return self._changed(self._records.read(task_id, session_id))

    def task_ids(self) -> list[str]:
        return self._records.task_ids()

    def requests(self) -> AbstractContextManager[RequestOf]:
        return self._records.requests()

    def annotations(self, dataset: str) -> list[Annotation]:
        return self._records.annotations(dataset)

    def _changed(self, result: SessionResult | None) -> SessionResult | None:
        from gangline.rows.regraded import regraded

        return None if result is None else regraded(result, self._verdicts)
