"""Rules for the network `list`: addresses that a sandbox may reach, such as `pypi.org`, `*.debian.org`,
`10.0.0.5:8080`, `[::1]:9000`.

A name covers only its public addresses. An address that is not public (this machine's own, a private network's, a
link's) is reachable only if a rule lists that exact address. Pure: names are not resolved here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

import msgspec

from gangline.domain.public_addresses import is_public

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
