"""Runs the server: its folder, address and background work, and a clean shutdown."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gangline.domain.errors import Conflict, StoreError
from gangline.domain.task import TaskRequest
from gangline.domain.views import TaskView
from gangline.machine.durable import acquire, write_once
from gangline.machine.private import close_to_others, open_data_folder
from gangline.server.app import MAX_RESULT_BYTES, MAX_TASK_BYTES, create_app
from gangline.server.parts import ServerPlace, server_parts
from gangline.server.service.callbacks import CallbackSender
from gangline.server.service.core import RolloutService
from gangline.server.service.durable_turns import TurnRecords
from gangline.server.service.housekeeping import Housekeeper, follow_forever
from gangline.server.service.task_watch import TaskWatch
from gangline.settings import plugins
from gangline.settings.addresses import local_url, reachable_url
from gangline.store.audit import ActionLog
from gangline.store.journal.turns import TURNS_FOLDER, TurnStore
from gangline.store.results.files import Results, ResultStore
from gangline.store.sql.outbox import Outbox
from gangline.store.sql.retention import Keep
from gangline.store.sql.tasks import TaskStore
from gangline.wire.http.listening import listening
from gangline.wire.http.same_origin import OwnNames, refuse_open_door
from gangline.wire.http.visitors import Visitors


class Running(NamedTuple):
    """A running server."""

    url: str
    work: Sequence[asyncio.Task[None]]

    async def wait(self) -> None:
        """Wait until cancelled. Raises: the error that ended its background work, which is a bug."""
        done, _ = await asyncio.wait(self.work, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


class Storage(NamedTuple):
    """Where the server's data is stored, and how much of it is kept."""

    database_url: str | None = None
    """None is SQLite in the data folder."""
    results_url: str | None = None
    """A folder, or any fsspec URL; None is in the data folder. Servers that share a database must share this too."""
    keep: Keep = Keep()


ONE_MACHINE = Storage()
"""Everything in the data folder, and nothing is deleted."""


def database_path(data_dir: Path) -> Path:
    return data_dir / "server" / "gangline.db"


def results_path(data_dir: Path) -> Path:
    return data_dir / "server" / "results"


async def serve(
    *,
    data_dir: Path,
    control_token: str | None,
    host: str = "127.0.0.1",
    port: int = 0,
    public_url: str | None = None,
    allowed_hosts: Sequence[str] = (),
    on_ready: Callable[[str], None] | None = None,
    lease_s: float = 30.0,
    sweep_every_s: float = 2.0,
    storage: Storage = ONE_MACHINE,
    on_task_ended: Callable[[TaskView], None] | None = None,
) -> None:
    """Serve until cancelled. `on_ready` is called with the base URL for this machine.

    control_token: required on every route except /health. None requires nothing. public_url: the URL for others, for
    callbacks. None is the address it listens on, or the machine's name. allowed_hosts: further names under which the
    server is reached. on_task_ended: called on the event loop with each task that this server ended.

    Raises: PortUnavailable. InvalidRequest if the address would be open to others without a control token. Conflict if
    another server uses the data folder. StoreError, DiskFull.
    """
    await asyncio.to_thread(plugins.log_refusals)
    async with serving(
        data_dir=data_dir,
        host=host,
        port=port,
        control_token=control_token,
        public_url=public_url,
        allowed_hosts=allowed_hosts,
        lease_s=lease_s,
        sweep_every_s=sweep_every_s,
        storage=storage,
        on_task_ended=on_task_ended,
    ) as running:
        if on_ready is not None:
            on_ready(running.url)
        await running.wait()


@asynccontextmanager
async def serving(
    *,
    data_dir: Path,
    control_token: str | None,
    host: str = "127.0.0.1",
    port: int = 0,
    public_url: str | None = None,
    allowed_hosts: Sequence[str] = (),
    lease_s: float = 30.0,
    sweep_every_s: float = 2.0,
    callback_base_s: float = 1.0,
    retry_base_s: float = 1.0,
    storage: Storage = ONE_MACHINE,
    check_task: Callable[[TaskRequest], None] = plugins.check_task,
    on_task_ended: Callable[[TaskView], None] | None = None,
) -> AsyncGenerator[Running]:
    """A running server inside the block. Access without a token requires an explicit `control_token=None`.

    Long because it puts all together, in order.

    Raises: as `serve`.
    """
    refuse_open_door(host, control_token)
    names = OwnNames(host, public_url=public_url, allowed_hosts=allowed_hosts)
    folder = data_dir / "server"
    await asyncio.to_thread(_open_folders, data_dir, folder)
    async with AsyncExitStack() as stack:
        stack.enter_context(_only_server(folder))
        store = await asyncio.to_thread(_open_store, storage, data_dir, lease_s=lease_s, retry_base_s=retry_base_s)
        stack.push_async_callback(asyncio.to_thread, store.close)
        results, turns = await asyncio.to_thread(_places, storage, data_dir, store.database.shared)
        service = RolloutService(
            store,
            results,
            turns=turns,
            check_task=check_task,
            sweep_every_s=sweep_every_s,
            control_token=control_token,
        )
        stack.push_async_callback(asyncio.to_thread, service.close)
        await service.start()
        parts = server_parts(ServerPlace(service, control_token, data_dir, MAX_TASK_BYTES, MAX_RESULT_BYTES))
        app = create_app(
            service,
            parts=parts,
            control_token=control_token,
            names=names,
            actions=ActionLog(folder / "actions", where="server"),
            visitors=Visitors(await asyncio.to_thread(_page_secret, folder), control_token),
            index_path=folder / "find.db",
        )
        _, bound_port = await stack.enter_async_context(listening(app, shutdown_s=2.0, host=host, port=port))
        stack.callback(service.stop)
        own_url = reachable_url(host, bound_port, public_url)
        callback_sender = CallbackSender(
            Outbox(store.database),
            service.notifier,
            public_url=own_url,
            forms={form: body for part in parts for form, body in part.callbacks().items()},
            control_token=control_token,
            base_s=callback_base_s,
        )
        watch = None if on_task_ended is None else TaskWatch(service, on_task_ended)
        own_work = [work for part in parts for work in part.work(own_url)]
        work = await stack.enter_async_context(_background(service, callback_sender, own_work, storage.keep, watch))
        yield Running(local_url(host, bound_port), work)


