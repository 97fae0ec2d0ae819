"""Where a trainer finds an engine that a node names."""

from __future__ import annotations

import pytest

from gangline.train.weights.fleet import engine_url


@pytest.mark.parametrize(
    ("named", "node", "reached"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8710", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000", "http://gpu-1:8710", "http://gpu-1:8000"),
        ("http://localhost:8000/base", "https://gpu-1.example:8710", "http://gpu-1.example:8000/base"),
        ("http://[::1]:8000", "http://[fd00::2]:8710", "http://[fd00::2]:8000"),
        ("http://127.0.0.1", "http://10.0.0.2:8710", "http://10.0.0.2"),
        ("http://engine-3:8000", "http://gpu-1:8710", "http://engine-3:8000"),
    ],
)
def test_an_engine_at_a_loopback_address_is_on_its_nodes_machine(named: str, node: str, reached: str) -> None:
    assert engine_url(named, node) == reached
