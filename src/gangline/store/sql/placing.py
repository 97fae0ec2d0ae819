"""Needs of sessions against offers of nodes, in SQL.

Needs are interned: a session holds a number, so the queue is filtered by a list of a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from gangline.domain.placement import Needs, Offer, nearest
from gangline.store.sql.schema import needs, nodes

__all__ = ["GONE_AFTER_S", "intern", "unplaced", "unsuited"]

GONE_AFTER_S = 30.0
"""A node that was not heard for so long is not present."""

# Made once, as in rows.py.
_PAIRS = (
    sa.select(needs.c.id, needs.c.body, nodes.c.offer)
    .select_from(nodes.join(needs, sa.true()))
    .where(nodes.c.node_id == sa.bindparam("node"), nodes.c.offer.is_not(None))
)
_KNOWN = sa.select(needs.c.id, needs.c.body)
_PRESENT = (
    sa.select(nodes.c.node_id, nodes.c.offer)
    .where(nodes.c.draining.is_(sa.false()), nodes.c.last_seen_at > sa.bindparam("since"))
    .order_by(nodes.c.node_id)
)


def intern(conn: sa.Connection, wanted: Iterable[Needs]) -> dict[Needs, int]:
    """Numbers of needs; those that are new get one."""
    bodies = {one: msgspec.json.encode(one).decode() for one in wanted}
    known = {body: number for number, body in conn.execute(_KNOWN)}
    for body in sorted(set(bodies.values()) - known.keys()):
        known[body] = _added(conn, body)
    return {one: known[body] for one, body in bodies.items()}


def _added(conn: sa.Connection, body: str) -> int:
    """Another server may add the same at the same time; then its number is taken."""
    if conn.dialect.name == "postgresql":
        conn.execute(postgresql.insert(needs).values(body=body).on_conflict_do_nothing())
    else:
        conn.execute(sa.insert(needs).values(body=body))
    return conn.scalars(sa.select(needs.c.id).where(needs.c.body == body)).one()


def unsuited(conn: sa.Connection, node_id: str) -> list[int]:
    """Numbers of the needs that a node does not serve; none where it does not say what it can run."""
    return [number for number, body, offer in conn.execute(_PAIRS, {"node": node_id}) if not _suits(body, offer)]


@lru_cache(maxsize=4096)
def _suits(body: str, offer: str) -> bool:
    return not _decoded(offer).lacks(msgspec.json.decode(body, type=Needs))


@lru_cache(maxsize=1024)
def _decoded(offer: str) -> Offer:
    return msgspec.json.decode(offer, type=Offer)


def unplaced(conn: sa.Connection, now: float) -> Mapping[int, str]:
    """Number of needs -> why no present node serves them. Empty where there is no node, or one that takes all."""
    present = conn.execute(_PRESENT, {"since": now - GONE_AFTER_S}).all()
    if not present or any(row.offer is None for row in present):
        return {}
    offers = [(row.node_id, _decoded(row.offer)) for row in present]
    found = {number: nearest(msgspec.json.decode(body, type=Needs), offers) for number, body in conn.execute(_KNOWN)}
    return {number: why for number, why in found.items() if why is not None}
