"""Refuses requests to control routes that come from another site's web page.

A browser on the operator's machine can reach every address that the operator can, including loopback, and sends
requests for any page. The control token stops such a page. These rules also apply without a token, and on routes that
never had one:

- `Host` names this service (DNS rebinding: the page's own name resolves to our address).
- `Origin`, if present, is this service's own, and `Sec-Fetch-Site` names no other site or port.
- A body is JSON: the types that forms and plain `fetch` can send need no preflight, and no preflight is ever granted.

Model calls are authorised only by the session's key: agents reach them under any name that their sandbox gives the
proxy.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from gangline.domain.errors import ForeignRequest, InvalidRequest, UnsupportedMediaType

JSON = "application/json"
_EVERYWHERE = ("0.0.0.0", "::", "")
_OWN_SITES = ("same-origin", "none")


class OwnNames:
    """The host names of one service."""

    def __init__(
        self, host: str = "127.0.0.1", *, public_url: str | None = None, allowed_hosts: Sequence[str] = ()
    ) -> None:
        """host: the address that it listens on; for a wildcard address this machine's name is included.
        public_url: the URL for other machines.
        allowed_hosts: further names, such as a proxy's. Raises: InvalidRequest for an invalid name.
        """
        public = urlsplit(public_url or "")
        self._public_origin = public.netloc.lower()
        machine = socket.gethostname().lower()
        own = (machine, machine.partition(".")[0]) if host in _EVERYWHERE else (host.lower(),)
        named = (public.hostname, *own, *map(_checked, allowed_hosts))
        self._names = frozenset({"localhost", *(_plain(name) for name in named if name)})

    def check(self, request: web.BaseRequest) -> None:
        """Raises: ForeignRequest."""
        self.check_host(request)
        hosts = request.headers.getall(hdrs.HOST)
        for origin in request.headers.getall(hdrs.ORIGIN, []):
            # The scheme cannot differ: one port has only one.
            site = origin.lower().partition("://")[2]
            if not site or site not in (hosts[0].lower(), self._public_origin):
                raise ForeignRequest(f"a web page of {origin[:200]!r} may not call this service.")
        if request.headers.get("Sec-Fetch-Site", "none").lower() not in _OWN_SITES:
            raise ForeignRequest("a web page of another site may not call this service.")

    def check_host(self, request: web.BaseRequest) -> None:
        """Check only the host, for a page that may be linked from elsewhere. Raises: ForeignRequest."""
        hosts = request.headers.getall(hdrs.HOST, [])
        if len(hosts) != 1 or not self._is_own(request, hosts[0]):
            raise ForeignRequest(
                f"the request is for the host {', '.join(hosts)[:200]!r}, which is not a name of this service. Use its "
                "own address, or allow the name with --allowed-host."
            )

    def _is_own(self, request: web.BaseRequest, host: str) -> bool:
        try:
            name = _plain(urlsplit(f"//{host}").hostname or "")
        except ValueError:
            return False
        return name in self._names or is_loopback(name) or name == _arrived_at(request)


def require_json(request: web.BaseRequest, *more: str) -> None:
    """A body must be JSON, or of a type in `more`; it may be absent. Raises: UnsupportedMediaType."""
    if not request.body_exists:
        return
    given = request.headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()
    if given != JSON and given not in more and not (given.startswith("application/") and given.endswith("+json")):
        wanted = " or ".join((JSON, *(kind for kind in more if kind != JSON)))
        raise UnsupportedMediaType(f"send the body as `Content-Type: {wanted}`, got {given[:100] or 'none'!r}.")


def _plain(name: str) -> str:
    """The normalised form of a name or address."""
    name = name.strip().lower().rstrip(".").partition("%")[0].strip("[]")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_open_door(host: str, control_token: str | None) -> None:
    """Refuse to listen for other machines without a control token. Raises: InvalidRequest."""
    if not (control_token or is_loopback(host)):
        raise InvalidRequest(
            f"{host} can be reached from elsewhere, and no control token is set: anyone could run commands here. "
            "Set GANGLINE_TOKEN, or listen on 127.0.0.1."
        )


def _arrived_at(request: web.BaseRequest) -> str | None:
    """The local address at which the connection arrived."""
    sockname: Any = request.transport.get_extra_info("sockname") if request.transport else None
    return _plain(str(sockname[0])) if sockname else None


def _checked(name: str) -> str:
    """Raises: InvalidRequest."""
    try:
        plain = urlsplit(f"//{name}")
        is_name = bool(plain.hostname) and plain.port is None and plain.netloc == name and "@" not in name
    except ValueError:
        is_name = False
    if not is_name:
        raise InvalidRequest(f"--allowed-host takes a name or an address without scheme and port, got {name!r}.")
    return name
