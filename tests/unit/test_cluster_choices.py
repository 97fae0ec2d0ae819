"""What is decided before Ray is asked: ids of nodes, and the address that they are told."""

from __future__ import annotations

import re

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.domain.ids import ID_PATTERN
from gangline.interop.ray.command import url_for_nodes
from support.requirements import need_module

OWN = "10.0.0.1"


@pytest.mark.parametrize(
    ("server", "own", "told"),
    [
        ("http://0.0.0.0:8700", OWN, "http://10.0.0.1:8700"),
        ("http://[::]:8700", "fd00::2", "http://[fd00::2]:8700"),
        ("http://head.example:8700", OWN, "http://head.example:8700"),
        ("https://gangline.example", OWN, "https://gangline.example"),
    ],
)
def test_nodes_are_told_an_address_that_others_reach(server: str, own: str, told: str) -> None:
    assert url_for_nodes(server, own, [own, "10.0.0.2"]) == told


def test_a_server_on_loopback_serves_a_cluster_of_this_machine_only() -> None:
    assert url_for_nodes("http://127.0.0.1:8700", OWN, [OWN, OWN]) == "http://127.0.0.1:8700"
    with pytest.raises(InvalidRequest, match="--host"):
        url_for_nodes("http://localhost:8700", OWN, [OWN, "10.0.0.2"])


@pytest.mark.parametrize(
    ("machine", "node_id"),
    [("gpu7.cluster.example", "gpu7-3"), ("rack_1", "rack-1-3"), ("-", "machine-3"), ("x" * 300, f"{'x' * 100}-3")],
)
def test_a_node_is_called_after_its_machine_and_its_number(machine: str, node_id: str) -> None:
    need_module("ray", "pip install 'gangline[cluster]'")
    from gangline.interop.ray.actors import Place
    from gangline.interop.ray.node_command import node_id_at

    made = node_id_at(Place(3, machine, OWN))
    assert made == node_id
    assert re.fullmatch(ID_PATTERN, made)
