"""Rules of network `list`: what they say, what they refuse to be, and which addresses they open."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gangline.domain.network import NetworkRule, is_named, may_dial, normal_host, split_host_port
from gangline.domain.task import RuntimeSpec


def _rules(*lines: str) -> tuple[NetworkRule, ...]:
    return tuple(map(NetworkRule.parse, lines))


@pytest.mark.parametrize(
    ("line", "host", "port", "is_open"),
    [
        ("pypi.org", "pypi.org", 443, True),
        ("pypi.org", "pypi.org", 80, True),
        ("pypi.org", "pypi.org", 22, False),
        ("PyPI.org.", "pypi.org", 443, True),
        ("pypi.org", "files.pypi.org", 443, False),
        ("pypi.org", "evilpypi.org", 443, False),
        ("*.pypi.org", "files.pypi.org", 443, True),
        ("*.pypi.org", "a.b.pypi.org", 443, True),
        ("*.pypi.org", "pypi.org", 443, False),
        ("*.pypi.org", "evilpypi.org", 443, False),
        ("pypi.org:8443", "pypi.org", 8443, True),
        ("pypi.org:8443", "pypi.org", 443, False),
        ("10.0.0.5:8080", "10.0.0.5", 8080, True),
        ("[::1]:9000", "::1", 9000, True),
        ("[0:0::1]:9000", "::1", 9000, True),
        ("2001:db8::1", "2001:db8::1", 443, True),
    ],
)
def test_a_rule_opens_what_it_names(line: str, host: str, port: int, is_open: bool) -> None:
    assert is_named(_rules(line), host, port) is is_open


@pytest.mark.parametrize(
    "line",
    [
        "",
        "*",
        "*.",
        "*.*.org",
        "a.*.org",
        "http://pypi.org",
        "pypi.org/simple",
        "pypi.org:",
        "pypi.org:0",
        "x:65536",
        "pypi.org:http",
        "a b.org",
        "-a.org",
        "127.1",
        "0x7f000001",
        "2130706433",
        "1.2.3.4.5",
        "*.10.0.0.5",
        "münchen.de",
        "user@pypi.org",
        "[::1",
        "[::1]9000",
        "a..org",
        "x" * 64 + ".org",
        "pypi.org:٤٤٣",
        "pypi.org\n",
    ],
)
def test_what_is_no_rule_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        NetworkRule.parse(line)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.1",
        "172.16.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::1",
        "2001:0:1::1",
        "ff02::1",
        "not-an-address",
    ],
)
def test_a_name_does_not_open_what_is_not_public(address: str) -> None:
    assert not may_dial(_rules("pypi.org", "*.org"), address, 443)


def test_a_name_opens_public_addresses() -> None:
    assert may_dial(_rules("pypi.org"), "151.101.0.223", 443)
    assert may_dial(_rules("pypi.org"), "2a04:4e42::223", 443)


def test_an_address_that_is_written_is_open_on_its_port_alone() -> None:
    rules = _rules("registry.corp", "10.0.0.5:8080", "[::1]:9000")
    assert may_dial(rules, "10.0.0.5", 8080)
    assert may_dial(rules, "::1", 9000)
    assert not may_dial(rules, "10.0.0.5", 443)
    assert not may_dial(rules, "10.0.0.6", 8080)


def test_forms_of_one_host_are_one() -> None:
    assert normal_host("EXAMPLE.org.") == "example.org"
    assert normal_host("0:0:0:0:0:0:0:1") == "::1"
    assert split_host_port("[::1]:80") == ("::1", 80)
    assert split_host_port("::1") == ("::1", None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"network": "list"}, "network_allow"),
        ({"network": "proxy", "network_allow": ["pypi.org"]}, "network `list`"),
        ({"network": "list", "network_allow": ["http://pypi.org"]}, "pypi.org"),
        ({"network": "list", "network_allow": ["*"]}, "network `full`"),
        ({"network": "list", "network_allow": ["a.org"] * 257}, "256"),
    ],
)
def test_a_task_says_what_is_wrong_with_its_list(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RuntimeSpec.model_validate(fields)


def test_a_task_with_a_list_has_its_rules() -> None:
    spec = RuntimeSpec(network="list", network_allow=("*.pypi.org:443",))
    assert spec.network_rules == (NetworkRule("pypi.org", 443, is_wildcard=True),)
