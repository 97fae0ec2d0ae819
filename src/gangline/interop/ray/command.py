"""`gangline cluster`: runs nodes on the machines of a Ray cluster, for a running server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import typer

from gangline.cli.options.settings import CLUSTER, with_settings
from gangline.cli.processes.serving import GRACE_S, ParentOption, serve
from gangline.cli.terminal.output import JsonOption
from gangline.domain.errors import InvalidRequest, NodeError
from gangline.settings.installation import extra_command
from gangline.settings.service import ClusterSettings, Resolved
from gangline.wire.client.running import find_service

if TYPE_CHECKING:
    from gangline.interop.ray.node_command import ClusterNode
    from gangline.interop.ray.nodes import Size
    from gangline.interop.ray.ray import Machine, Needs
    from gangline.wire.client.server import ServerClient

_STOP_WAIT_S = GRACE_S - 3
"""The rest of our own grace period is for Ray."""
_EVERYWHERE = ("0.0.0.0", "::")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@with_settings(CLUSTER)
def cluster(settings: Resolved, as_json: JsonOption = False, parent: ParentOption = None) -> None:
    """Run nodes on a Ray cluster for a running server. Needs the extra `cluster`.

    Prints one line of JSON with Ray's address when the first node is ready, and runs the nodes until SIGTERM: one on
    each machine, also when one joins later; or `--nodes`; or with `--max-nodes` as many as the sessions ask for.
    Ray places and restarts them. `gangline up --cluster` also runs the server.
    """
    if not settings.node.engines and not settings.node.engines_later:
        raise InvalidRequest(
            "nodes need an engine: give its URL behind `--`, or as `engines` in [node]; or --engines-later there, "
            "where a trainer gives them."
        )
    require_ray()
    _check_bounds(settings.cluster)
    from gangline.interop.ray.node_command import ClusterNode

    address = find_service(settings.option("data_dir"), settings.option("server_url"))
    work = ClusterNode(
        data_dir=(settings.cluster.node_data or settings.machine.data_dir).absolute(),
        server_url=address.server_url,
        control_token=address.control_token,
        settings=settings.node.model_dump_json(),
        log_format=settings.machine.log_format,
    )
    serve(
        lambda on_ready: _keep(work, settings.cluster, settings.node.run_slots, on_ready),
        kind="cluster",
        parent=parent,
        log_format=settings.machine.log_format,
    )


def require_ray() -> None:
    """Raises: InvalidRequest."""
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        raise InvalidRequest(f"a cluster needs Ray, which is not installed: {extra_command('cluster')}")


def _check_bounds(wanted: ClusterSettings) -> None:
    """Raises: InvalidRequest."""
    if wanted.max_nodes is None:
        return
    if wanted.num_nodes is not None:
        raise InvalidRequest("--nodes is a fixed number, and --max-nodes follows the sessions: give one of them.")
    if wanted.min_nodes > wanted.max_nodes:
        raise InvalidRequest(f"--min-nodes {wanted.min_nodes} is above --max-nodes {wanted.max_nodes}.")
    if not any((wanted.node_cpus, *wanted.node_resources.values())):
        raise InvalidRequest(
            "Ray starts no machine for a node that requests nothing of it. With --max-nodes give --node-cpus, or "
            "--node-resources."
        )


async def _keep(work: ClusterNode, wanted: ClusterSettings, run_slots: int, on_ready: Callable[[str], None]) -> None:
    import msgspec

    from gangline.interop.ray.nodes import RayNodes
    from gangline.interop.ray.ray import Needs, connected, machines, own_host
    from gangline.wire.client.server import ServerClient

    needs = Needs(cpus=wanted.node_cpus, resources=wanted.node_resources)
    async with connected(wanted.ray_address) as address:
        found = await asyncio.to_thread(machines)
        server_url = url_for_nodes(work.server_url, own_host(), [one.host for one in found])
        async with ServerClient(server_url, work.control_token) as server:
            nodes = RayNodes(
                msgspec.structs.replace(work, server_url=server_url),
                size=_size(wanted, needs, found, run_slots, server, work.control_token),
                needs=needs,
                stop_wait_s=_STOP_WAIT_S,
                on_ready=lambda: on_ready(address),
            )
            await nodes.keep()


def _size(
    wanted: ClusterSettings,
    needs: Needs,
    found: list[Machine],
    run_slots: int,
    server: ServerClient,
    control_token: str | None,
) -> Size:
    """Raises: NodeError if there is to be one on each machine, and none has room."""
    from gangline.interop.ray.ray import fitting
    from gangline.interop.ray.sizes import Bounds, ByDemand, EachMachine, Fixed
    from gangline.wire.client.node import NodeClient

    async def drain(url: str) -> None:
        with contextlib.suppress(TimeoutError):  # it is asked again
            async with asyncio.timeout(_STOP_WAIT_S), NodeClient(url, control_token) as node:
                await node.drain()

    if wanted.num_nodes is not None:
        return Fixed(wanted.num_nodes)
    if wanted.max_nodes is not None:
        bounds = Bounds(
            least=wanted.min_nodes,
            most=wanted.max_nodes,
            run_slots=run_slots,
            shrink_after_s=wanted.shrink_after_s,
            drain_timeout_s=wanted.drain_timeout_s,
        )
        return ByDemand(bounds, ask=server.status, drain=drain)
    if fitting(needs, found):
        return EachMachine(needs)
    raise NodeError(
        f"none of Ray's {len(found)} machines has what a node asks for, {needs.all()}. Ask for less with --node-cpus "
        "and --node-resources, or say with --nodes or --max-nodes how many to wait for."
    )


def url_for_nodes(server_url: str, own_host: str, hosts: list[str]) -> str:
    """The server's URL for nodes: if it listens on all interfaces, this machine's address in the cluster.

    Raises: InvalidRequest if it listens on loopback and some of the machines are others.
    """
    parts = urlsplit(server_url)
    if parts.hostname in _EVERYWHERE:
        host = f"[{own_host}]" if ":" in own_host else own_host
        return parts._replace(netloc=f"{host}:{parts.port}").geturl()
    if parts.hostname in _LOOPBACK and any(host != own_host for host in hosts):
        raise InvalidRequest(
            f"nodes on other machines cannot reach the server at {server_url}. Let it listen on an address of this "
            "machine with --host, and give --public-url where that is not how others reach it."
        )
    return server_url


def register(app: typer.Typer) -> None:
    app.command()(cluster)
