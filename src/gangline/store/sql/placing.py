"""Matches needs of sessions with offers of nodes, in SQL.

Needs are interned: a session stores a number, so the queue is filtered by a short list of numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from gangline.domain.image_names import full_name
from gangline.domain.placement import Needs, Offer, nearest
from gangline.domain.views import PULLING
from gangline.store.sql.rows import Unit, queued_rows
from gangline.store.sql.schema import LEASED, needs, nodes, sessions

GONE_AFTER_S = 30.0
"""A node without contact for this long counts as absent."""

# Built once, as in rows.py.
_KNOWN = sa.select(needs.c.id, needs.c.body)
_FOUND = _KNOWN.where(needs.c.body.in_(sa.bindparam("bodies", expanding=True)))
_NUMBERED = _KNOWN.where(needs.c.id.in_(sa.bindparam("these", expanding=True)))
_METRICS = sa.select(nodes.c.node_id, nodes.c.metrics).where(nodes.c.node_id.in_(sa.bindparam("these", expanding=True)))
_HELD = (
    sa.select(needs.c.body, sa.func.count())
    .join(sessions, sessions.c.needs == needs.c.id)
    .where(LEASED, sessions.c.node_id == sa.bindparam("node"))
    .group_by(needs.c.body)
)
_AT_WORK = sa.select(sessions.c.needs, sessions.c.node_id).where(LEASED, sessions.c.needs != 0).distinct()
_NUM_HELD = (
    sa.select(sa.func.count()).where(LEASED, sessions.c.node_id == nodes.c.node_id).correlate(nodes).scalar_subquery()
)
_ROOMY = sa.select(nodes.c.node_id, nodes.c.offer, nodes.c.metrics).where(
    nodes.c.node_id != sa.bindparam("node"),
    nodes.c.draining.is_(sa.false()),
    nodes.c.last_seen_at > sa.bindparam("since"),
    nodes.c.capacity > _NUM_HELD,
)
"""Other nodes with room."""
_WINDOW = 64
"""Rows of the queue's head among which a node looks for sessions whose images it has."""
_PRESENT = (
    sa.select(nodes.c.node_id, nodes.c.offer)
    .where(nodes.c.draining.is_(sa.false()), nodes.c.last_seen_at > sa.bindparam("since"))
    .order_by(nodes.c.node_id)
)


def intern(unit: Unit, wanted: Iterable[Needs]) -> dict[Needs, int]:
    """Numbers of needs; new needs get a number. They never change, and are kept once they are durable."""
    bodies = {one: msgspec.json.encode(one).decode() for one in wanted}
    known = unit.learnt.interned
    if new := set(bodies.values()) - known.keys():
        found = {body: number for number, body in unit.conn.execute(_FOUND, {"bodies": sorted(new)})}
        unit.numbered |= found | {body: _added(unit.conn, body) for body in sorted(new - found.keys())}
    return {one: known.get(body) or unit.numbered[body] for one, body in bodies.items()}


def _added(conn: sa.Connection, body: str) -> int:
    """Another server may add the same needs at the same time; then its number is used."""
    if conn.dialect.name == "postgresql":
        conn.execute(postgresql.insert(needs).values(body=body).on_conflict_do_nothing())
    else:
        conn.execute(sa.insert(needs).values(body=body))
    return conn.scalars(sa.select(needs.c.id).where(needs.c.body == body)).one()


def suited_rows(
    unit: Unit,
    node_id: str,
    limit: int,
    task_ids: Sequence[str] | None,
    offer: str | None,
    *,
    tenant: str | None = None,
    num_gpus_given: int = 0,
) -> Sequence[sa.RowMapping]:
    """The head of the queue, limited to sessions that a node with this offer can run. Takes one query if it can run the
    first ones and they need no GPU and no image that the node would have to pull. tenant: only of this one.
    num_gpus_given: GPUs of the node for other sessions of the same claim.
    """
    found, others = queued_rows(unit, limit, task_ids, tenant=tenant), list[int]()
    if offer is None:
        return found
    if not all(_suits(row["needs_body"], offer) for row in found):
        others = [number for number, body in unit.conn.execute(_KNOWN) if not _suits(body, offer)]
        found = queued_rows(unit, limit, task_ids, others, tenant)
    if any(_would_pull(row["needs_body"], offer) for row in found):
        # Only sessions of the same priority overtake them, and if nothing else waits this node takes them.
        window = queued_rows(unit, max(limit, _WINDOW), task_ids, others, tenant)
        left = _left_to_others(unit, node_id, window, offer)
        first = [row for row in window if row["needs"] not in left and row["priority"] >= window[0]["priority"]]
        known = {row["position"] for row in first}
        found = [*first, *(row for row in window if row["position"] not in known)][:limit]
    wanted = [row for row in found if num_gpus_of(row["needs_body"])]
    if not wanted:
        return found
    placed = _placed(wanted, _decoded(offer).num_gpus - num_gpus_given - _gpus_held(unit.conn, node_id))
    if len(placed) == len(wanted):
        return found
    # Sessions that need no GPU overtake sessions that wait for one.
    others = [n for n, body in unit.conn.execute(_KNOWN) if num_gpus_of(body) or not _suits(body, offer)]
    return [*placed, *queued_rows(unit, limit - len(placed), task_ids, others, tenant)]


