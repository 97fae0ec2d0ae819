"""Who a caller is: a role and a tenant. Plain records without I/O."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Role = Literal["submit", "read", "node", "operate", "admin"]

TENANT_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$(?!\n)"  # Python's `$` is also before a line's end
TENANT = re.compile(TENANT_PATTERN)
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
    """Only of a node's token: its id, and how often it was made or rotated."""

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


QUOTAS = ("max_running", "max_queued", "max_slot_s_per_day", "max_tokens_per_day")


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant: its share, its quotas, and its use. A day is one of UTC."""

    name: str
    weight: float
    """Share in slot-seconds, relative to others."""
    max_running: int | None
    """Sessions at once; None: no limit, here and below."""
    max_queued: int | None
    max_slot_s_per_day: float | None
    max_tokens_per_day: int | None
    """Sampled tokens of stored results."""
    num_running: int
    num_queued: int
    num_leases: int
    """That have ended."""
    slot_s: float
    """Seconds for which nodes held its sessions, in all ended leases."""
    num_sampled_tokens: int
    slot_s_today: float
    sampled_tokens_today: int


class TenantList(msgspec.Struct, frozen=True, kw_only=True):
    """Tenants, by their use: the most first."""

    tenants: tuple[TenantView, ...]


UsageBy = Literal["tenant", "run", "harness", "model", "submitter"]


class UsageRow(msgspec.Struct, frozen=True):
    """The use of ended sessions that have one tenant, run, harness, model or submitter in common."""

    name: str
    num_sessions: int
    slot_s: float
    """Seconds from their last leases to their ends."""
    num_sampled_tokens: int
