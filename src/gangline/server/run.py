"""Running the server: its folder, its address, its background work, and a clean end."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import ipaddress
import os
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from gangline import plugins
from gangline.domain.errors import Conflict, InvalidRequest, PortUnavailable
from gangline.domain.task import TaskRequest
from gangline.server.app import create_app
from gangline.server.callbacks import Courier
from gangline.server.service import RolloutService
from gangline.settings import local_url, reachable_url
from gangline.store.outbox import Outbox
from gangline.store.results import ResultStore
from gangline.store.tasks import TaskStore

__all__ = ["Running", "database_path", "results_path", "serve", "serving"]


class Running(NamedTuple):
    """A running server."""

    url: str
    work: Sequence[asyncio.Task[None]]

    async def wait(self) -> None:
        """Until cancelled. Raises: what ended its background work, which is a defect of ours."""
        done, _ = await asyncio.wait(self.work, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


def database_path(data_dir: Path) -> Path:
    return data_dir / "server" / "gangline.db"


def results_path(data_dir: Path) -> Path:
    return data_dir / "server" / "results"


async def serve(
    *,
    data_dir: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    control_token: str | None = None,
    public_url: str | None = None,
    on_ready: Callable[[str], None] | None = None,
    lease_s: float = 30.0,
    sweep_every_s: float = 2.0,
) -> None:
    """Serve until cancelled. `on_ready` is given the base URL, as this machine reaches it.

    public_url: as others do, for callbacks; None is the address that it listens on, or the machine's name.

    Raises: PortUnavailable; InvalidRequest when the address would be open to others without a control token;
    Conflict when another server has the data folder; StoreError, DiskFull.
    """
    async with serving(
        data_dir=data_dir,
        host=host,
        port=port,
        control_token=control_token,
        public_url=public_url,
        lease_s=lease_s,
        sweep_every_s=sweep_every_s,
    ) as running:
        if on_ready is not None:
            on_ready(running.url)
        await running.wait()


@asynccontextmanager
async def serving(
    *,
    data_dir: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    control_token: str | None = None,
    public_url: str | None = None,
    lease_s: float = 30.0,
    sweep_every_s: float = 2.0,
    callback_base_s: float = 1.0,
    check_task: Callable[[TaskRequest], None] = plugins.check_task,
) -> AsyncGenerator[Running]:
    """A running server inside the block. Raises: as `serve`."""
    _refuse_open_door(host, control_token)
    folder = data_dir / "server"
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    with _only_server(folder):
        store = await asyncio.to_thread(lambda: TaskStore(database_path(data_dir), lease_s=lease_s))
        try:
            results = ResultStore(results_path(data_dir))
            service = RolloutService(store, results, check_task=check_task, sweep_every_s=sweep_every_s)
            await service.start()
            app = create_app(service, control_token=control_token)
            async with _listening(app, service, host, port) as bound_port:
                courier = Courier(
                    Outbox(store.database),
                    service.bells,
                    public_url=reachable_url(host, bound_port, public_url),
                    control_token=control_token,
                    base_s=callback_base_s,
                )
                async with _background(service, courier) as work:
                    yield Running(local_url(host, bound_port), work)
        finally:
            await asyncio.to_thread(store.close)


@asynccontextmanager
async def _background(service: RolloutService, courier: Courier) -> AsyncGenerator[Sequence[asyncio.Task[None]]]:
    """Sweeping and delivering, for as long as the block lasts."""
    work = (
        asyncio.create_task(service.sweep_forever(), name="server.sweep"),
        asyncio.create_task(courier.deliver_forever(), name="server.callbacks"),
    )
    try:
        yield work
    finally:
        for task in work:
            task.cancel()
        await asyncio.wait(work)


@asynccontextmanager
async def _listening(app: web.Application, service: RolloutService, host: str, port: int) -> AsyncGenerator[int]:
    """The port that it listens on. Raises: PortUnavailable."""
    # A handler is cancelled when its client leaves: a node that is gone must not be given sessions.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            why = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
            raise PortUnavailable(f"cannot listen on {host}:{port}: {why}; choose another --port, or 0.") from error
        yield runner.addresses[0][1]
    finally:
        service.stop()
        await runner.cleanup()


def _refuse_open_door(host: str, control_token: str | None) -> None:
    if control_token or _is_loopback(host):
        return
    raise InvalidRequest(
        f"{host} can be reached from elsewhere, and no control token is set: anyone could run commands here. "
        "Set GANGLINE_TOKEN, or listen on 127.0.0.1."
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def _only_server(folder: Path) -> Generator[None]:
    """Hold the folder against a second server; the kernel lets go when this process ends, however it ends."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(f"another server is using {folder}; stop it, or choose another --data folder.") from error
        yield
    finally:
        os.close(descriptor)
