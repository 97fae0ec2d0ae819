"""Shares of the fleet between tenants, by weight in slot-seconds, and their quotas.

A slot-second is a second for which a node holds a lease. Each tenant has a clock: the slot-seconds of its ended leases,
divided by its weight. The queue serves the tenant whose clock, with that of its running sessions, is lowest. So shares
are exact over time, whatever the length of sessions. A tenant that was idle is set to the others' time, and has saved
nothing up. Priorities and turns of submitters order the sessions of one tenant.

While there is one tenant without quotas, nothing here is asked.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from gangline.domain.errors import QuotaExceeded
from gangline.domain.tenancy import QUOTAS, TenantView, UsageBy, UsageRow
from gangline.store.sql.placing import num_gpus_of, suited_rows, unplaced
from gangline.store.sql.rows import DAY_S, Unit
from gangline.store.sql.schema import IN_QUEUE, LEASED, QUEUED, sessions, tasks, tenants

_KNOWN_FOR_S = 1.0
"""Seconds after which it is asked again whether there are several tenants, or quotas."""

_it = tenants.c


def _any_of(where: sa.ColumnElement[bool], order: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Whether a tenant has such a session. order: of the index by tenant. With it and a limit PostgreSQL reads one row
    of that index, and not the table.
    """
    mine = sa.select(sessions.c.position).where(where, sessions.c.tenant == _it.name).order_by(order)
    return mine.limit(1).correlate(tenants).scalar_subquery().is_not(None)


_NUM_RUNNING = sa.func.count().label("num_running")
_LEASED_AT = sa.func.sum(sessions.c.leased_at).label("leased_at_sum")
_RUNNING = sa.select(sessions.c.tenant, _NUM_RUNNING, _LEASED_AT).where(LEASED).group_by(sessions.c.tenant).subquery()
_ALL = sa.select(tenants, _RUNNING.c.num_running, _RUNNING.c.leased_at_sum).select_from(
    tenants.outerjoin(_RUNNING, _RUNNING.c.tenant == _it.name)
)
_IN_QUEUE = _ALL.where(_any_of(IN_QUEUE, sessions.c.priority.desc()))
_HAS_QUOTA = sa.or_(*(_it[name].is_not(None) for name in QUOTAS))
_LIMITED = _ALL.where(_HAS_QUOTA)
_SEVERAL = sa.select(sa.func.count(), sa.func.count().filter(_HAS_QUOTA))
_QUEUED_OF = sa.and_(QUEUED, sessions.c.tenant == sa.bindparam("tenant"))
_NUM_QUEUED = sa.select(sa.func.count()).select_from(sessions).where(_QUEUED_OF)
_is_open = sa.or_(_any_of(QUEUED, sessions.c.submitter), _any_of(LEASED, sessions.c.leased_at))
_OWN = sa.select(tenants, _is_open.label("is_open")).where(_it.name == sa.bindparam("tenant"))
_LOWEST = sa.select(sa.func.min(_it.clock)).where(_it.name != sa.bindparam("tenant"), _is_open)
_HIGHEST = sa.select(sa.func.max(_it.clock))
_SET_CLOCK = sa.update(tenants).where(_it.name == sa.bindparam("tenant"))


def shared_rows(
    unit: Unit, node_id: str, limit: int, task_ids: Sequence[str] | None, offer: str | None
) -> Sequence[sa.RowMapping]:
    """The sessions that a node with this offer is to run next. task_ids: only of these tasks, whoever's they are."""
    if task_ids is not None or not is_shared(unit):
        return suited_rows(unit, node_id, limit, task_ids, offer)
    waiting = [_Portion(row, unit.now) for row in unit.conn.execute(_IN_QUEUE).mappings()]
    known = [share.mean_s for share in waiting if share.mean_s]
    usual_s = sum(known) / len(known) if known else 1.0
    found: dict[str, Sequence[sa.RowMapping]] = {}
    asked = Counter[str]()
    while len(wanted := _allotted(waiting, limit, usual_s)):
        changed = [share for share in waiting if wanted[share.name] != asked[share.name]]
        if not changed:
            break
        asked = wanted
        for share in changed:
            others = [row for name, rows in found.items() if name != share.name for row in rows]
            num_gpus = sum(num_gpus_of(row["needs_body"]) for row in others)
            rows = suited_rows(
                unit, node_id, wanted[share.name], None, offer, tenant=share.name, num_gpus_given=num_gpus
            )
            found[share.name] = rows
            if len(rows) < wanted[share.name]:
                share.room = len(rows)  # the others get the rest
    _move_on(unit, waiting, found)
    return [row for rows in found.values() for row in rows][:limit]