@asynccontextmanager
async def _background(
    service: RolloutService,
    callback_sender: CallbackSender,
    more: Sequence[Coroutine[Any, Any, None]],
    keep: Keep,
    watch: TaskWatch | None,
) -> AsyncGenerator[Sequence[asyncio.Task[None]]]:
    """Sweeps, delivers callbacks, deletes old data and follows other servers inside the block."""
    work = [
        asyncio.create_task(service.sweep_forever(), name="server.sweep"),
        asyncio.create_task(callback_sender.deliver_forever(), name="server.callbacks"),
        *map(asyncio.create_task, more),
        asyncio.create_task(service.metrics.loop_lag.watch(), name="server.loop_lag"),
        asyncio.create_task(Housekeeper(service, keep).tidy_forever(), name="server.tidy"),
    ]
    if watch is not None:
        work.append(asyncio.create_task(watch.tell_forever(), name="server.task_watch"))
    if service.store.database.shared:
        work.append(asyncio.create_task(follow_forever(service), name="server.follow"))
    try:
        yield work
    finally:
        for task in work:
            task.cancel()
        await asyncio.wait(work)


def _places(storage: Storage, data_dir: Path, is_shared: bool) -> tuple[Results, TurnRecords]:
    return _results(storage, data_dir), turn_store(storage, data_dir, is_shared=is_shared)


def _results(storage: Storage, data_dir: Path) -> Results:
    """Raises: InvalidRequest."""
    if storage.results_url is None:
        return ResultStore(results_path(data_dir))
    if "://" not in storage.results_url:
        return ResultStore(Path(storage.results_url), shared=True)
    from gangline.store.results.artifacts import ArtifactResults  # noqa: PLC0415 - it needs an extra

    return ArtifactResults(storage.results_url)


def turn_store(storage: Storage, data_dir: Path, *, is_shared: bool) -> TurnRecords:
    """Next to the results if these are in a folder, or if there are other servers; otherwise in the data folder."""
    if storage.results_url is None:
        return TurnStore(results_path(data_dir).with_name("turns"))
    if "://" not in storage.results_url:
        return TurnStore(Path(storage.results_url) / TURNS_FOLDER)
    if not is_shared:
        return TurnStore(results_path(data_dir).with_name("turns"))
    from gangline.store.journal.object_turns import ObjectTurns  # noqa: PLC0415 - it needs an extra

    return ObjectTurns(f"{storage.results_url.rstrip('/')}/{TURNS_FOLDER}")


def _open_store(storage: Storage, data_dir: Path, *, lease_s: float, retry_base_s: float) -> TaskStore:
    return TaskStore(storage.database_url or database_path(data_dir), lease_s=lease_s, retry_base_s=retry_base_s)


def _open_folders(data_dir: Path, folder: Path) -> None:
    """Raises: StoreError."""
    try:
        open_data_folder(data_dir)
        close_to_others(folder)
    except OSError as error:
        raise StoreError(f"the data folder {data_dir} cannot be used: {error.strerror}.") from error


def _page_secret(folder: Path) -> bytes:
    """The secret for the cookies of signed-in browsers, created once so that they survive a restart."""
    path = folder / "page_secret"
    write_once(path, secrets.token_hex(32).encode())
    return path.read_bytes()


@contextmanager
def _only_server(folder: Path) -> Generator[None]:
    """Lock the folder against a second server. The kernel releases it when this process ends, for whatever reason."""
    try:
        descriptor = acquire(folder / "lock")
    except BlockingIOError as error:
        raise Conflict(f"another server is using {folder}; stop it, or choose another --data folder.") from error
    try:
        yield
    finally:
        os.close(descriptor)
