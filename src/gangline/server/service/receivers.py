"""Which addresses the callbacks of tenants reach: none of the server's own machine, and none that gives credentials."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import aiohttp
from yarl import URL

from gangline.domain.errors import InvalidRequest
from gangline.settings.machine import Settings

_METADATA = {ipaddress.ip_address(text) for text in ("100.100.100.200", "168.63.129.16", "fd00:ec2::254")}
"""Clouds' metadata outside of link-local networks."""


def is_open(text: str) -> bool:
    """Whether tenants' callbacks may reach this address. Private networks are open: trainers live there."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address.sixtofour or address
    if any(address in network for network in Settings.from_environ().callback_networks):
        return True
    return not (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
        or address in ipaddress.ip_network("0.0.0.0/8")
        or address in _METADATA
    )


def check_receiver(url: str) -> None:
    """Raises: InvalidRequest if the URL itself says that a tenant's callback would not be sent."""
    try:
        host = (URL(url).raw_host or "").rstrip(".")
        if host == "localhost" or host.endswith(".localhost"):
            host = "127.0.0.1"
        # As the system reads them: 127.1, 2130706433 and 0x7f000001 are addresses too.
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return  # a name: its addresses are checked when the callback is sent
    except ValueError as error:
        raise InvalidRequest(f"callback_url: {url!r} is not a URL: {error}.") from error
    for *_, place in found:
        if not is_open(str(place[0])):
            raise InvalidRequest(f"callback_url: {_why(place[0])}")


def tenants_connector() -> aiohttp.TCPConnector:
    """Checks the very address that it connects to, whatever a name meant before."""
    return aiohttp.TCPConnector(socket_factory=_socket)


def _socket(found: Any) -> socket.socket:
    family, kind, proto, _, place = found
    if not is_open(place[0]):
        raise OSError(_why(place[0]))
    return socket.socket(family=family, type=kind, proto=proto)


def _why(address: Any) -> str:
    return (
        f"callbacks of tenants are not sent to {address}; name an address that other machines reach, or let the "
        "server's operator allow this one in GANGLINE_CALLBACK_NETWORKS."
    )
