"""Callbacks with guaranteed delivery: written in the transaction that ends a task, sent and settled later.

pending ──▶ delivered      the receiver answered 2xx
   │  ▲ ▼  │ later and later
  tried ──▶ expired        nobody answered until `expires_at`

If several servers share the database, a server that takes a callback postpones its next try, so that the others skip
it. If that server dies, they try it then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from gangline.domain.tenancy import DEFAULT_TENANT
from gangline.domain.views import TaskView
from gangline.store.sql.database import Database, repeated
from gangline.store.sql.rows import append_events
from gangline.store.sql.schema import outbox, tasks

POLAR_BODY: dict[str, Any] = {"callback_form": "polar"}
"""Stored instead of a body that is built from the task's results on sending, since results may be large."""


class Callback(msgspec.Struct, frozen=True, kw_only=True):
    """One message to one receiver."""

    id: int
    key: str
    """Unchanged between tries, so that receivers can drop duplicates."""
    task_id: str
    url: str
    body: str
    """JSON, without the server's own address."""
    num_tries: int
    created_at: float
    next_at: float
    expires_at: float
    secret: str | None = None
    """Environment variable with the signing key. None: the control token, unless `bound`; empty: no signature."""
    bound: bool = False
    """Whether a tenant's own token submitted its task."""


def next_try_at(num_tries: int, *, now: float, expires_at: float, base_s: float, max_s: float) -> float | None:
    """When to try again after `num_tries` failures: doubling, bounded. None if the callback has expired.

    The last try is at the very end, so that a long pause does not waste the remaining time.
    """
    if now >= expires_at:
        return None
    pause_s = min(max_s, base_s * 2.0 ** min(num_tries - 1, 30))
    return min(now + pause_s, expires_at)


def add_callback(conn: sa.Connection, task: TaskView, *, now: float, expiry_s: float) -> None:
    """Queue the message that `task` ended, if its request asks for one.

    expiry_s: how long it is tried, unless the request sets it.
    """
    url = task.request.get("callback_url")
    if not url:
        return
    body = POLAR_BODY if task.request.get("callback_form") == "polar" else _body(task)
    conn.execute(
        sa.insert(outbox).values(
            key=f"{task.task_id}:ended",
            task_id=task.task_id,
            url=url,
            body=msgspec.json.encode(body).decode(),
            state="pending",
            num_tries=0,
            created_at=now,
            next_at=now,
            expires_at=now + (task.request.get("callback_expiry_seconds") or expiry_s),
            # The control token tells a tenant's receiver nothing, and signs nothing for it.
            secret=task.request.get("callback_secret") or (None if task.tenant == DEFAULT_TENANT else ""),
        )
    )


def _body(task: TaskView) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "status": task.status,
        "rewards": task.rewards,
        "outcomes": [session.outcome for session in task.sessions],
        "metadata": task.request.get("metadata", {}),
    }


_FIELDS = [
    *(outbox.c[name] for name in Callback.__struct_fields__ if name != "bound"),
    sa.select(tasks.c.bound).where(tasks.c.task_id == outbox.c.task_id).scalar_subquery().label("bound"),
]


class Outbox:
    """Messages to send. Methods block; on an event loop use `database.run` and `database.query`."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def due(self, now: float, limit: int, busy: Collection[int] = ()) -> list[Callback]:
        """Pending callbacks that are due, longest overdue first. busy: ids already being sent."""
        query = sa.select(*_FIELDS).where(_waiting(busy), outbox.c.next_at <= now)
        with self.database.reading() as conn:
            rows = conn.execute(query.order_by(outbox.c.next_at).limit(limit)).mappings()
            return [Callback(**{name: row[name] for name in Callback.__struct_fields__}) for row in rows]

    @repeated
    def take(self, now: float, limit: int, busy: Collection[int] = (), *, held_s: float) -> list[Callback]:
        """Like `due`, but reserves them for the caller for `held_s`, or until they are settled."""
        query = sa.select(*_FIELDS).where(_waiting(busy), outbox.c.next_at <= now)
        with self.database.writing() as conn:
            query = query.order_by(outbox.c.next_at).limit(limit).with_for_update(skip_locked=True)
            rows = conn.execute(query).mappings().all()
            taken = [Callback(**{name: row[name] for name in Callback.__struct_fields__}) for row in rows]
            mine = outbox.c.id.in_([callback.id for callback in taken])
            conn.execute(sa.update(outbox).where(mine).values(next_at=now + held_s))
            return taken

    def next_due_at(self, busy: Collection[int] = ()) -> float | None:
        with self.database.reading() as conn:
            return conn.scalar(sa.select(sa.func.min(outbox.c.next_at)).where(_waiting(busy)))

    def delivered(self, callback: Callback, *, now: float) -> None:
        self._settle(callback, now, "delivered", next_at=now, error=None)

    def failed(self, callback: Callback, *, now: float, next_at: float | None, error: str) -> None:
        """next_at: when to try again; None gives up."""
        state = "expired" if next_at is None else "pending"
        self._settle(callback, now, state, next_at=now if next_at is None else next_at, error=error)

    @repeated
    def _settle(self, callback: Callback, now: float, state: str, *, next_at: float, error: str | None) -> None:
        with self.database.writing() as conn:
            settled = conn.execute(
                sa.update(outbox)
                .where(outbox.c.id == callback.id, outbox.c.state == "pending")
                .values(state=state, num_tries=callback.num_tries + 1, next_at=next_at, last_error=error)
            ).rowcount
            if settled and state != "pending":
                data = msgspec.json.encode({"url": callback.url, "tries": callback.num_tries + 1}).decode()
                append_events(
                    conn, [{"at": now, "kind": f"callback.{state}", "task_id": callback.task_id, "data": data}]
                )

    def all_states(self) -> Sequence[tuple[str, str]]:
        """(key, state) of every callback, oldest first."""
        with self.database.reading() as conn:
            rows = conn.execute(sa.select(outbox.c.key, outbox.c.state).order_by(outbox.c.id))
            return [(key, state) for key, state in rows]


def _waiting(busy: Collection[int]) -> sa.ColumnElement[bool]:
    return sa.and_(outbox.c.state == "pending", outbox.c.id.not_in(busy))
