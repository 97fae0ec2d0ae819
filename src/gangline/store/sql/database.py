"""The database: opens it, runs transactions and explains their errors, and moves blocking work off the event loop.

One thread writes, so that writers queue in memory instead of contending for SQLite's lock; two threads read. SQLite
runs in WAL mode with `synchronous=FULL`: answered writes survive a power cut, not only `kill -9` (docs/adr/0003).
Waiting jobs share a commit (`Writer`). With PostgreSQL other servers may write too, so each job is a separate
transaction, which locks its rows as briefly as possible. A transaction that lost against another server's is
`Contended`, and is retried (`repeated`). Nothing here depends on the meaning of the tables.

Jobs of the writer thread share commits.

Jobs that arrive while the disk is busy run in one transaction, with one commit and one sync for all of them.

Laws
- A job is answered after the commit that contains it; jobs run in the order of arrival.
- A job that raises is rolled back alone, without affecting jobs that share its commit.
- If the transaction itself fails (a full disk), all of it is rolled back, and each job runs again in its own
  transaction. This is safe because jobs have no effects before the commit.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DBAPIError, InvalidatePoolError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from gangline.domain.errors import DiskFull, InvalidRequest, NotFound, StoreError
from gangline.machine.durable import disk_full_error
from gangline.machine.private import make_private_file, make_private_folder
from gangline.settings.installation import extra_command
from gangline.store.sql.migrations import bring_up_to_date, found_version, refuse_other_version
from gangline.store.sql.schema import SCHEMA_VERSION

T = TypeVar("T")
P = ParamSpec("P")

_WRITES = "gangline_writes"
_BUSY_TIMEOUT_MS = 10_000
_MAX_TRIES = 20
_MAX_SHARED = 64
"""Jobs in one commit: readers and the first job wait for the last one."""
_PATIENCE = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
"""Seconds after which an unresponsive PostgreSQL is given up. The URL can override them."""
_WHOLE = frozenset({"UTF8", "SQL_ASCII"})
"""Encodings of PostgreSQL databases that can store any text. SQL_ASCII stores the given bytes, which are UTF-8."""
_LEFT_AT, _IDLE_S = "gangline_left_at", 1.0
_OF_ITS_OWN: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}
_LOST = frozenset({"40001", "40P01", "23505"})
"""PostgreSQL's codes for: serialization failure, deadlock, and a row that another server inserted at the same
moment.
"""

Answer = Callable[[], None]


class Writer:
    """Jobs for one thread. A job that has begun is finished even if no caller awaits it any more.

    together: one transaction for all writes on this thread inside the block; yields a list of functions to call once it
    is durable. max_shared: maximum number of jobs in one transaction.
    """

    def __init__(self, together: Callable[[], AbstractContextManager[list[Answer]]], *, max_shared: int) -> None:
        self._together = together
        self._max_shared = max_shared
        self._waiting: deque[_Job] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-writer")

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        """Callable from any thread."""
        future: Future[T] = Future()
        self._waiting.append(_Job(future, partial(job, *args)))
        self._thread.submit(self._do_waiting)
        return future

    def close(self) -> None:
        """Finishes the waiting jobs."""
        self._thread.shutdown(wait=True)

    def _do_waiting(self) -> None:
        """Runs once per submitted job; usually an earlier run has already done that job."""
        jobs = self._taken()
        if len(jobs) > 1 and self._did_together(jobs):
            return
        for job in jobs:
            job.do()

    def _taken(self) -> list[_Job]:
        jobs: list[_Job] = []
        while self._waiting and len(jobs) < self._max_shared:
            job = self._waiting.popleft()
            if job.future.set_running_or_notify_cancel():
                jobs.append(job)
        return jobs

    def _did_together(self, jobs: list[_Job]) -> bool:
        """Whether they are done and answered; if not, none of their changes are kept."""
        try:
            with self._together() as when_durable:
                answers = [job.tried() for job in jobs]
        except Exception:  # whatever broke the shared transaction: each job reports its own error
            return False
        for call in (*when_durable, *answers):
            call()
        return True


class _Job:
    def __init__(self, future: Future[Any], call: Callable[[], Any]) -> None:
        self.future = future
        self._call = call

    def do(self) -> None:
        try:
            answer = self.tried()
        except StoreError as error:
            answer = partial(self.future.set_exception, error)
        answer()

    def tried(self) -> Answer:
        """The answer, to be given once it is durable. Raises: StoreError, if the transaction may have failed."""
        try:
            found = self._call()
        except StoreError:
            raise
        except BaseException as error:
            return partial(self.future.set_exception, error)
        return partial(self.future.set_result, found)


class Contended(StoreError):
    """Another server's transaction was faster, and this one was rolled back."""


