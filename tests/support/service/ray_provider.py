"""Machines for Ray's autoscaler: its own provider for tests, but each machine has an address of loopback."""

from __future__ import annotations

from typing import Any
from unittest import mock

from ray._private import parameter, services
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class LoopbackMachines(FakeMultiNodeProvider):
    def _create_node_with_resources_and_labels(self, *what: Any) -> None:
        host = f"127.0.0.{10 + self._next_node_id}"
        with (
            mock.patch.object(services, "get_node_ip_address", return_value=host),
            mock.patch.object(parameter, "RayParams", Machine(host)),
        ):
            super()._create_node_with_resources_and_labels(*what)


class Machine:
    def __init__(self, host: str) -> None:
        self._host = host

    def __call__(self, **options: Any) -> parameter.RayParams:
        return RAY_PARAMS(node_ip_address=self._host, **options)


RAY_PARAMS = parameter.RayParams
