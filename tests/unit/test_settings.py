"""Addresses as they are told to others, and secrets that come by name."""

from __future__ import annotations

import socket

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.settings.addresses import local_url, reachable_url
from gangline.settings.machine import read_secret


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_nobody_is_told_an_address_that_means_every_address(host: str) -> None:
    assert reachable_url(host, 80) == f"http://{socket.gethostname()}:80"
    assert local_url(host, 80) in ("http://127.0.0.1:80", "http://[::1]:80")


def test_an_address_is_told_as_it_is_unless_the_operator_names_another() -> None:
    assert reachable_url("10.0.0.7", 80) == local_url("10.0.0.7", 80) == "http://10.0.0.7:80"
    assert reachable_url("fd00::7", 80) == "http://[fd00::7]:80"
    assert reachable_url("0.0.0.0", 80, "https://lab.example/gangline/") == "https://lab.example/gangline"


def test_a_secret_is_what_its_variable_holds_and_never_the_service_s_own() -> None:
    assert read_secret("ENGINE_KEY", {"ENGINE_KEY": "k"}) == "k"
    for environ in ({}, {"ENGINE_KEY": ""}):
        with pytest.raises(InvalidRequest, match=r"ENGINE_KEY.*not set"):
            read_secret("ENGINE_KEY", environ)
    with pytest.raises(InvalidRequest) as refused:
        read_secret("GANGLINE_TOKEN", {"GANGLINE_TOKEN": "gl-control-secret"})
    assert "secret" not in refused.value.message
