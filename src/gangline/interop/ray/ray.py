"""Connects to a running Ray cluster from one of its machines, and lists the machines' resources."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import ray

from gangline.domain.errors import ClusterUnavailable, InvalidRequest

_NAMESPACE = "gangline"
_ANSWERS_WITHIN_S = 10.0


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that one node requests from Ray. Ray only counts them; it enforces no limits."""

    cpus: float = 1.0
    resources: dict[str, float] = {}

    def all(self) -> dict[str, float]:
        return {"CPU": self.cpus, **self.resources}


class Machine(msgspec.Struct, frozen=True):
    """A machine that is alive."""

    ray_id: str
    """Ray's name of it, which changes when Ray is started anew there."""
    host: str
    """Its address within the cluster."""
    resources: dict[str, float]
    """Its total resources, including those in use."""


@asynccontextmanager
async def connected(address: str | None) -> AsyncGenerator[str]:
    """Make this process a driver of the cluster within the block, and yield the cluster's address. Actors that it
    started end with it.

    address: HOST:PORT; None: the value of `RAY_ADDRESS`, else this machine's cluster.
    Raises: ClusterUnavailable; InvalidRequest for an address of Ray Client, whose driver runs elsewhere.
    """
    if address is not None and "://" in address:
        raise InvalidRequest(
            f"the address of a Ray cluster is HOST:PORT, got {address!r}: run this on its head machine."
        )
    try:
        await _try(address)
        # In the main thread it would replace our SIGTERM handler; here it logs that it does not.
        context = await asyncio.to_thread(_enter, address or "auto")
        # Ray's C++ code has installed a handler before Python's, which prints a stack.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterUnavailable(
            f"no Ray cluster answers at {address or 'this machine, nor at RAY_ADDRESS'} ({error}). "
            "Start one with `ray start --head`, and `ray start --address HOST:PORT` on the other machines. If it was "
            "started with a token in ~/.ray/auth_token, set RAY_AUTH_MODE=token."
        ) from error
    try:
        yield str(context.address_info["gcs_address"])
    finally:
        await asyncio.to_thread(_leave)


async def _try(address: str | None) -> None:
    """Check the connection, because Ray itself would retry for minutes. Raises: OSError, ValueError."""
    if address not in (None, "auto"):
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(_ANSWERS_WITHIN_S):
            _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
        await writer.wait_closed()


def _enter(address: str) -> Any:
    return ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, configure_logging=False)


def _leave() -> None:
    ray.shutdown()  # pyright: ignore[reportUnknownMemberType]


def own_host() -> str:
    """Address of this machine within the cluster."""
    return cast("str", ray.util.get_node_ip_address())


def machines() -> list[Machine]:
    """The machines that are alive."""
    return [Machine(one["NodeID"], one["NodeManagerAddress"], dict(one["Resources"])) for one in _alive()]


def is_member() -> bool:
    """Whether Ray still runs on this machine. Without it a driver keeps running, but nothing that it requests is
    placed.
    """
    own = ray.get_runtime_context().get_node_id()
    return any(one["NodeID"] == own for one in _alive())


def _alive() -> list[dict[str, Any]]:
    nodes = cast("list[dict[str, Any]]", ray.nodes())  # pyright: ignore[reportUnknownMemberType]
    return [node for node in nodes if node["Alive"]]


def fitting(needs: Needs, found: Sequence[Machine]) -> list[Machine]:
    """Machines with enough resources for one node."""
    return [one for one in found if all(one.resources.get(name, 0.0) >= much for name, much in needs.all().items())]
