"""Reads and writes session rows inside one write transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from gangline.domain.errors import NotFound
from gangline.domain.session import SessionResult
from gangline.domain.views import Event
from gangline.store.sql.leasing import Standing
from gangline.store.sql.schema import IN_QUEUE, LEASED, WAITING, events, needs, sessions, tenants

_STANDING = Standing.__struct_fields__
MANY = 500  # ids in one IN (...): SQLite's limit is far above, PostgreSQL's plans stay small
_EVENTS = 0x67616E67_00000002

# Built once: SQLAlchemy takes longer to build a query than SQLite to answer it.
_ONE = sa.select(sessions).where(sessions.c.session_id == sa.bindparam("id")).with_for_update()
_WRITE = sa.update(sessions).where(sessions.c.position.in_(sa.bindparam("these", expanding=True)))
_END = (
    sa.update(sessions)
    .where(
        LEASED,
        sessions.c.session_id == sa.bindparam("id"),
        sessions.c.task_id == sa.bindparam("of_task"),
        sessions.c.attempt == sa.bindparam("of_attempt"),
        sessions.c.fence == sa.bindparam("under"),
    )
    .returning(sessions.c.node_id, sessions.c.tenant, sessions.c.leased_at)
)
DAY_S = 86_400
_of = tenants.c
_is_today = _of.day == sa.bindparam("today")
_CHARGE = (
    sa.update(tenants)
    .where(_of.name == sa.bindparam("tenant"))
    .values(
        clock=_of.clock + sa.bindparam("more_s", type_=sa.Float) / _of.weight + sa.bindparam("later", type_=sa.Float),
        num_leases=_of.num_leases + sa.bindparam("num"),
        slot_s=_of.slot_s + sa.bindparam("more_s", type_=sa.Float),
        num_sampled_tokens=_of.num_sampled_tokens + sa.bindparam("more_tokens"),
        day_slot_s=sa.case((_is_today, _of.day_slot_s), else_=0.0) + sa.bindparam("more_s", type_=sa.Float),
        day_tokens=sa.case((_is_today, _of.day_tokens), else_=0) + sa.bindparam("more_tokens"),
        day=sa.bindparam("today"),
    )
)
_DUE = (
    sa.select(sessions.c.position)
    .where(WAITING, sessions.c.ready_at <= sa.bindparam("now"))
    .with_for_update(skip_locked=True)
)
NEXT_READY = sa.select(sa.func.min(sessions.c.ready_at)).where(WAITING).scalar_subquery()
"""When the next session can be admitted."""
_ADD_EVENTS = sa.insert(events)
_ADD_EVENTS_LOCKED = sa.text(
    "INSERT INTO events (at, kind, task_id, session_id, data)"
    " SELECT at, kind, task_id, session_id, data"
    f" FROM (SELECT pg_advisory_xact_lock({_EVENTS})) AS held, unnest(CAST(:at AS float8[]), CAST(:kind AS text[]),"
    " CAST(:task_id AS text[]), CAST(:session_id AS text[]), CAST(:data AS text[]))"
    " WITH ORDINALITY AS new (at, kind, task_id, session_id, data, place) ORDER BY place"
)
"""Takes the lock before the first number."""


class Learnt:
    """What transactions learnt, which never changes."""

    def __init__(self) -> None:
        self.interned: dict[str, int] = {}
        """See `intern`."""
        self.is_shared = False
        self.has_quotas = False
        self.shares_read_at = 0.0
        """Unix time at which the two above were read. They change."""
        self.enough: dict[int, int | None] = {}
        """A task's position -> its `enough_sessions`, None where its sessions are never too many."""


