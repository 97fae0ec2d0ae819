"""Nodes and their leases: nodes register, claim sessions, and renew their leases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from gangline.domain.errors import NodeIdTaken
from gangline.domain.session import Heartbeat, HeartbeatReply, Lease
from gangline.store.sql import leasing
from gangline.store.sql.leasing import Standing
from gangline.store.sql.moving import move
from gangline.store.sql.retention import forget_nodes
from gangline.store.sql.rows import (
    MANY,
    NEXT_READY,
    Unit,
    admit_ready,
    rows_named,
    standing_of,
    write_standings,
)
from gangline.store.sql.schema import LEASED, nodes, sessions, tasks
from gangline.store.sql.shares import shared_rows
from gangline.store.sql.submitting import remember_turns

# Built once, as in rows.py.
_START_TASK = sa.update(tasks).where(tasks.c.task_id == sa.bindparam("id"), tasks.c.status == "queued")
_THESE = tasks.c.task_id.in_(sa.bindparam("ids", expanding=True))
_BODIES = sa.select(tasks.c.task_id, tasks.c.status, tasks.c.body).where(_THESE)
_SAME_NODE = sa.or_(
    nodes.c.identity.is_(None),
    nodes.c.identity == sa.bindparam("same"),
    nodes.c.last_seen_at <= sa.bindparam("gone_since"),
)
_HEARD = (
    sa.update(nodes)
    .where(nodes.c.node_id == sa.bindparam("id"), _SAME_NODE)
    .returning(nodes.c.offer, NEXT_READY.label("next_ready_at"))
)
_HEARD_AS_BEFORE = _HEARD.where(nodes.c.offer.is_not_distinct_from(sa.bindparam("reported")))
_OFFERED = sa.update(nodes).where(
    nodes.c.node_id == sa.bindparam("id"), nodes.c.offer.is_distinct_from(sa.bindparam("reported"))
)
_PROLONG = (
    sa.update(sessions)
    .where(
        LEASED,
        sessions.c.node_id == sa.bindparam("node"),
        sa.tuple_(sessions.c.session_id, sessions.c.fence, sessions.c.stage).in_(sa.bindparam("named", expanding=True)),
    )
    .returning(sessions.c.session_id)
)
_KNOWN_NODE = sa.select(nodes.c.url, nodes.c.last_seen_at).where(nodes.c.node_id == sa.bindparam("id"))


def touch_node(unit: Unit, node_id: str, *, identity: str, lease_s: float, **fields: Any) -> tuple[str | None, bool]:
    """Record contact with a node. A node of another data folder may take over an id that was silent for `lease_s`.

    fields: columns of its row. Returns its offer as JSON, if it has reported one, and whether sessions can be admitted
    (`admit_ready`). Raises: NodeIdTaken.
    """
    fields |= {"identity": identity, "last_seen_at": unit.now}
    which = {"id": node_id, "same": identity, "gone_since": unit.now - lease_s}
    if (heard := unit.conn.execute(_HEARD, {**fields, **which}).first()) is not None:
        return heard.offer, heard.next_ready_at is not None and heard.next_ready_at <= unit.now
    known = unit.conn.execute(_KNOWN_NODE, {"id": node_id}).first()
    if known is not None:
        raise _id_taken(node_id, known.url, free_in_s=known.last_seen_at + lease_s - unit.now)
    blank = {"capacity": 0, "draining": False, "backends": "[]", "metrics": "{}"}
    first = {"node_id": node_id, "first_seen_at": unit.now}
    unit.conn.execute(sa.insert(nodes).values(**{**blank, **fields, **first}))
    unit.emit("node.joined", node=node_id, url=fields.get("url"))
    return fields.get("offer"), True


def _id_taken(node_id: str, url: str, *, free_in_s: float) -> NodeIdTaken:
    return NodeIdTaken(
        f"another node has the id {node_id!r}: it runs from another data folder, at {url}. Give this one another --id, "
        f"or stop the other; if the other is gone, its id is free in {max(1, math.ceil(free_in_s))} s."
    )


def claim(
    unit: Unit,
    node_id: str,
    max_sessions: int,
    task_ids: Sequence[str] | None,
    *,
    lease_s: float,
    offer: str | None,
    are_due: bool = True,
) -> list[Lease]:
    """Lease up to `max_sessions` sessions that the node can run, from the head of the queue. Tasks start when their
    first session is leased. offer, are_due: as returned by `touch_node`.
    """
    if are_due:
        admit_ready(unit)
    claimed = [
        (row, leasing.lease(standing_of(row), node_id=node_id, now=unit.now, lease_s=lease_s))
        for row in shared_rows(unit, node_id, max_sessions, task_ids, offer)
    ]
    if not claimed:
        return []
    write_standings(unit, claimed)
    remember_turns(unit, [row for row, _ in claimed])
    found = unit.conn.execute(_BODIES, {"ids": sorted({row["task_id"] for row, _ in claimed})}).all()
    for task_id in sorted(row.task_id for row in found if row.status == "queued"):
        if unit.conn.execute(_START_TASK, {"id": task_id, "status": "running", "started_at": unit.now}).rowcount:
            unit.emit("task.started", task_id)
    bodies = {row.task_id: msgspec.json.decode(row.body) for row in found}
    return [_lease(unit, row, after, lease_s, bodies[row["task_id"]]) for row, after in claimed]


def _lease(unit: Unit, row: sa.RowMapping, after: Standing, lease_s: float, task: dict[str, Any]) -> Lease:
    session_id, task_id = row["session_id"], row["task_id"]
    unit.emit("session.leased", task_id, session_id, node=after.node_id, attempt=after.attempt, fence=after.fence)
    return Lease(
        session_id=session_id,
        task_id=task_id,
        sample_index=row["sample_index"],
        attempt=after.attempt,
        fence=after.fence,
        expires_at=unit.now + lease_s,
        lease_s=lease_s,
        task=task,
    )


def hear(unit: Unit, beat: Heartbeat, *, lease_s: float, key: str = "") -> HeartbeatReply:
    """Renew the leases that the node still holds, and name the sessions that it must drop. key: of its token.

    Raises: NodeIdTaken.
    """
    offer = None if beat.offer is None else msgspec.json.encode(beat.offer).decode()
    fields = {
        "url": beat.url,
        "capacity": beat.capacity,
        "draining": beat.draining,
        "backends": msgspec.json.encode(beat.backends).decode(),
        "metrics": msgspec.json.encode(beat.metrics).decode(),
        "offer": offer,
        "key": key,
    }
    _meet(unit, beat, fields, lease_s)
    renewed = _prolong(unit, beat, lease_s)
    others = [one for one in beat.sessions if one not in renewed]
    found = rows_named(unit, others, also=_unheard(unit, beat.node_id, lease_s))
    rows = [row for row in found if row["session_id"] in beat.sessions]
    renewed |= _renew(unit, rows, beat, lease_s)
    reported = {str(row["session_id"]) for row in rows if _is_reported(row, beat)}
    for row in found:
        if row["session_id"] not in beat.sessions:
            before = standing_of(row)
            after = leasing.unheard(before)
            move(unit, row, after, kind="session.released" if after.attempt == before.attempt else "session.requeued")
    if beat.leaving and forget_nodes(unit.conn, nodes.c.node_id == beat.node_id):
        unit.emit("node.left", node=beat.node_id)
    lost = set(beat.sessions) - renewed - reported
    return HeartbeatReply(renewed=tuple(sorted(renewed)), lost=tuple(sorted(lost)), lease_s=lease_s)


def _meet(unit: Unit, beat: Heartbeat, fields: dict[str, Any], lease_s: float) -> None:
    """Record contact with the node, and its offer. Takes one statement if the offer is unchanged."""
    which = {"id": beat.node_id, "same": beat.identity, "gone_since": unit.now - lease_s, "reported": fields["offer"]}
    as_before = {**fields, "identity": beat.identity, "last_seen_at": unit.now}
    if unit.conn.execute(_HEARD_AS_BEFORE, {**as_before, **which}).first() is not None:
        return
    if unit.conn.execute(
        _OFFERED, {"id": beat.node_id, "reported": fields["offer"], "offer": fields["offer"]}
    ).rowcount:
        unit.emit("node.offer", node=beat.node_id)
    touch_node(unit, beat.node_id, identity=beat.identity, lease_s=lease_s, **fields)


def renew(unit: Unit, beat: Heartbeat, *, lease_s: float) -> set[str]:
    """Renew leases that the server itself keeps for a node, without recording contact. Returns the sessions it
    holds.
    """
    renewed = _prolong(unit, beat, lease_s)
    others = rows_named(unit, [one for one in beat.sessions if one not in renewed])
    return renewed | _renew(unit, others, beat, lease_s)


def _prolong(unit: Unit, beat: Heartbeat, lease_s: float) -> set[str]:
    """Renew the leases that change in nothing else, without a look at their sessions. Returns their sessions."""
    named = [(session_id, fence, stage) for session_id, (fence, stage) in beat.sessions.items()]
    renewed = set[str]()
    for start in range(0, len(named), MANY):
        which = {"node": beat.node_id, "named": named[start : start + MANY]}
        renewed.update(unit.conn.scalars(_PROLONG, {**which, "expires_at": unit.now + lease_s}))
    return renewed


def _unheard(unit: Unit, node_id: str, lease_s: float) -> sa.ColumnElement[bool]:
    """Leases given to the node a while ago and never named by it since. Leases that its heartbeat does not name either
    never reached it, and are returned to the queue. If the response arrives after all, its fence is outdated.
    """
    return sa.and_(
        LEASED,
        sessions.c.node_id == node_id,
        sessions.c.stage.is_(None),
        sessions.c.leased_at < unit.now - lease_s / 3,
    )


def _renew(unit: Unit, rows: Sequence[sa.RowMapping], beat: Heartbeat, lease_s: float) -> set[str]:
    """Renew these leases, as they are and in whatever they change. Returns the sessions that the node still holds."""
    changed: list[tuple[sa.RowMapping, Standing]] = []
    for row in rows:
        fence, stage = beat.sessions[row["session_id"]]
        before = standing_of(row)
        after = leasing.renew(before, node_id=beat.node_id, fence=fence, stage=stage, now=unit.now, lease_s=lease_s)
        if after is None:
            continue
        changed.append((row, after))
        if before.stage != after.stage:
            unit.emit("session.stage", row["task_id"], row["session_id"], node=beat.node_id, stage=stage)
    write_standings(unit, changed)
    return {row["session_id"] for row, _ in changed}


def _is_reported(row: sa.RowMapping, beat: Heartbeat) -> bool:
    """Whether the node's result is already here, although it has not received the confirmation: nothing to renew or
    drop.
    """
    fence, _stage = beat.sessions[row["session_id"]]
    return row["reported_fence"] == fence > 0
