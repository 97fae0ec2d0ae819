"""Who a caller is: a role and a tenant. Plain records without I/O."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["submit", "read", "node", "operate", "admin"]

TENANT_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$"
"""Without a dot, so that no tenant's name begins another one's ids."""
DEFAULT_TENANT = "default"
"""The tenant of the control token, and of all tasks from before there were tenants."""


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """The caller of one request."""

    role: Role
    tenant: str
    token_id: str = ""
    """Empty: the control token."""
    node_key: str = ""
    """Of a node's token: see `nodes.key`."""

    @property
    def bound_to(self) -> str | None:
        """The only tenant whose tasks it may touch; None: all of them."""
        return None if self.role in ("operate", "admin") else self.tenant


FIRST_ADMIN = Principal(role="admin", tenant=DEFAULT_TENANT)
"""The holder of the control token."""


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """A token, without its secret."""

    token_id: str
    role: Role
    tenant: str
    note: str
    created_at: float
    expires_at: float | None = None
    """None: never."""
    revoked_at: float | None = None
    grace_until: float | None = None
    """Until when the secret from before the last rotation is valid too."""


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token that was just made or rotated."""

    token: str
    """Shown once: only its digest is stored."""
    view: TokenView


class TokenList(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens, oldest first."""

    tokens: tuple[TokenView, ...]