def repeated(job: Callable[P, T]) -> Callable[P, T]:
    """Retries a job that was `Contended`. The job must be one transaction, without effects before the commit."""

    @functools.wraps(job)
    def until_it_holds(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(_MAX_TRIES - 1):
            try:
                return job(*args, **kwargs)
            except Contended:
                continue
        return job(*args, **kwargs)

    return until_it_holds


def check_database(target: str | Path) -> None:
    """Checks a database without changing it; one that cannot be read is left to the server. Raises: OtherVersion if it
    has a later version.
    """
    with suppress(NotFound, InvalidRequest, SQLAlchemyError):
        engine = _engine(_url(target, read_only=True))
        with engine.connect() as conn:
            if (found := found_version(conn) or 0) > SCHEMA_VERSION:
                refuse_other_version(conn, found)
        engine.dispose()


class Database:
    """An open database. `close()` is idempotent.

    target: path of an SQLite file (created with its folder if missing), or a URL, `postgresql://...` or `sqlite://...`.
    read_only: for reading a data folder, whether its server runs or not. Raises: NotFound (read_only, no such file),
    InvalidRequest (unknown kind of database, or one that cannot store any text), StoreError, DiskFull.
    """

    def __init__(self, target: str | Path, *, read_only: bool = False) -> None:
        self.url = _url(target, read_only=read_only)
        self.shared = self.url.get_backend_name() == "postgresql"
        """Whether other servers may write to it."""
        self._engine = _engine(self.url)
        self._as_snapshot: dict[str, Any] = {}
        if self.shared:
            self._as_snapshot = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        else:
            _speak_sqlite(self._engine, read_only=read_only)
        self._here = _Here()
        self._writer = Writer(self._together, max_shared=1 if self.shared else _MAX_SHARED)
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="store-reader")
        try:
            self._open(create=not read_only)
        except BaseException:
            self.close()
            raise

    def _open(self, *, create: bool) -> None:
        if self.shared:
            with self.reading() as conn:
                _refuse_encoding(conn.exec_driver_sql("SHOW server_encoding").scalar_one())
        if create:
            with self.writing() as conn:
                bring_up_to_date(conn)
            return
        with self.reading() as conn:
            refuse_other_version(conn, found_version(conn))

    @contextmanager
    def writing(self) -> Generator[sa.Connection]:
        """One write transaction on the calling thread: committed at the end of the block, rolled back if it raises.

        On the writer's thread it may be part of a transaction that jobs share; `when_durable` reports the commit.
        """
        if self._here.conn is not None:
            with _explained(), self._here.conn.begin_nested():
                yield self._here.conn
            return
        with _explained(), self._engine.connect().execution_options(**{_WRITES: True}) as conn, conn.begin():
            yield conn

    def when_durable(self, call: Callable[[], None]) -> None:
        """Call it after `writing`: calls the function once the changes are durable, which is now or with the shared
        commit.
        """
        if self._here.conn is None:
            call()
        else:
            self._here.when_durable.append(call)

    @contextmanager
    def _together(self) -> Generator[list[Callable[[], None]]]:
        with self.writing() as conn:
            self._here.conn, self._here.when_durable = conn, []
            try:
                yield self._here.when_durable
            finally:
                self._here.conn = None

    @contextmanager
    def reading(self, *, once: bool = False) -> Generator[sa.Connection]:
        """One consistent snapshot on the calling thread. once: for a single statement, which needs no transaction."""
        options = _OF_ITS_OWN if once and self.shared else self._as_snapshot
        with _explained(), self._engine.connect().execution_options(**options) as conn, conn.begin():
            yield conn

    async def run(self, job: Callable[..., T], *args: Any) -> T:
        """Run a blocking job on the writer thread. A job that began is finished even if its caller is cancelled."""
        return await asyncio.wrap_future(self._writer.submit(job, *args))

    def run_blocking(self, job: Callable[..., T], *args: Any) -> T:
        """Run a job on the writer thread and wait for it, from another thread."""
        return self._writer.submit(job, *args).result()

    async def query(self, job: Callable[..., T], *args: Any) -> T:
        """Run a blocking job on a reader thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, job, *args)

    def close(self) -> None:
        self._writer.close()
        self._readers.shutdown(wait=True)
        self._engine.dispose()


class _Here(threading.local):
    """The transaction shared by this thread's jobs, if any."""

    conn: sa.Connection | None = None
    when_durable: list[Callable[[], None]]


