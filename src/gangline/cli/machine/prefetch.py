"""`gangline image prefetch`: the images of a task file, pulled before sessions need them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from gangline.cli.service.node_addresses import NodeAddress, NodesOption, find_nodes
from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, notes, print_json, printable, run
from gangline.domain.errors import GanglineError, ServerUnavailable
from gangline.settings.machine import Settings

if TYPE_CHECKING:
    from gangline.domain.image_store import HeldImage
    from gangline.sandbox.images.supply import ImageSupply

_HERE = "this machine"
_ASKED_AT_ONCE = 8
"""Requests to one machine, which limits its pulls itself."""

Bring = Callable[[str, str], Awaitable["HeldImage"]]
"""Called with a runtime and an image."""


class Prefetched(msgspec.Struct, frozen=True, kw_only=True):
    """One image on one machine."""

    where: str
    runtime: str
    image: str
    digest: str | None = None
    size_bytes: int | None = None
    took_s: float
    error: str | None = None


def prefetch(
    tasks: Annotated[str, typer.Argument(metavar="TASKS", help="A task file: JSON, JSON lines or TOML; - is stdin.")],
    local: Annotated[
        bool, typer.Option("--local", help="Pull on this machine, with its own engines, also while a service runs.")
    ] = False,
    at_once: Annotated[
        int,
        typer.Option("--at-once", min=1, help="Images that this machine pulls at once; nodes have their own limit."),
    ] = 3,
    data: DataOption = None,
    node: NodesOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pull the images of all tasks in a file, with those of their graders, environments and services.

    On every node of the running service; without one, on this machine. Images that are there stay as they are.
    """
    wanted = _wanted(tasks)
    found = run(_prefetched(wanted, data, node, server, at_once=at_once, is_local=local))
    failed = [one for one in found if one.error is not None]
    if as_json:
        print_json(found)
    else:
        machines = {one.where for one in found}
        notes().print(f"Images: {len(wanted)}; machines: {len(machines)}; failed: {len(failed)}.")
    if failed:
        raise typer.Exit(Exit.FAILED)


def _wanted(source: str) -> list[tuple[str, str]]:
    """Runtime and image, each once, in the file's order. Raises: InvalidRequest."""
    from gangline.cli.tasks.files import read_tasks, validated
    from gangline.domain.placement import specs_of
    from gangline.sandbox.images.supply import images_of
    from gangline.settings import plugins

    agent = {"agent": {"harness": "shell", "settings": {"command": "true"}}}  # a file may leave it to `submit`
    requests = [validated({**agent, **body}, f"{source}, task {at}") for at, body in enumerate(read_tasks(source))]
    found = [(spec.backend, image) for one in requests for spec in specs_of(one) for image in images_of(spec)]
    stores = {runtime: plugins.make_runtime(runtime).image_store for runtime in dict(found)}
    return [(runtime, image) for runtime, image in dict.fromkeys(found) if stores[runtime] is not None]


async def _prefetched(
    wanted: list[tuple[str, str]],
    data: Path | None,
    urls: list[str] | None,
    server: str | None,
    *,
    at_once: int,
    is_local: bool,
) -> list[Prefetched]:
    from contextlib import AsyncExitStack

    from gangline.wire.client.node import NodeClient

    nodes: list[NodeAddress] = []
    if not is_local:
        try:
            nodes = await find_nodes(data, urls, server)
        except ServerUnavailable:
            if urls or server is not None or Settings.from_environ().server_url is not None:
                raise
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(NodeClient(one.url, one.control_token)) for one in nodes]
        machines: dict[str, Bring] = {client.url: client.prefetch for client in clients}
        if not clients:
            images = _own(at_once)
            stack.push_async_callback(images.pulls.close)
            machines = {_HERE: images.prefetch}
        return await _all(machines, wanted, max(at_once, _ASKED_AT_ONCE))


def _own(at_once: int) -> ImageSupply:
    from gangline.sandbox.images.pulling import Pulls
    from gangline.sandbox.images.supply import ImageSupply

    return ImageSupply(Pulls(at_once=at_once, mirrors=Settings.from_environ().image_mirrors))


async def _all(machines: Mapping[str, Bring], wanted: Iterable[tuple[str, str]], at_once: int) -> list[Prefetched]:
    """Print each image when it is there, or the reason why it is not."""
    places = {where: asyncio.Semaphore(at_once) for where in machines}
    calls = [_one(where, places[where], bring, *one) for one in wanted for where, bring in machines.items()]
    found: list[Prefetched] = []
    for done in asyncio.as_completed(calls):
        found.append(one := await done)
        line = f"[{len(found)}/{len(calls)}] {one.image} on {one.where}: "
        line += f"{one.digest} after {one.took_s:.1f} s" if one.error is None else f"failed: {printable(one.error)}"
        notes().print(line, markup=False)
    return sorted(found, key=lambda one: (one.where, one.runtime, one.image))


async def _one(where: str, places: asyncio.Semaphore, bring: Bring, runtime: str, image: str) -> Prefetched:
    async with places:
        began_at = time.monotonic()
        fields: dict[str, Any]
        try:
            held = await bring(runtime, image)
            fields = {"digest": held.digest, "size_bytes": held.size_bytes}
        except GanglineError as error:
            fields = {"error": error.message}
        return Prefetched(where=where, runtime=runtime, image=image, took_s=time.monotonic() - began_at, **fields)
