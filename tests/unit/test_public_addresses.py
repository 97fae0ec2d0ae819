"""Addresses that a sandbox may reach by a name, against the rows of IANA's special-purpose registries."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import pytest

from gangline.domain.network import NetworkRule, is_public, may_dial

# Address block, and "Globally Reachable" as published; N/A is not reachable by itself.
V4_ROWS = {
    "0.0.0.0/8": False,
    "0.0.0.0/32": False,
    "10.0.0.0/8": False,
    "100.64.0.0/10": False,
    "127.0.0.0/8": False,
    "169.254.0.0/16": False,
    "172.16.0.0/12": False,
    "192.0.0.0/24": False,
    "192.0.0.0/29": False,
    "192.0.0.8/32": False,
    "192.0.0.9/32": True,
    "192.0.0.10/32": True,
    "192.0.0.170/32": False,
    "192.0.0.171/32": False,
    "192.0.2.0/24": False,
    "192.31.196.0/24": True,
    "192.52.193.0/24": True,
    "192.88.99.0/24": False,
    "192.88.99.2/32": False,
    "192.168.0.0/16": False,
    "192.175.48.0/24": True,
    "198.18.0.0/15": False,
    "198.51.100.0/24": False,
    "203.0.113.0/24": False,
    "240.0.0.0/4": False,
    "255.255.255.255/32": False,
}
V6_ROWS = {
    "::1/128": False,
    "::/128": False,
    "64:ff9b:1::/48": False,
    "100::/64": False,
    "100:0:0:1::/64": False,
    "2001::/23": False,
    "2001::/32": False,
    "2001:1::1/128": True,
    "2001:1::2/128": True,
    "2001:1::3/128": True,
    "2001:2::/48": False,
    "2001:3::/32": True,
    "2001:4:112::/48": True,
    "2001:10::/28": False,
    "2001:20::/28": True,
    "2001:30::/28": True,
    "2001:db8::/32": False,
    "2002::/16": False,
    "2620:4f:8000::/48": True,
    "3fff::/20": False,
    "5f00::/16": False,
    "fc00::/7": False,
    "fe80::/10": False,
}


@pytest.mark.parametrize(("block", "reachable"), [*V4_ROWS.items(), *V6_ROWS.items()])
def test_a_block_of_the_registries_is_public_as_published(block: str, reachable: bool) -> None:
    network = ip_network(block)
    rows = {ip_network(row): is_open for row, is_open in (V4_ROWS | V6_ROWS).items()}
    for address in (network[0], network[-1], network[network.num_addresses // 2]):
        inner = [row for row in rows if row.version == address.version and address in row]
        narrowest = max(inner, key=lambda row: row.prefixlen)
        assert is_public(address) is rows[narrowest], address
    assert rows[network] is reachable


@pytest.mark.parametrize(
    "address",
    [
        "168.63.129.16",
        "169.254.169.254",
        "100.100.100.200",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd20:ce::254",
        "fec0::1",
        "ff02::1",
        "ff0e::1",
        "::127.0.0.1",
        "::8.8.8.8",
        "::ffff:168.63.129.16",
        "::ffff:0:8.8.8.8",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b::a83f:8110",
        "64:ff9b:1::808:808",
        "2002:a9fe:a9fe::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "fe80::1%eth0",
        "2606:4700::1%eth0",
        "4000::1",
        "239.255.255.250",
    ],
)
def test_what_only_this_machine_its_network_or_its_cloud_reaches_is_not_public(address: str) -> None:
    assert not is_public(ip_address(address))
    assert not may_dial([NetworkRule.parse("*.org"), NetworkRule.parse("pypi.org")], address, 443)


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "8.8.8.8", "168.63.129.15", "168.63.129.17", "151.101.0.223", "2606:4700::1111", "2a04:4e42::223"],
)
def test_ordinary_addresses_are_public_in_every_form(address: str) -> None:
    found = ip_address(address)
    assert is_public(found)
    if isinstance(found, IPv4Address):
        assert is_public(IPv6Address(f"::ffff:{found}"))
        assert is_public(IPv6Address(int(IPv6Address("64:ff9b::")) | int(found)))


def test_no_closed_block_is_open_in_the_forms_of_ipv6() -> None:
    for block, reachable in V4_ROWS.items():
        if not reachable and block not in ("192.0.0.0/24",):
            first = IPv4Network(block)[0]
            assert not is_public(IPv6Address(f"::ffff:{first}"))
            assert not is_public(IPv6Address(int(IPv6Network("64:ff9b::/96")[0]) | int(first)))
