"""URLs of a service that listens on an address, for this machine and for others."""

from __future__ import annotations

import socket

_EVERYWHERE = ("0.0.0.0", "::", "")


def reachable_url(host: str, port: int, given: str | None = None) -> str:
    """URL for other machines: the given one, else the host, else this machine's name if the host is a wildcard
    address.
    """
    return given.rstrip("/") if given else _url(socket.gethostname() if host in _EVERYWHERE else host, port)


def local_url(host: str, port: int) -> str:
    """URL for this machine."""
    return _url("127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host, port)


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
