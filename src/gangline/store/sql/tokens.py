"""Tokens in SQL: made, rotated, revoked and listed. Only digests of their secrets are stored.

    glt-ID-SECRET      SECRET: 256 bits, as hex digits

A node's secret is not random, but derived, so that the server can tell it the node that it calls: see `node_secret`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from gangline.domain.errors import Conflict, NotFound
from gangline.domain.tenancy import NewToken, Principal, Role, TokenView
from gangline.store.sql.database import Database, repeated
from gangline.store.sql.schema import tokens

_PREFIX = "glt"
_VIEW = TokenView.__struct_fields__
_ALIVE = tokens.c.revoked_at.is_(None)


def node_secret(root: str, control_token: str | None, key: str) -> str:
    """The secret of a node's token. root: random, from the database; the control token is not there.

    So neither a copy of the database nor a node knows the secret of another node. key: `Principal.node_key`.
    """
    mixed = hashlib.sha256(f"{root}\0{control_token or ''}".encode()).digest()
    return hmac.new(mixed, f"node {key}".encode(), "sha256").hexdigest()


def token_of(token_id: str, secret: str) -> str:
    return f"{_PREFIX}-{token_id}-{secret}"


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class Opening(msgspec.Struct, frozen=True):
    """A digest that opens something."""

    principal: Principal
    until: float | None
    """Unix time; None: no end is known."""


class StoredTokens:
    """Methods block; on an event loop use `database.run` and `database.query`. node_secret: key -> secret."""

    def __init__(self, database: Database, node_secret: Callable[[str], str]) -> None:
        self.database = database
        self._node_secret = node_secret

    def all(self) -> list[TokenView]:
        with self.database.reading() as conn:
            rows = conn.execute(sa.select(tokens).order_by(tokens.c.created_at, tokens.c.token_id)).mappings()
            return [_view(row) for row in rows]

    def known(self) -> dict[str, Opening]:
        """Digest -> its rights, for all tokens that are not revoked."""
        found: dict[str, Opening] = {}
        with self.database.reading(once=True) as conn:
            for row in conn.execute(sa.select(tokens).where(_ALIVE)).mappings():
                ends = [row["expires_at"], row["grace_until"]]
                found[row["digest"]] = Opening(_principal(row, row["number"]), row["expires_at"])
                if row["old_digest"] is not None:
                    earliest = min(end for end in ends if end is not None)
                    found[row["old_digest"]] = Opening(_principal(row, row["number"] - 1), earliest)
        return found

    @repeated
    def create(self, role: Role, tenant: str, note: str, expires_at: float | None, now: float) -> NewToken:
        row: dict[str, Any] = {
            "token_id": secrets.token_hex(6),
            "role": role,
            "tenant": tenant,
            "note": note,
            "created_at": now,
            "expires_at": expires_at,
            "revoked_at": None,
            "grace_until": None,
            "number": 1,
        }
        token = self._token(row, 1)
        with self.database.writing() as conn:
            conn.execute(sa.insert(tokens).values(**row, digest=digest_of(token)))
        return NewToken(token=token, view=_view(row))

    @repeated
    def rotate(self, token_id: str, grace_s: float, expires_at: float | None, now: float) -> NewToken:
        """A new secret. The old one stays valid for `grace_s`. expires_at: None leaves it as it is.

        Raises: NotFound, Conflict.
        """
        with self.database.writing() as conn:
            row = _row(conn, token_id)
            if row["revoked_at"] is not None:
                raise Conflict(f"token {token_id!r} is revoked: create another one.")
            token = self._token(row, row["number"] + 1)
            changes: dict[str, Any] = {
                "digest": digest_of(token),
                "number": row["number"] + 1,
                "old_digest": row["digest"] if grace_s else None,
                "grace_until": now + grace_s if grace_s else None,
                "expires_at": row["expires_at"] if expires_at is None else expires_at,
            }
            conn.execute(sa.update(tokens).where(tokens.c.token_id == token_id).values(**changes))
        return NewToken(token=token, view=_view({**row, **changes}))

    @repeated
    def revoke(self, token_id: str, now: float) -> TokenView:
        """Idempotent. Raises: NotFound."""
        with self.database.writing() as conn:
            conn.execute(sa.update(tokens).where(tokens.c.token_id == token_id, _ALIVE).values(revoked_at=now))
            return _view(_row(conn, token_id))

    def _token(self, row: Mapping[Any, Any], number: int) -> str:
        is_node = row["role"] == "node"
        secret = self._node_secret(_node_key(row["token_id"], number)) if is_node else secrets.token_hex(32)
        return token_of(row["token_id"], secret)


def _node_key(token_id: str, number: int) -> str:
    return f"{token_id}.{number}"


def _row(conn: sa.Connection, token_id: str) -> Mapping[Any, Any]:
    row = conn.execute(sa.select(tokens).where(tokens.c.token_id == token_id).with_for_update()).mappings().first()
    if row is None:
        raise NotFound(f"no token {token_id!r}; `gangline tokens list` lists them.")
    return dict(row)


def _view(row: Mapping[Any, Any]) -> TokenView:
    return TokenView(**{name: row[name] for name in _VIEW})


def _principal(row: Mapping[Any, Any], number: int) -> Principal:
    key = _node_key(row["token_id"], number) if row["role"] == "node" else ""
    return Principal(role=row["role"], tenant=row["tenant"], token_id=row["token_id"], node_key=key)
