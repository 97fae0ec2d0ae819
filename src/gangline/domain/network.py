"""Rules for the network `list`: addresses that a sandbox may reach, such as `pypi.org`, `*.debian.org`,
`10.0.0.5:8080`, `[::1]:9000`.

A name covers only its public addresses. An address that is not public (this machine's own, a private network's, a
link's) is reachable only if a rule lists that exact address. Pure: names are not resolved here.

Whether an address is public (not this machine's, its network's or its cloud's) is read from tables instead of
`ipaddress.is_global`, whose answer differs between versions of Python.

Source: IANA IPv4 and IPv6 Special-Purpose Address Registries (RFC 6890), as of 2026; a block is public if its "Globally
Reachable" is true. IANA IPv6 Global Unicast Allocations: 2000::/3.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import msgspec

USUAL_PORTS = (80, 443)
"""The ports of a rule without one."""
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class NetworkRule(msgspec.Struct, frozen=True):
    """One line of `runtime.network_allow`."""

    host: str
    """In normal form: a lower-case name or an address; for a wildcard, the part after `*.`."""
    port: int | None = None
    """None: the default HTTP ports."""
    is_wildcard: bool = False
    """Every name below `host`, but not `host` itself."""

    @classmethod
    def parse(cls, text: str) -> NetworkRule:
        """Raises: ValueError."""
        if text == "*":
            raise ValueError("'*' is everything: that is network `full`")
        host, port = split_host_port(text)
        is_wildcard = host.startswith("*.")
        host = normal_host(host[2:] if is_wildcard else host)
        if is_wildcard and _address(host) is not None:
            raise ValueError(f"{text!r}: an address has no names below it")
        return cls(host, port, is_wildcard)

    def allows_port(self, port: int) -> bool:
        return port in USUAL_PORTS if self.port is None else port == self.port

    def names(self, host: str) -> bool:
        return host.endswith("." + self.host) if self.is_wildcard else host == self.host


def split_host_port(text: str) -> tuple[str, int | None]:
    """Parse `host`, `host:port`, `[v6]`, `[v6]:port` or a bare v6 address. Raises: ValueError."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not a host and port")
        return host, _port(rest[1:], text) if rest else None
    if text.count(":") > 1:
        return text, None
    host, colon, port = text.partition(":")
    return host, _port(port, text) if colon else None


def _port(digits: str, text: str) -> int:
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 5 and 0 < int(digits) < 65536):
        raise ValueError(f"{text!r}: {digits!r} is not a port")
    return int(digits)


def normal_host(text: str) -> str:
    """Returns a name or an address in normal form, the same for all spellings. Raises: ValueError.

    Numbers that only some resolvers accept as an address (`127.1`, `0x7f000001`) are neither.
    """
    if (address := _address(text)) is not None:
        return str(address)
    name = text.lower().removesuffix(".")
    if not name.isascii():
        raise ValueError(f"{text!r}: write an international name in its ASCII form, xn--...")
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels) or _NUMBER.fullmatch(labels[-1]):
        raise ValueError(f"{text!r} is not a host: write a name, *.name, an IPv4 address or an [IPv6] address")
    return name


def is_named(rules: Iterable[NetworkRule], host: str, port: int) -> bool:
    """Whether a rule names this host, in normal form, with this port."""
    return any(rule.names(host) and rule.allows_port(port) for rule in rules)


def may_dial(rules: Iterable[NetworkRule], address: str, port: int) -> bool:
    """Whether a named host may resolve to this address: it is public, or is named itself."""
    found = _address(address)
    if found is None:
        return False
    return is_public(found) or is_named((rule for rule in rules if not rule.is_wildcard), str(found), port)


def _address(text: str) -> _Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


_V4_CLOSED = (
    "0.0.0.0/8",  # this network
    "10.0.0.0/8",
    "100.64.0.0/10",  # shared by the customers of a carrier
    "127.0.0.0/8",
    "169.254.0.0/16",  # link-local, with the metadata of most clouds
    "172.16.0.0/12",
    "192.0.0.0/24",  # protocol assignments, with the metadata of Oracle's cloud
    "192.0.2.0/24",
    "192.88.99.0/24",  # 6to4 relays
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",  # multicast
    "240.0.0.0/4",
    "168.63.129.16/32",  # inside Azure alone: its host agent, DNS and metadata
)
_V4_OPEN_AMONG_THEM = ("192.0.0.9/32", "192.0.0.10/32")

_V6_GLOBAL = IPv6Network("2000::/3")
"""Everything else is closed: loopback, local, multicast, and IPv4 addresses in forms that are not routed."""
_V6_CLOSED = (
    "2001::/23",  # protocol assignments; 2001::/32 is Teredo
    "2001:db8::/32",
    "2002::/16",  # 6to4
    "3fff::/20",
)
_V6_OPEN_AMONG_THEM = (
    "2001:1::1/128",
    "2001:1::2/128",
    "2001:1::3/128",
    "2001:3::/32",
    "2001:4:112::/48",
    "2001:20::/28",
    "2001:30::/28",
)
_NAT64 = IPv6Network("64:ff9b::/96")

_closed_v4, _open_v4 = tuple(map(IPv4Network, _V4_CLOSED)), tuple(map(IPv4Network, _V4_OPEN_AMONG_THEM))
_closed_v6, _open_v6 = tuple(map(IPv6Network, _V6_CLOSED)), tuple(map(IPv6Network, _V6_OPEN_AMONG_THEM))


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether the address is public. An IPv4 address inside an IPv6 one (mapped, or with NAT64's well-known prefix)
    counts as that IPv4 address."""
    if isinstance(address, IPv4Address):
        return _is_in(address, _open_v4) or not _is_in(address, _closed_v4)
    if address.scope_id is not None:
        return False
    if (mapped := address.ipv4_mapped) is not None:
        return is_public(mapped)
    if address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    return address in _V6_GLOBAL and (_is_in(address, _open_v6) or not _is_in(address, _closed_v6))


def _is_in(address: IPv4Address | IPv6Address, blocks: Sequence[IPv4Network] | Sequence[IPv6Network]) -> bool:
    return any(address in block for block in blocks)
