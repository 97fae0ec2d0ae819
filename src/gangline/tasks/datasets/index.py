"""The index of a survey: one row per session, on disk, and the queries that need all of them.

Duplicates, the best sessions of a task, the split and the pairs are SQL over a temporary SQLite file, so memory does
not grow with the number of sessions.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from gangline.tasks.datasets.selection import Standing

Split = Literal["train", "test"]

_SCHEMA = """
create table entries (
    position integer primary key, task_id text, session_id text, instance text, stratum text,
    standing text, why text, reward real, num_tokens integer, digest blob, shuffled blob, is_test integer default 0
)
"""
_DUPLICATES = """
update entries set standing = 'left_out', why = 'duplicate' where standing != 'left_out' and position not in (
    select min(position) from entries where standing != 'left_out' group by digest, standing
)
"""
_BEYOND_BEST = """
update entries set standing = 'left_out', why = 'more than enough of its task' where position in (
    select position from (
        select position, row_number() over (
            partition by instance order by reward desc, num_tokens, position
        ) as rank from entries where standing = 'accepted'
    ) where rank > ?
)
"""
_SPLIT = """
update entries set is_test = 1 where instance in (
    select instance from (
        select instance,
            row_number() over (partition by stratum, has_accepted order by shuffled) as rank,
            count(*) over (partition by stratum, has_accepted) as num
        from (
            select instance, min(stratum) as stratum, min(shuffled) as shuffled,
                max(standing = 'accepted') as has_accepted
            from entries where standing != 'left_out' group by instance
        )
    ) where num > 1 and rank <= min(num - 1, max(1, cast(round(num * :share) as integer)))
)
"""
_STRATA = """
select stratum, count(distinct instance), count(*), sum(standing = 'accepted'),
    count(distinct case when standing = 'accepted' then instance end)
from entries group by stratum order by stratum
"""
_PAIRS = """
with ranked as (
    select *, row_number() over (partition by instance, standing order by reward desc, num_tokens, position) as rank
    from entries where standing in ('accepted', 'rejected')
)
select good.task_id, good.session_id, bad.task_id, bad.session_id, good.instance
from ranked good join ranked bad on good.instance = bad.instance and good.rank = bad.rank
where good.standing = 'accepted' and bad.standing = 'rejected' and good.is_test = ? order by good.position
"""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The indexed fields of a session."""

    task_id: str
    session_id: str
    instance: str
    """Identifies the problem; several tasks may share it. All its sessions go to the same split."""
    stratum: str
    """Value of the key that the split is stratified by."""
    standing: Standing
    why: str
    reward: float | None
    num_tokens: int
    digest: bytes


class Place(msgspec.Struct, frozen=True):
    """Location of a session of a split."""

    task_id: str
    session_id: str
    instance: str
    standing: Standing
    why: str


class Pair(msgspec.Struct, frozen=True):
    """An accepted and a rejected session of one problem."""

    chosen: tuple[str, str]
    """(task id, session id)"""
    rejected: tuple[str, str]
    instance: str


class Stratum(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table by repository."""

    name: str
    num_instances: int
    num_attempts: int
    """All sessions, including those without a reward."""
    num_accepted: int
    num_solved: int
    """Problems with an accepted session."""

    @property
    def rate(self) -> float:
        return self.num_accepted / self.num_attempts


class Index:
    """path: of the temporary file, which is removed at the end. seed: of the split."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self._path = path
        self._seed = seed
        path.unlink(missing_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None)
        for line in ("pragma journal_mode = off", "pragma synchronous = off", _SCHEMA, "begin"):
            self._db.execute(line)
        self._num = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._db.close()
        self._path.unlink(missing_ok=True)

    def add(self, entry: Entry) -> None:
        shuffled = hashlib.sha256(f"{self._seed}:{entry.instance}".encode()).digest()[:8]
        self._db.execute(
            "insert into entries values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
            (
                *(self._num, entry.task_id, entry.session_id, entry.instance, entry.stratum),
                *(entry.standing, entry.why, entry.reward, entry.num_tokens, entry.digest, shuffled),
            ),
        )
        self._num += 1

    def decide(self, *, duplicates: bool, per_task: int | None, test_share: float) -> list[Stratum]:
        """Call once, after the last `add`. duplicates: keep them. test_share: fraction of the problems in each stratum.

        A stratum with at least two accepted problems is in both splits. Returns the strata, whose counts include
        duplicates and sessions beyond the best of a task.
        """
        strata = self._strata()
        if not duplicates:
            self._db.execute(_DUPLICATES)
        if per_task is not None:
            self._db.execute(_BEYOND_BEST, (per_task,))
        if test_share > 0:
            self._db.execute(_SPLIT, {"share": test_share})
        return strata

    def _strata(self) -> list[Stratum]:
        return [
            Stratum(name=name, num_instances=instances, num_attempts=attempts, num_accepted=accepted, num_solved=solved)
            for name, instances, attempts, accepted, solved in self._db.execute(_STRATA)
        ]

    def reasons(self) -> dict[str, int]:
        """`standing: why` -> number of sessions, for sessions that were not accepted."""
        found = self._db.execute(
            "select standing, why, count(*) from entries where standing != 'accepted' "
            "group by 1, 2 order by 3 desc, 1, 2"
        )
        return {f"{standing.replace('_', ' ')}: {why}": number for standing, why, number in found}

    def places(self, split: Split, *standings: Standing) -> Iterator[Place]:
        """Sessions in the order in which they were added."""
        marks = ", ".join("?" * len(standings))
        found = self._db.execute(
            "select task_id, session_id, instance, standing, why from entries "
            f"where is_test = ? and standing in ({marks}) order by position",
            (split == "test", *standings),
        )
        for line in found:
            yield Place(*line)

    def pairs(self, split: Split) -> Iterator[Pair]:
        """Pairs a problem's best accepted session with its best rejected one, the second with the second, and so on."""
        for good_task, good, bad_task, bad, instance in self._db.execute(_PAIRS, (split == "test",)):
            yield Pair((good_task, good), (bad_task, bad), instance)