def _move_on(unit: Unit, waiting: Sequence[_Portion], found: Mapping[str, Sequence[sa.RowMapping]]) -> None:
    """Who waits for a quota, or for a node that is not there, saves nothing up meanwhile, like one who is idle."""
    served = [share.clock for share in waiting if found.get(share.name)]
    late = [share for share in waiting if served and share.clock < min(served) and not found.get(share.name)]
    able = {share.name for share in late if share.num_running and not share.is_held}  # on nodes of another kind
    if asked := [share.name for share in late if not share.num_running and not share.is_held]:
        placeable = sessions.c.needs.not_in(unplaced(unit.conn, unit.now))
        own = sa.select(sessions.c.tenant).where(IN_QUEUE, sessions.c.tenant.in_(asked), placeable)
        able |= set(unit.conn.scalars(own.distinct()))
    now = min([*served, *(share.clock for share in late if share.name in able)], default=0.0)
    for share in late:
        if share.name not in able and share.clock < now:
            unit.charges[share.name][3] += now - share.clock


class _Portion:
    """The room that one tenant has left."""

    def __init__(self, row: sa.RowMapping, now: float) -> None:
        self.name: str = row["name"]
        self.weight: float = row["weight"]
        self.mean_s: float = row["slot_s"] / row["num_leases"] if row["num_leases"] else 0.0
        self.num_running: int = row["num_running"] or 0
        elapsed_s = self.num_running * now - (row["leased_at_sum"] or 0.0)
        self.clock = row["clock"] + max(elapsed_s, self.num_running * self.mean_s) / self.weight
        self.room: int | None = None
        if row["max_running"] is not None:
            self.room = max(0, row["max_running"] - self.num_running)
        if _used_up(row, now) is not None:
            self.room = 0
        self.is_held = self.room == 0


def _allotted(shares: Sequence[_Portion], limit: int, usual_s: float) -> Counter[str]:
    """How many of the next sessions each gets: one after the other to the lowest clock."""
    given = Counter[str]()
    heap = [(share.clock, share.name, share) for share in shares if share.room != 0]
    heapq.heapify(heap)
    while heap and given.total() < limit:
        clock, name, share = heapq.heappop(heap)
        given[name] += 1
        if share.room is None or given[name] < share.room:
            heapq.heappush(heap, (clock + (share.mean_s or usual_s) / share.weight, name, share))
    return given


def is_shared(unit: Unit) -> bool:
    """Whether there are several tenants, or quotas."""
    if unit.now - unit.learnt.shares_read_at > _KNOWN_FOR_S or unit.now < unit.learnt.shares_read_at:
        num, num_limited = unit.conn.execute(_SEVERAL).one()
        unit.learnt.is_shared, unit.learnt.has_quotas = num > 1 or num_limited > 0, num_limited > 0
        unit.learnt.shares_read_at = unit.now
    return unit.learnt.is_shared


def admit(unit: Unit, tenant: str, num_new: int) -> None:
    """Take note of a tenant that submits sessions. Raises: QuotaExceeded."""
    own = unit.conn.execute(_OWN, {"tenant": tenant}).mappings().one_or_none()
    if own is None:
        add_tenant(unit.conn, tenant)
        unit.learnt.shares_read_at = 0.0
        own = unit.conn.execute(_OWN, {"tenant": tenant}).mappings().one()
    if (why := _used_up(own, unit.now)) is not None:
        raise _refused(tenant, *why)
    if (most := own["max_queued"]) is not None:
        num = unit.conn.scalar(_NUM_QUEUED, {"tenant": tenant}) or 0
        if num + num_new > most:
            raise _refused(tenant, "max_queued", most, num, None)
    if not own["is_open"]:
        now = unit.conn.scalar(_LOWEST, {"tenant": tenant})
        now = unit.conn.scalar(_HIGHEST) if now is None else now
        if now is not None and now > own["clock"]:
            unit.conn.execute(_SET_CLOCK, {"tenant": tenant, "clock": now})


