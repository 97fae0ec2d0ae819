"""Options of where nodes run in a Ray cluster: of `gangline cluster`, and of `gangline up` that hands them on to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gangline.domain.errors import InvalidRequest

__all__ = [
    "ClusterChoice",
    "NodeCpusOption",
    "NodeDataOption",
    "NodeResourcesOption",
    "NumNodesOption",
    "RayAddressOption",
    "read_resources",
]

_PANEL = "Cluster"

RayAddressOption = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        help="HOST:PORT of the Ray cluster. Default: RAY_ADDRESS, else the cluster of this machine.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
NumNodesOption = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        min=1,
        help="How many nodes. Default: one for each of Ray's machines that has what a node asks for.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
NodeCpusOption = Annotated[
    float,
    typer.Option("--node-cpus", min=0, help="CPUs that a node asks of Ray; 0 is none.", rich_help_panel=_PANEL),
]
NodeResourcesOption = Annotated[
    str | None,
    typer.Option(
        "--node-resources",
        help='Resources that a node asks of Ray beside CPUs, as JSON: {"sandboxes": 1}.',
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
NodeDataOption = Annotated[
    Path | None,
    typer.Option(
        "--node-data",
        help="Data folder of the nodes, on a disk of each machine. Default: the same path as --data.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]


class ClusterChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The options as they were given."""

    ray_address: str | None = None
    num_nodes: int | None = None
    node_cpus: float = 1.0
    node_resources: str | None = None
    node_data: Path | None = None

    def arguments(self) -> tuple[str, ...]:
        """For a `gangline cluster` in another process."""
        given = {
            "--ray-address": self.ray_address,
            "--nodes": self.num_nodes,
            "--node-cpus": self.node_cpus,
            "--node-resources": self.node_resources,
            "--node-data": self.node_data,
        }
        return tuple(text for name, value in given.items() if value is not None for text in (name, str(value)))

    def checked(self) -> ClusterChoice:
        """Raises: InvalidRequest."""
        read_resources(self.node_resources)
        return self


def read_resources(text: str | None) -> dict[str, float]:
    """Raises: InvalidRequest."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, float])
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f'--node-resources must be a JSON object of numbers, such as {{"sandboxes": 1}}: {error}.'
        ) from error
