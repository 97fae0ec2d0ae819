"""Annotations of sessions: added, and read by session or by dataset. They are never changed."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from gangline.domain.errors import NotFound
from gangline.domain.views import Annotation, AnnotationPage
from gangline.store.sql.rows import newest
from gangline.store.sql.schema import annotations, sessions, tasks

_COLUMNS = [annotations.c[name] for name in Annotation.__struct_fields__]


def add_annotation(conn: sa.Connection, session_id: str, at: float, **fields: Any) -> Annotation:
    """said: the annotation's fields. Raises: NotFound."""
    task_id = conn.scalar(sa.select(sessions.c.task_id).where(sessions.c.session_id == session_id))
    if task_id is None:
        raise NotFound(f"no session {session_id!r}.")
    row: dict[str, Any] = {"session_id": session_id, "task_id": task_id, "at": at, **fields}
    (position,) = conn.execute(sa.insert(annotations).values(**row)).inserted_primary_key or (0,)
    return Annotation(**row, position=position)


def read_annotations(
    conn: sa.Connection, tenant: str | None, *, limit: int, before: int | None, **wanted: str | None
) -> AnnotationPage:
    """Newest first. wanted: values of columns; None matches any."""
    query = newest(_COLUMNS, limit, before, **wanted)
    if tenant is not None:
        query = query.where(annotations.c.task_id.in_(sa.select(tasks.c.task_id).where(tasks.c.tenant == tenant)))
    found = [Annotation(**row) for row in conn.execute(query).mappings()]
    page = tuple(found[:limit])
    return AnnotationPage(annotations=page, next=page[-1].position if len(found) > limit else None)