def _left_to_others(unit: Unit, node_id: str, rows: Sequence[sa.RowMapping], offer: str) -> set[int]:
    """Numbers of the rows' needs with an image that this node would have to pull, while another node with room has it,
    or has sessions for which it pulls it.
    """
    roomy = unit.conn.execute(_ROOMY, {"since": unit.now - GONE_AFTER_S, "node": node_id}).all()
    roomy = [one for one in roomy if _takes_sessions(one.metrics)]
    at_work = {(number, holder) for number, holder in unit.conn.execute(_AT_WORK)}
    return {
        number
        for number, body in {row["needs"]: row["needs_body"] for row in rows}.items()
        if _would_pull(body, offer)
        and (number, node_id) not in at_work
        and any((number, one.node_id) in at_work or _has_images(body, one.offer) for one in roomy)
    }


def _takes_sessions(metrics: str) -> bool:
    """A node whose breaker is open, or whose disk is low, leases nothing although it has room."""
    return not any(name.startswith(("breaker_open_", "disk_low_")) for name in msgspec.json.decode(metrics))


def _placed(rows: Sequence[sa.RowMapping], num_free: int) -> Sequence[sa.RowMapping]:
    """The first rows that fit. None overtakes a row that needs more GPUs, which could otherwise wait forever."""
    for at, row in enumerate(rows):
        num_free -= num_gpus_of(row["needs_body"])
        if num_free < 0:
            return rows[:at]
    return rows


def _gpus_held(conn: sa.Connection, node_id: str) -> int:
    """GPUs held by sessions leased to the node."""
    return sum(num_gpus_of(body) * number for body, number in conn.execute(_HELD, {"node": node_id}))


@lru_cache(maxsize=4096)
def num_gpus_of(body: str | None) -> int:
    return 0 if body is None else msgspec.json.decode(body, type=Needs).num_gpus


@lru_cache(maxsize=4096)
def _suits(body: str | None, offer: str) -> bool:
    return body is None or not _decoded(offer).lacks(msgspec.json.decode(body, type=Needs))


@lru_cache(maxsize=4096)
def _would_pull(body: str | None, offer: str) -> bool:
    if body is None or not _decoded(offer).pulls:
        return False
    return _decoded(offer).would_pull(msgspec.json.decode(body, type=Needs))


@lru_cache(maxsize=4096)
def _has_images(body: str, offer: str | None) -> bool:
    """Whether a node can run it without a pull."""
    return offer is not None and _suits(body, offer) and not _would_pull(body, offer)


@lru_cache(maxsize=1024)
def _decoded(offer: str) -> Offer:
    return msgspec.json.decode(offer, type=Offer)


def unplaced(conn: sa.Connection, now: float) -> Mapping[int, str]:
    """Number of needs -> why no present node serves them. Empty if there is no node, or one that accepts everything."""
    offers = _present(conn, now)
    if not offers:
        return {}
    found = {number: nearest(msgspec.json.decode(body, type=Needs), offers) for number, body in conn.execute(_KNOWN)}
    return {number: why for number, why in found.items() if why is not None}


def unserved(conn: sa.Connection, now: float, wanted: Iterable[Needs]) -> Mapping[Needs, str]:
    """The same for the given needs."""
    offers = _present(conn, now)
    return {one: why for one in wanted if (why := nearest(one, offers)) is not None}


def image_waits(conn: sa.Connection, starting: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], str]:
    """Node and number of needs -> the image that such sessions in INIT wait for, as the node last reported it.

    starting: the ones to look up.
    """
    metrics = conn.execute(_METRICS, {"these": sorted({node_id for node_id, _ in starting})})
    pulling = {node_id: msgspec.json.decode(body, type=dict[str, float]) for node_id, body in metrics}
    numbers = conn.execute(_NUMBERED, {"these": sorted({number for _, number in starting})})
    images = {number: msgspec.json.decode(body, type=Needs).images for number, body in numbers}
    found: dict[tuple[str, int], str] = {}
    for node_id, number in starting:
        for _, image in images.get(number, ()):
            if num := pulling.get(node_id, {}).get(PULLING + full_name(image)):
                found[node_id, number] = f"waiting for image {image}, pulled by {node_id} (waiting: {num:.0f})"
    return found


def _present(conn: sa.Connection, now: float) -> list[tuple[str, Offer]]:
    """Present nodes and their offers; empty if one of them accepts everything."""
    rows = conn.execute(_PRESENT, {"since": now - GONE_AFTER_S}).all()
    if any(row.offer is None for row in rows):
        return []
    return [(row.node_id, _decoded(row.offer)) for row in rows]
