"""Whether an address is public on the internet: not this machine's, its network's or its cloud's.

Uses tables instead of `ipaddress.is_global`, whose answer differs between versions of Python.

Source: IANA IPv4 and IPv6 Special-Purpose Address Registries (RFC 6890), as of 2026; a block is public if its "Globally
Reachable" is true. IANA IPv6 Global Unicast Allocations: 2000::/3.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

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
