"""A real PostgreSQL for tests: a cluster of their own in a temporary folder, run by an unprivileged user."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from support.requirements import need, need_module

__all__ = ["Cluster", "running_cluster"]

_INSTALL = "sudo apt-get install -y postgresql"


class Cluster:
    """A running server; each test takes its own database."""

    def __init__(self, socket_dir: Path, control: Callable[..., None], *, is_durable: bool = False) -> None:
        """is_durable: whether commits wait for the disk."""
        self.socket_dir = socket_dir
        self._control = control
        self._fsync = "on" if is_durable else "off"
        self._numbers = count(1)

    def start(self) -> None:
        settings = f"-c listen_addresses='' -c unix_socket_directories={self.socket_dir} -c fsync={self._fsync}"
        self._control("-w", "-l", str(self.socket_dir / "log"), "-o", settings, "start")

    def stop(self) -> None:
        """As if it crashed."""
        self._control("-m", "immediate", "-w", "stop")

    def url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self.socket_dir}"

    def new_database(self, encoding: str = "UTF8") -> str:
        """URL of an empty one."""
        name = f"test{next(self._numbers)}"
        import psycopg

        with psycopg.connect(self.url("postgres"), autocommit=True) as conn:
            conn.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0")  # type: ignore[arg-type]
        return self.url(name)


@contextmanager
def running_cluster(*, is_durable: bool = False) -> Iterator[Cluster]:
    """Skips the test where PostgreSQL, or a user to run it, is missing. is_durable: see `Cluster`."""
    need_module("psycopg", "pip install 'gangline[postgres]'")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    need(found, f"PostgreSQL is missing: {_INSTALL}")
    programs = found[-1].parent
    folder = Path(tempfile.mkdtemp(prefix="gangline-pg-"))
    user = _unprivileged(folder)
    data = folder / "data"

    def run(program: str, *arguments: str) -> None:
        subprocess.run([programs / program, *arguments], check=True, capture_output=True, cwd=folder, user=user)

    try:
        run("initdb", "-D", str(data), "-U", "postgres", "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C")
        cluster = Cluster(folder, partial(run, "pg_ctl", "-D", str(data)), is_durable=is_durable)
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged(folder: Path) -> str | None:
    """The user to run it as, who is given the folder; PostgreSQL refuses root."""
    if os.getuid() != 0:
        return None
    user = pwd.getpwnam("postgres")
    os.chown(folder, user.pw_uid, user.pw_gid)
    return user.pw_name
