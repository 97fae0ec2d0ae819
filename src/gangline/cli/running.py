"""What `gangline up` leaves in its data folder for other commands, and how they find the service.

`DATA/up.json` (0600) tells urls, token and process id while the service runs. `DATA/up.lock` is held for as long: a
lock of the kernel, so that it is gone with the process, however that ended. `DATA/control_token` (0600) keeps the
token over restarts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import msgspec

from gangline.domain.errors import Conflict, ServerUnavailable
from gangline.domain.ids import new_secret
from gangline.settings import Settings

__all__ = ["Address", "Running", "find_server", "forget", "held", "keep_token", "publish", "read_running"]


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A running service. The first four fields are the line that `gangline up --json` prints."""

    server_url: str
    node_urls: tuple[str, ...]
    """Empty in a cluster, where nodes come and go: the server knows them."""
    control_token: str
    pid: int
    engine_url: str
    pids: dict[str, int]
    """Child process ids by name."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the control plane answers, and what opens it."""

    server_url: str
    control_token: str | None


def _write_private(path: Path, text: bytes) -> None:
    """Whole or not at all, readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
    temporary.replace(path)


def publish(data_dir: Path, running: Running) -> None:
    _write_private(data_dir / "up.json", msgspec.json.encode(running))


def forget(data_dir: Path) -> None:
    (data_dir / "up.json").unlink(missing_ok=True)


def keep_token(data_dir: Path, given: str | None) -> str:
    """The service's control token: the given one, else the data folder's, made on first use."""
    path = data_dir / "control_token"
    if given:
        return given
    if path.exists() and (kept := path.read_text().strip()):
        return kept
    token = new_secret("gl-control")
    _write_private(path, token.encode())
    return token


@contextlib.contextmanager
def held(data_dir: Path) -> Generator[None]:
    """Hold the data folder. Raises: Conflict when another `gangline up` holds it."""
    with (data_dir / "up.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            running = _read(data_dir)
            who = f" (pid {running.pid}, {running.server_url})" if running else ""
            raise Conflict(
                f"another `gangline up`{who} holds {data_dir}. Stop it, or choose another folder with --data."
            ) from None
        yield


def _read(data_dir: Path) -> Running | None:
    try:
        return msgspec.json.decode((data_dir / "up.json").read_bytes(), type=Running)
    except (OSError, msgspec.DecodeError):
        return None


def _is_held(data_dir: Path) -> bool:
    try:
        with (data_dir / "up.lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_running(data_dir: Path) -> Running | None:
    """The service that runs on a data folder now; None when there is none, also after a `kill -9` of it."""
    return _read(data_dir) if _is_held(data_dir) else None


def find_server(data_dir: Path | None, server_url: str | None) -> Address:
    """The server that a command should talk to: the named one, the environment's, or the data folder's.

    Raises: ServerUnavailable when there is none.
    """
    settings = Settings.from_environ()
    if url := server_url or (settings.server_url if data_dir is None else None):
        return Address(server_url=url.rstrip("/"), control_token=settings.control_token)
    folder = data_dir or settings.data_dir
    running = read_running(folder)
    if running is None:
        raise ServerUnavailable(
            f"no service is running on {folder}. Start one with `gangline up --data {folder}`, "
            "or name a server with --server URL (and its token in GANGLINE_TOKEN)."
        )
    return Address(server_url=running.server_url, control_token=running.control_token)