def _url(target: str | Path, *, read_only: bool) -> sa.URL:
    if isinstance(target, str) and "://" in target:
        return _known_url(target)
    path = Path(target).absolute()
    if not read_only:
        make_private_folder(path.parent)
        make_private_file(path)  # SQLite creates the -wal and -shm files with the same mode
        for beside in (path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
            if beside.exists():
                make_private_file(beside)
        return sa.URL.create("sqlite", database=str(path))
    if not path.exists():
        raise NotFound(f"no Gangline database at {path}; `gangline up` makes one, --data names another folder.")
    return sa.URL.create("sqlite", database=path.as_uri(), query={"mode": "ro", "uri": "true"})


def _known_url(target: str) -> sa.URL:
    """Raises: InvalidRequest."""
    kind = target.partition("://")[0]
    if kind not in ("postgresql", "postgres", "postgresql+psycopg", "sqlite"):
        raise InvalidRequest(f"a database is postgresql://HOST/NAME or a file; {kind[:40]}:// is neither.")
    try:
        url = sa.make_url(target)
    except (ArgumentError, ValueError) as error:
        raise InvalidRequest(f"the database's URL cannot be read: {type(error).__name__}.") from None
    return url if kind == "sqlite" else url.set(drivername="postgresql+psycopg")


def _engine(url: sa.URL) -> sa.Engine:
    """Raises: InvalidRequest if the driver is not installed."""
    if url.get_backend_name() == "sqlite":
        return sa.create_engine(url)
    patience = {name: value for name, value in _PATIENCE.items() if name not in url.query}
    try:
        engine = sa.create_engine(url, connect_args=patience | {"client_encoding": "utf8"})
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"{url.get_backend_name()} needs the Python package {error.name!r}: {extra_command('postgres')}"
        ) from error
    _try_idle(engine)
    return engine


def _try_idle(engine: sa.Engine) -> None:
    """Test idle connections before use, because the database may have been restarted. A connection that was just in use
    would have failed, after which the pool drops all of them.
    """

    def on_checkin(_connection: Any, record: ConnectionPoolEntry) -> None:
        record.info[_LEFT_AT] = time.monotonic()

    def on_checkout(connection: Any, record: ConnectionPoolEntry, _proxy: Any) -> None:
        if time.monotonic() - record.info.get(_LEFT_AT, -math.inf) < _IDLE_S:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error

    event.listen(engine, "checkin", on_checkin)
    event.listen(engine, "checkout", on_checkout)


def _refuse_encoding(encoding: str) -> None:
    """Raises: InvalidRequest."""
    if encoding not in _WHOLE:
        raise InvalidRequest(
            f"the database's encoding is {encoding}, which cannot keep any text: make one with"
            " CREATE DATABASE gangline ENCODING 'UTF8' TEMPLATE template0."
        )


def _speak_sqlite(engine: sa.Engine, *, read_only: bool) -> None:
    """Set up every connection, and begin transactions ourselves, because the driver would begin them too late."""

    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA foreign_keys=ON")
        if not read_only:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")

    def on_begin(conn: sa.Connection) -> None:
        # SQLite would refuse at once a writer that began as a reader, instead of making it wait.
        writes = conn.get_execution_options().get(_WRITES, False)
        conn.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)


@contextmanager
def _explained() -> Generator[None]:
    try:
        yield
    except DBAPIError as error:
        if _is_lost(error):
            raise Contended(f"another server was faster: {error.orig}") from error
        if not isinstance(error, OperationalError):
            raise StoreError(f"the database refused: {error.orig}") from error
        raise _disk_full(error) or StoreError(f"the database failed: {error.orig}") from error


def _disk_full(error: DBAPIError) -> DiskFull | None:
    """SQLite reports a full disk without the system's error number."""
    if "database or disk is full" in str(error):
        return disk_full_error(OSError(errno.ENOSPC, ""), "the database")
    return None


def _is_lost(error: DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) in _LOST
