"""Decides when to give up: too many tasks in a row that produced nothing to train on.

A task produced nothing if each of its sessions ended without an answered model call, or by an infrastructure fault. A
session that ran and failed is ordinary: a weak policy fails and learns from it. Occasional broken tasks are ordinary
too, so a run that had a good task tolerates many more in a row.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from gangline.domain.errors import InvalidGroup
from gangline.domain.session import SessionResult, made_no_call

_log = logging.getLogger(__name__)

_TASKS_AT_FIRST = 8
_TASKS_LATER = 32
_SHOWN_LINES = 6
_SHOWN_CHARS = 1_000
_NO_CALL = "no model call"


class Patience:
    """The patience of one run, which is notified of every finished task. Bound to one event loop."""

    def __init__(self) -> None:
        self._most = _TASKS_AT_FIRST
        self._kind = ""
        """The shared failure of the latest tasks in a row; empty if the latest task ran."""
        self._tasks = set[str]()
        self._causes = Counter[str]()

    def note(self, task_id: str, sessions: Sequence[SessionResult]) -> None:
        """task_id: the same for each run of the task. Raises: InvalidGroup if too many in a row produced nothing."""
        ended = [session for session in sessions if session.outcome != "cancelled"]
        if not ended:
            return
        kinds = {_kind_of(one) for one in ended}
        if "" in kinds:
            self._most = _TASKS_LATER
        if len(kinds) > 1 or "" in kinds:
            self._begin("")
            return
        if (kind := kinds.pop()) != self._kind:
            self._begin(kind)
        self._causes.update(map(cause_of, ended))
        if task_id in self._tasks:
            return
        self._tasks.add(task_id)
        number = len(self._tasks)
        if number >= self._most:
            raise InvalidGroup(self._why(ended[-1]))
        if number & (number - 1) == 0:
            _log.warning("tasks.came_to_nothing number=%d limit=%d cause=%s", number, self._most, cause_of(ended[-1]))

    def _begin(self, kind: str) -> None:
        self._kind = kind
        self._tasks.clear()
        self._causes.clear()

    def _why(self, last: SessionResult) -> str:
        causes = "; ".join(f"{number} sessions: {cause}" for cause, number in self._causes.most_common(3))
        what = "no session made a model call that was answered" if self._kind == _NO_CALL else "all failed alike"
        return f"{len(self._tasks)} tasks in a row gave nothing to train on: {what} ({causes}). {end_of_session(last)}"


def _kind_of(session: SessionResult) -> str:
    """The kind of failure; empty if the session ran."""
    if made_no_call(session) and (session.reward is None or session.outcome != "completed"):
        return _NO_CALL
    if session.outcome != "infra_error":
        return ""
    return "infra_error" if session.failure is None else f"{session.failure.boundary} {session.failure.code}"


def cause_of(session: SessionResult) -> str:
    """How a session ended, in a few words."""
    return session.outcome if session.failure is None else f"{session.outcome}, {session.failure.message}"


def end_of_session(session: SessionResult) -> str:
    """The end of its output, and the commands that show the rest."""
    session_id = session.session_id
    look = f"Look at it with `gangline show {session_id}` and `gangline logs {session_id}`."
    for stream in ("stderr", "stdout"):
        text = session.artifacts.get(f"harness.{stream}", b"").decode(errors="replace").strip()
        if text:
            tail = "\n".join(f"  {line}" for line in text[-_SHOWN_CHARS:].splitlines()[-_SHOWN_LINES:])
            return f"The end of the {stream} of {session_id}:\n{tail}\n{look}"
    return look