def add_tenant(conn: sa.Connection, name: str) -> None:
    kind = postgresql if conn.dialect.name == "postgresql" else sqlite
    conn.execute(kind.insert(tenants).values(name=name).on_conflict_do_nothing())


def set_tenant(unit: Unit, name: str, changes: Mapping[str, float | None]) -> None:
    add_tenant(unit.conn, name)
    unit.learnt.shares_read_at = 0.0
    if changes:
        unit.conn.execute(sa.update(tenants).where(_it.name == name).values(**changes))


def held_back(conn: sa.Connection, now: float) -> Mapping[str, str]:
    """Tenant -> the quota for which its queued sessions wait."""
    found: dict[str, str] = {}
    for row in conn.execute(_LIMITED).mappings():
        if (why := _used_up(row, now)) is not None:
            found[row["name"]] = _told(row["name"], *why)
        elif row["max_running"] is not None and (row["num_running"] or 0) >= row["max_running"]:
            found[row["name"]] = _told(row["name"], "max_running", row["max_running"], row["num_running"] or 0, None)
    return found


def tenant_views(conn: sa.Connection, now: float, name: str | None) -> list[TenantView]:
    """name: of one tenant; None: all, the largest first."""
    num_queued = sa.select(sessions.c.tenant, sa.func.count()).where(QUEUED).group_by(sessions.c.tenant)
    queued = {row[0]: row[1] for row in conn.execute(num_queued)}
    query = _ALL.order_by(_it.slot_s.desc(), _it.name)
    rows = conn.execute(query if name is None else query.where(_it.name == name)).mappings()
    return [_view(row, now, queued.get(row["name"], 0)) for row in rows]


def _view(row: sa.RowMapping, now: float, num_queued: int) -> TenantView:
    is_today = row["day"] == now // DAY_S
    return TenantView(
        **{name: row[name] for name in ("name", "weight", *QUOTAS, "num_leases", "slot_s", "num_sampled_tokens")},
        num_running=row["num_running"] or 0,
        num_queued=num_queued,
        slot_s_today=row["day_slot_s"] if is_today else 0.0,
        sampled_tokens_today=row["day_tokens"] if is_today else 0,
    )


def summed_use(conn: sa.Connection, by: UsageBy, since: float, until: float, tenant: str | None) -> list[UsageRow]:
    """The use of sessions that have ended in [since, until), the most slot-seconds first. tenant: of it alone."""
    key = sa.func.coalesce((tasks if by in ("run", "harness") else sessions).c[by], "")
    slot_s = sa.func.coalesce(sa.func.sum(sessions.c.ended_at - sessions.c.leased_at), 0.0)
    num_tokens = sa.func.coalesce(sa.func.sum(sessions.c.num_sampled_tokens), 0)
    query = sa.select(key, sa.func.count(), slot_s, num_tokens).join(tasks, tasks.c.task_id == sessions.c.task_id)
    query = query.where(sa.or_(tasks.c.ended_at.is_(None), tasks.c.ended_at >= since))  # these have an index
    query = query.where(sessions.c.ended_at >= since, sessions.c.ended_at < until)
    mine = query if tenant is None else query.where(sessions.c.tenant == tenant)
    return [UsageRow(*row) for row in conn.execute(mine.group_by(key).order_by(slot_s.desc(), key))]


def _used_up(row: Mapping[Any, Any], now: float) -> tuple[str, float, float, float] | None:
    """The quota of a day that is used up: its name, its size, its use, and when it is free again."""
    if row["day"] == now // DAY_S:
        for name, used in (("max_slot_s_per_day", "day_slot_s"), ("max_tokens_per_day", "day_tokens")):
            if row[name] is not None and row[used] >= row[name]:
                return name, row[name], row[used], (now // DAY_S + 1) * DAY_S
    return None


def _told(tenant: str, quota: str, most: float, used: float, frees_at: float | None) -> str:
    when = "as its sessions leave" if frees_at is None else "at midnight, UTC"
    return f"tenant {tenant!r} has used its quota {quota}: {used:g} of {most:g}; it frees {when}"


def _refused(tenant: str, quota: str, most: float, used: float, frees_at: float | None) -> QuotaExceeded:
    why = _told(tenant, quota, most, used, frees_at)
    return QuotaExceeded(f"{why}.", quota=quota, limit=most, used=used, frees_at=frees_at)
