"""Which URLs lead to this machine."""

from __future__ import annotations

import socket

import pytest

from gangline.node.backends.pool import is_on_this_machine
from support.requirements import DOES_NOT_APPLY


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000/v1", "http://127.9.9.9:1", "http://localhost", "http://[::1]:80"]
)
def test_loopback_is_this_machine(url: str) -> None:
    assert is_on_this_machine(url)


def test_an_address_that_this_machine_talks_from_is_its_own() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.7", 9))
        except OSError:
            pytest.skip(f"{DOES_NOT_APPLY} this machine has no way out, and so no address but loopback")
        own = probe.getsockname()[0]
    assert is_on_this_machine(f"http://{own}:8000")


@pytest.mark.parametrize("url", ["http://198.51.100.7:8000", "http://no-such-host.invalid:8000", "http://", "nonsense"])
def test_other_machines_and_names_that_nobody_knows_are_not(url: str) -> None:
    assert not is_on_this_machine(url)
