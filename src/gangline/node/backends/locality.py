"""Whether an engine runs on this machine, by the addresses behind its URL. Source: 000, section 3.4."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

__all__ = ["is_on_this_machine"]


def is_on_this_machine(url: str) -> bool:
    """Whether every address of the URL's host is one of this machine's. Blocking; a name that nobody knows is not."""
    host = urlsplit(url).hostname
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM) if host else []
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(_is_own(family, str(address[0])) for family, _, _, _, address in found)


def _is_own(family: int, address: str) -> bool:
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return True
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((address, 9))
        except OSError:
            return False
        # The kernel talks to an address of its own from that address, and to any other from another.
        return probe.getsockname()[0] == address
