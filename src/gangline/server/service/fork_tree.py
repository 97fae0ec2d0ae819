"""Reads the tree of forks that contains a session from the tasks. Blocking."""

from __future__ import annotations

from collections.abc import Iterator

from gangline.domain.errors import NotFound
from gangline.domain.views import ForkNode, ForkTree, SessionView
from gangline.store.sql.reader import TaskReader

_MAX_TASKS = 100
_MAX_SESSIONS = 1000
_MAX_EDIT_CHARS = 2000


def fork_tree(reader: TaskReader, session_id: str) -> ForkTree:
    """The tree from its root session. Raises: NotFound."""
    reading = _Reading(reader)
    nodes = list(reading.below(_first(reader, session_id)))
    return ForkTree(nodes=tuple(nodes), is_whole=reading.is_whole)


def _first(reader: TaskReader, session_id: str) -> SessionView:
    view = reader.session(session_id)
    passed: set[str] = set()
    while (parent := reader.request(view.task_id).fork) is not None:
        passed.add(view.session_id)
        if parent.session_id in passed:  # a task id was reused for a fork of its former forks
            break
        try:
            view = reader.session(parent.session_id)
        except NotFound:  # deleted by the retention limits
            break
    return view


class _Reading:
    def __init__(self, reader: TaskReader) -> None:
        self._reader = reader
        self._num_tasks = 0
        self._num_sessions = 0
        self._read: set[str] = set()
        self.is_whole = True

    def below(self, first: SessionView) -> Iterator[ForkNode]:
        """The session and its forks, each after its parent."""
        self._read.add(first.session_id)
        yield _node(first, None, 0, None, None)
        yield from self._forks(first, 1)

    def _forks(self, parent: SessionView, depth: int) -> Iterator[ForkNode]:
        left = _MAX_TASKS - self._num_tasks
        found = self._reader.forks_of([parent.session_id], left + 1)
        self.is_whole = self.is_whole and len(found) <= left
        self._num_tasks += len(found[:left])
        for task_id in found[:left]:
            task = self._reader.task(task_id)
            fork = self._reader.request(task_id).fork
            assert fork is not None
            for session in task.sessions:
                if session.session_id in self._read:
                    continue
                self._read.add(session.session_id)
                self._num_sessions += 1
                if self._num_sessions > _MAX_SESSIONS:
                    self.is_whole = False
                    return
                yield _node(session, parent.session_id, depth, fork.turn, fork.edit)
                yield from self._forks(session, depth + 1)


def _node(session: SessionView, parent: str | None, depth: int, turn: int | None, edit: str | None) -> ForkNode:
    return ForkNode(
        session_id=session.session_id,
        task_id=session.task_id,
        parent=parent,
        depth=depth,
        turn=turn,
        edit=None if edit is None else edit[:_MAX_EDIT_CHARS],
        state=session.state,
        outcome=session.outcome,
        reward=session.reward,
    )
