"""Finds the nodes for a command: the named nodes, or the running service's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer

from gangline.domain.errors import ServerUnavailable
from gangline.settings.machine import Settings
from gangline.wire.client.running import Service, find_service, read_running

if TYPE_CHECKING:
    from gangline.wire.client.node import NodeClient

T = TypeVar("T")

_HEARD_LATELY_S = 15.0
"""Nodes send a heartbeat every three seconds."""

NodesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--node",
        help="URL of a node; repeatable. Default: all nodes of the data folder's service. For a node of another "
        "service, the token comes from GANGLINE_TOKEN.",
        show_default=False,
    ),
]


class NodeAddress(msgspec.Struct, frozen=True):
    url: str
    control_token: str | None


async def find_nodes(data_dir: Path | None, urls: list[str] | None, server_url: str | None = None) -> list[NodeAddress]:
    """server_url: use this server's nodes; None is the data folder's server. Raises: ServerUnavailable when it has no
    nodes."""
    settings = Settings.from_environ()
    folder = data_dir or settings.data_dir
    running = read_running(folder)
    own = {} if running is None else dict.fromkeys(running.node_urls, running.control_token)
    if urls:
        named = [url.rstrip("/") for url in urls]
        return [NodeAddress(url, own.get(url, settings.control_token)) for url in named]
    if own and server_url is None:
        return [NodeAddress(url, token) for url, token in own.items()]
    try:
        server = find_service(data_dir, server_url)
    except ServerUnavailable:
        raise ServerUnavailable(
            f"no service is running on {folder}. Start one with `gangline up --data {folder}`, "
            "or name a node with --node URL (and its token in GANGLINE_TOKEN)."
        ) from None
    return [NodeAddress(url, server.control_token) for url in await _heard_by(server)]


async def _heard_by(server: Service) -> list[str]:
    """Nodes known to the server, since a cluster's nodes change. Raises: ServerUnavailable."""
    from gangline.wire.client.server import ServerClient

    async with ServerClient(server.server_url, server.control_token) as client:
        nodes = (await client.status()).nodes
    if heard := [node.url for node in nodes if node.age_s < _HEARD_LATELY_S]:
        return heard
    raise ServerUnavailable(f"the server at {server.server_url} has heard no node for {_HEARD_LATELY_S:.0f} s.")


async def ask_nodes(
    data_dir: Path | None,
    urls: list[str] | None,
    question: Callable[[NodeClient], Awaitable[T]],
    server_url: str | None = None,
) -> dict[str, T]:
    """Asks all nodes at once. Returns node URL -> answer. Raises: the error of the first node that failed."""
    from gangline.wire.client.node import NodeClient

    async def ask(node: NodeAddress) -> T:
        async with NodeClient(node.url, node.control_token) as client:
            return await question(client)

    nodes = await find_nodes(data_dir, urls, server_url)
    answers = await asyncio.gather(*map(ask, nodes))
    return {node.url: found for node, found in zip(nodes, answers, strict=True)}
