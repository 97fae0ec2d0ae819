"""Sign-in of browsers: one-time links, and the cookie for which a link is exchanged.

- A link has 192 random bits, is stored as a digest, works once, and expires.
- A cookie contains its own rights and expiry under a MAC, so it survives a restart of the service and needs no storage.
  Its name is derived from the key: browsers send cookies to every port of a host, and two services on one machine must
  not overwrite each other's.
- The key mixes a secret of the data folder with the control token: a new token, or a new secret, ends all cookies.

The cookie opens the same routes as the token that made the link, while that is valid. A read-only one allows no request
that could change something.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from gangline.domain.errors import NotFound, TooMany
from gangline.domain.ids import new_secret
from gangline.domain.tenancy import FIRST_ADMIN, Principal

LINK_S = 600.0
"""Seconds that a link with full rights is valid: it is opened at once."""
READ_ONLY_LINK_S = 86_400.0
"""Seconds that a read-only link is valid: it may be sent to a colleague."""
COOKIE_S = 7 * 86_400
"""Seconds that a browser stays signed in."""
MAX_LINKS = 1000
"""Maximum number of unused links. A tenant has at most a tenth of them."""

_MAC_CHARS = 64
_NUM_FIELDS = 6


def share_of(most: int, bound_to: str | None) -> int:
    """How many of a server's links or streams one tenant may have, so that it leaves some to others."""
    return most if bound_to is None else max(1, most // 10)


class Visitor(msgspec.Struct, frozen=True):
    """A signed-in browser."""

    name: str
    """For the action log: `page` and a digest of the cookie."""
    read_only: bool
    principal: Principal = FIRST_ADMIN
    """The caller that made its link: it sees the same, while that caller's token is valid."""


class _Link(msgspec.Struct, frozen=True):
    read_only: bool
    principal: Principal
    expires_at: float


class Visitors:
    """secret: stored with the service's data. control_token: None if the service requires no token."""

    def __init__(
        self, secret: bytes, control_token: str | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._key = hmac.digest(secret, b"gangline page\0" + (control_token or "").encode(), "sha256")
        self.cookie_name = f"gangline-{hmac.new(self._key, b'name', 'sha256').hexdigest()[:12]}"
        self._links: dict[bytes, _Link] = {}
        """Digest of the code -> its link."""
        self._clock = clock

    def new_link(self, *, read_only: bool, principal: Principal = FIRST_ADMIN) -> tuple[str, float]:
        """A code that signs one browser in, and its expiry (Unix time). Raises: TooMany."""
        self._forget_expired()
        bound = principal.bound_to
        num_own = sum(link.principal.bound_to == bound for link in self._links.values())
        for num, most in ((len(self._links), MAX_LINKS), (num_own, share_of(MAX_LINKS, bound))):
            if num >= most:
                raise TooMany(f"{most} links wait to be opened; try again when some have expired.", limit=most)
        code = new_secret("link")
        expires_at = self._clock() + (READ_ONLY_LINK_S if read_only else LINK_S)
        self._links[_digest(code)] = _Link(read_only, principal, expires_at)
        return code, expires_at

    def check_link(self, code: str) -> None:
        """Raises: NotFound for a link that is unknown, used or expired."""
        self._forget_expired()
        if _digest(code) not in self._links:
            raise _no_link()

    def sign_in(self, code: str) -> str:
        """Use up a link. Returns the cookie's value. Raises: NotFound."""
        self._forget_expired()
        link = self._links.pop(_digest(code), None)
        if link is None:
            raise _no_link()
        rights, of = "r" if link.read_only else "w", link.principal
        whose = f"{of.role}.{of.tenant}.{of.token_id}"
        return self._signed(f"{rights}.{whose}.{int(self._clock()) + COOKIE_S}.{secrets.token_hex(8)}")

    def visitor(self, request: web.BaseRequest) -> Visitor | None:
        """The signed-in browser that sent a request; None if there is no valid cookie."""
        value = request.cookies.get(self.cookie_name, "")
        content, _, mac = value.rpartition(".")
        # Compared first, so that only values that were signed here are parsed.
        if len(mac) != _MAC_CHARS or not hmac.compare_digest(self._signed(content).encode(), _bytes(value)):
            return None
        fields = content.split(".")
        if len(fields) != _NUM_FIELDS or int(fields[4]) <= self._clock():  # fewer: signed by an earlier version
            return None
        rights, role, tenant, token_id, *_ = fields
        principal = msgspec.convert({"role": role, "tenant": tenant, "token_id": token_id}, Principal)
        return Visitor(f"page {hashlib.sha256(_bytes(content)).hexdigest()[:8]}", rights != "w", principal)

    def _signed(self, content: str) -> str:
        return f"{content}.{hmac.new(self._key, _bytes(content), 'sha256').hexdigest()}"

    def _forget_expired(self) -> None:
        now = self._clock()
        self._links = {digest: link for digest, link in self._links.items() if link.expires_at > now}


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _digest(code: str) -> bytes:
    return hashlib.sha256(_bytes(code)).digest()


def _no_link() -> NotFound:
    return NotFound("this link was used already, or has expired. Make a new one: `gangline open`.")
