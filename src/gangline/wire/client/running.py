"""Files that `gangline up` and `gangline server` leave in a data folder for other commands, and the search for a
service.

`DATA/up.json` (0600) has urls, token and process id while `up` runs. `DATA/up.lock` is locked during that time; the
kernel releases the lock when the process ends for any reason. `DATA/server/running.json` and `DATA/server/lock` are the
same for a server, alone or as a part of `up`. `DATA/control_token` (0600) keeps the token across restarts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gangline.domain.errors import Conflict, InvalidRequest, ServerUnavailable
from gangline.domain.ids import new_secret
from gangline.machine.durable import acquire, is_locked, write_once, write_whole
from gangline.machine.private import open_data_folder
from gangline.settings.machine import Settings

if TYPE_CHECKING:
    from gangline.wire.client.server import ServerClient
    from gangline.wire.client.sync import SyncServerClient


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A running service. The first four fields are the line printed by `gangline up --json`."""

    server_url: str
    node_urls: tuple[str, ...]
    """Empty for a cluster, where nodes come and go: the server knows them."""
    control_token: str
    pid: int
    engine_url: str
    pids: dict[str, int]
    """Child process ids by name."""


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """A running server."""

    urls: tuple[str, ...]
    """The URL for this machine, then those for others."""
    control_token: str | None
    pid: int


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A service's address and its control token."""

    server_url: str
    control_token: str | None

    def client(self) -> ServerClient:
        """A client for asynchronous code: `async with service.client() as client:`."""
        from gangline.wire.client.server import ServerClient  # noqa: PLC0415 - commands without requests load no HTTP

        return ServerClient(self.server_url, self.control_token)

    def sync_client(self) -> SyncServerClient:
        """A client for scripts and notebooks: `with service.sync_client() as client:`."""
        from gangline.wire.client.sync import SyncServerClient  # noqa: PLC0415 - as above

        return SyncServerClient(self.server_url, self.control_token)


def publish(data_dir: Path, running: Running) -> None:
    write_whole(data_dir / "up.json", msgspec.json.encode(running))


def forget(data_dir: Path) -> None:
    (data_dir / "up.json").unlink(missing_ok=True)


def publish_server(data_dir: Path, server: RunningServer) -> None:
    """Call while the server holds `DATA/server/lock`."""
    write_whole(data_dir / "server" / "running.json", msgspec.json.encode(server))


def read_server(data_dir: Path) -> RunningServer | None:
    """The server that currently runs on a data folder, if any."""
    if not is_locked(data_dir / "server" / "lock"):
        return None
    try:
        return msgspec.json.decode((data_dir / "server" / "running.json").read_bytes(), type=RunningServer)
    except (OSError, msgspec.MsgspecError):
        return None


def service_token(data_dir: Path, given: str | None, *, no_token: bool) -> str | None:
    """The token that a service requires; None for `--no-token`. Raises: InvalidRequest."""
    if no_token:
        refuse_both(given)
        return None
    return keep_token(data_dir, given)


def refuse_both(given: str | None) -> None:
    """Raises: InvalidRequest if a token is set together with `--no-token`."""
    if given:
        raise InvalidRequest("--no-token contradicts GANGLINE_TOKEN, which is set: leave out one of them.")


def keep_token(data_dir: Path, given: str | None) -> str:
    """The service's control token: the given one, else the data folder's, which is created on first use."""
    path = data_dir / "control_token"
    if given:
        return given
    if not path.exists():
        open_data_folder(data_dir)
        write_once(path, new_secret("gl-control").encode())
    if token := path.read_text().strip():
        return token
    raise InvalidRequest(f"{path} is empty: remove it, and a new control token is made.")


@contextlib.contextmanager
def held(data_dir: Path) -> Generator[None]:
    """Lock the data folder. Raises: Conflict if another `gangline up` has locked it."""
    try:
        lock = acquire(data_dir / "up.lock")
    except BlockingIOError:
        running = _read(data_dir)
        who = f" (pid {running.pid}, {running.server_url})" if running else ""
        raise Conflict(
            f"another `gangline up`{who} holds {data_dir}. Stop it, or choose another folder with --data."
        ) from None
    try:
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        os.close(lock)


def holder(data_dir: Path) -> int | None:
    """Process id of the `gangline up` that has locked a data folder, ready or not; None if there is none."""
    lock = data_dir / "up.lock"
    if not is_locked(lock):
        return None
    with contextlib.suppress(OSError, ValueError):
        return int(lock.read_text())
    return None


def _read(data_dir: Path) -> Running | None:
    try:
        return msgspec.json.decode((data_dir / "up.json").read_bytes(), type=Running)
    except (OSError, msgspec.DecodeError):
        return None


def read_running(data_dir: Path) -> Running | None:
    """The service that currently runs on a data folder; None if there is none, also after `kill -9`."""
    return _read(data_dir) if is_locked(data_dir / "up.lock") else None


def find_service(data_dir: Path | None = None, server_url: str | None = None) -> Service:
    """Find the server to use: the given one, the environment's, or the data folder's.

    data_dir: the folder of `gangline up --data`; None: the default. The folder's token is sent only to the server that
    runs on that folder, never to another given server.
    Raises: ServerUnavailable if there is no server.
    """
    settings = Settings.from_environ()
    folder = data_dir or settings.data_dir
    own = _addresses(folder)
    if url := server_url or (settings.server_url if data_dir is None else None):
        # Compare with the address known to be ours: others may listen elsewhere on `localhost`.
        plain = url.rstrip("/").replace("://localhost", "://127.0.0.1", 1)
        found = next((address for address in own if address.server_url == plain), None)
        if found is None or settings.control_token:
            return Service(server_url=url.rstrip("/"), control_token=settings.control_token)
        return found
    if own:
        return own[0]
    raise ServerUnavailable(
        f"no service is running on {folder}. Start one with `gangline up --data {folder}`, "
        "or name a server with --server URL (and its token in GANGLINE_TOKEN)."
    )


def _addresses(folder: Path) -> list[Service]:
    """All addresses of the service on a data folder. `up` comes first: its server may be restarting."""
    up, server = read_running(folder), read_server(folder)
    found = [] if up is None else [Service(server_url=up.server_url, control_token=up.control_token)]
    if server is not None:
        found += [Service(server_url=url, control_token=server.control_token) for url in server.urls]
    return found