class Unit:
    """One write transaction: its connection, its single timestamp, and its events.

    callback_expiry_s: how long callbacks of tasks that end in it are tried. learnt: shared between transactions.
    """

    def __init__(self, conn: sa.Connection, now: float, *, callback_expiry_s: float, learnt: Learnt) -> None:
        self.conn = conn
        self.now = now
        self.callback_expiry_s = callback_expiry_s
        self.events: list[Event] = []
        self.learnt = learnt
        self.charges = defaultdict[str, list[float]](lambda: [0, 0.0, 0, 0.0])
        """tenant -> ended leases, their seconds, their sampled tokens; what its clock moves on without them"""
        self.numbered: dict[str, int] = {}
        """Learnt here: see `Learnt.interned`."""

    def emit(self, kind: str, task_id: str | None = None, session_id: str | None = None, **data: Any) -> None:
        event = Event(seq=0, at=self.now, kind=kind, task_id=task_id, session_id=session_id, data=data)
        self.events.append(event)

    def charge(self, row: Mapping[Any, Any], num_tokens: int | None = 0) -> None:
        """Count the lease of a session that ends, for its tenant. row: with its tenant and `leased_at`."""
        charge = self.charges[row["tenant"]]
        charge[0] += 1
        charge[1] += max(0.0, self.now - row["leased_at"])
        charge[2] += num_tokens or 0

    def flush(self) -> None:
        # Always in this order, after all other rows, so that no two transactions wait for each other.
        for tenant, (num, slot_s, num_tokens, later) in sorted(self.charges.items()):
            used = {"num": num, "more_s": slot_s, "more_tokens": num_tokens, "later": later}
            used["today"] = int(self.now // DAY_S)
            self.conn.execute(_CHARGE, {"tenant": tenant, **used})
        if not self.events:
            return
        rows = [
            {
                "at": event.at,
                "kind": event.kind,
                "task_id": event.task_id,
                "session_id": event.session_id,
                "data": msgspec.json.encode(event.data).decode(),
            }
            for event in self.events
        ]
        append_events(self.conn, rows)


def append_events(conn: sa.Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Write events, as the last step before the commit.

    Clients that resume after a number must not miss a lower one committed later. SQLite has one writer. In PostgreSQL a
    lock is held from the first number taken to the commit; it cannot deadlock, because nothing else is waited for in
    between.
    """
    if conn.dialect.name == "postgresql":
        names = ("at", "kind", "task_id", "session_id", "data")
        conn.execute(_ADD_EVENTS_LOCKED, {name: [row.get(name) for row in rows] for name in names})
    else:
        conn.execute(_ADD_EVENTS, rows)


def locked_rows(unit: Unit, where: Any, *, skip_locked: bool = False) -> Sequence[sa.RowMapping]:
    """Rows that nobody else can change before this transaction ends (SQLite has one writer; PostgreSQL locks them).

    skip_locked: skip rows that another transaction is changing.
    """
    # Sorts the few rows found. With the bare column, SQLite would read the whole table in order.
    query = sa.select(sessions).where(where).order_by(sessions.c.position + 0)
    return unit.conn.execute(query.with_for_update(skip_locked=skip_locked)).mappings().all()


def admit_ready(unit: Unit) -> int:
    """Admit sessions to the queue that waited long enough after a fault. Returns their number."""
    due = unit.conn.execute(_DUE, {"now": unit.now}).scalars().all()
    for start in range(0, len(due), MANY):
        some = sessions.c.position.in_(due[start : start + MANY])
        unit.conn.execute(sa.update(sessions).where(some).values(ready_at=None))
    return len(due)


def queue(*columns: Any) -> sa.Select[*tuple[Any, ...]]:
    """Sessions that may be leased, from the head of the queue: by priority, then by turn. An index lookup, however long
    the queue is.
    """
    place = (sessions.c.priority.desc(), sessions.c.turn, sessions.c.position)
    return sa.select(*columns).where(IN_QUEUE).order_by(*place)


_NEEDS_BODY = sa.select(needs.c.body).where(needs.c.id == sessions.c.needs).scalar_subquery().label("needs_body")
_HEAD = queue(sessions, _NEEDS_BODY).limit(sa.bindparam("many", type_=sa.Integer)).with_for_update(skip_locked=True)


_SUITED_HEAD = _HEAD.where(sessions.c.needs.not_in(sa.bindparam("unsuited", expanding=True)))
_OF_TENANT = sessions.c.tenant == sa.bindparam("of_tenant")
_HEADS = {
    (False, False): _HEAD,
    (True, False): _SUITED_HEAD,
    (False, True): _HEAD.where(_OF_TENANT),
    (True, True): _SUITED_HEAD.where(_OF_TENANT),
}
"""(only suited ones, of one tenant) -> the query"""


def queued_rows(
    unit: Unit,
    limit: int,
    task_ids: Sequence[str] | None = None,
    unsuited: Sequence[int] = (),
    tenant: str | None = None,
) -> Sequence[sa.RowMapping]:
    """The head of the queue, without sessions that another transaction is taking; `needs_body` is their Needs as JSON.

    task_ids: only sessions of these tasks; None means all. unsuited: numbers of needs to skip. tenant: None means all.
    """
    head = _HEADS[bool(unsuited), tenant is not None]
    head = head if task_ids is None else head.where(sessions.c.task_id.in_(task_ids))
    asked: dict[str, Any] = {"many": limit}
    asked |= {"unsuited": unsuited} if unsuited else {}
    asked |= {} if tenant is None else {"of_tenant": tenant}
    return unit.conn.execute(head, asked).mappings().all()


def rows_named(
    unit: Unit, session_ids: Sequence[str], also: sa.ColumnElement[bool] | None = None
) -> list[sa.RowMapping]:
    """The sessions that exist. also: a condition for further rows of the same query."""
    wheres: list[sa.ColumnElement[bool]] = [
        sessions.c.session_id.in_(session_ids[start : start + MANY]) for start in range(0, len(session_ids), MANY)
    ]
    if also is not None:
        wheres[:1] = [wheres[0] | also if wheres else also]
    return list({row["position"]: row for where in wheres for row in locked_rows(unit, where)}.values())


def newest(columns: Sequence[sa.Column[Any]], limit: int, before: int | None, **wanted: object) -> sa.Select[Any]:
    """Rows of one table, newest first, and one more than the limit. before: position of the row before them. wanted:
    values of columns; None matches any.
    """
    its = columns[0].table.c
    where = [its[name] == value for name, value in wanted.items() if value is not None]
    where += [] if before is None else [its.position < before]
    return sa.select(*columns).where(*where).order_by(its.position.desc()).limit(limit + 1)


def one_row(unit: Unit, session_id: str) -> sa.RowMapping:
    """Raises: NotFound."""
    row = unit.conn.execute(_ONE, {"id": session_id}).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no session {session_id!r}.")
    return row


def standing_of(row: sa.RowMapping) -> Standing:
    fields = {name: row[name] for name in _STANDING}
    fields["failure"] = None if row["failure"] is None else msgspec.json.decode(row["failure"])
    return msgspec.convert(fields, Standing)


def write_standings(unit: Unit, moved: Sequence[tuple[sa.RowMapping, Standing]], **columns: Any) -> None:
    """Rows that change alike are written together. columns: further columns, the same for all rows."""
    alike = defaultdict[tuple[tuple[str, Any], ...], list[int]](list)
    for row, after in moved:
        values = _values(after)
        alike[tuple((name, value) for name, value in values.items() if value != row[name])].append(row["position"])
    for changed, positions in alike.items():
        for start in range(0, len(positions) if changed or columns else 0, MANY):
            unit.conn.execute(_WRITE, {**dict(changed), **columns, "these": positions[start : start + MANY]})


def end_leased(unit: Unit, result: SessionResult, changes: Mapping[str, Any], **columns: Any) -> sa.RowMapping | None:
    """Write the end of the session if this attempt holds it, without a look at it. Returns its node, tenant and time of
    its lease.
    """
    which = {"id": result.session_id, "of_task": result.task_id, "of_attempt": result.attempt, "under": result.fence}
    return unit.conn.execute(_END, {**_as_columns(changes), **columns, **which}).mappings().one_or_none()


def _values(standing: Standing) -> dict[str, Any]:
    return _as_columns({name: getattr(standing, name) for name in _STANDING})


def _as_columns(values: Mapping[str, Any]) -> dict[str, Any]:
    failure = values["failure"]
    return {**values, "failure": None if failure is None else msgspec.json.encode(failure).decode()}
