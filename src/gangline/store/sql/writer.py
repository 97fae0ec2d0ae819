"""The one thread that writes, and the commits that jobs share.

Jobs that came while the disk was busy are done in one transaction: one commit, and one sync, for all of them.

Laws
- A job is answered after the commit that holds it; jobs are done in the order in which they came.
- Each job is undone alone when it raises; those that share its commit do not notice.
- When the transaction itself breaks (a full disk), all of it is undone, and each job is done again in one of its own: a
  job is harmless before its commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from gangline.domain.errors import StoreError

__all__ = ["Writer"]

T = TypeVar("T")

Answer = Callable[[], None]


class Writer:
    """Jobs for one thread. A job that has begun is finished even when no caller awaits it any more.

    together: one transaction for all writes on this thread inside the block; yields a list of functions to call once it
    is durable.
    max_shared: jobs in one transaction, at most.
    """

    def __init__(self, together: Callable[[], AbstractContextManager[list[Answer]]], *, max_shared: int) -> None:
        self._together = together
        self._max_shared = max_shared
        self._waiting: deque[_Job] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-writer")

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        """From any thread."""
        future: Future[T] = Future()
        self._waiting.append(_Job(future, partial(job, *args)))
        self._thread.submit(self._do_waiting)
        return future

    def close(self) -> None:
        """Finishes the waiting jobs."""
        self._thread.shutdown(wait=True)

    def _do_waiting(self) -> None:
        """Once for each job that came; mostly another one has been done with it already."""
        jobs = self._taken()
        if len(jobs) > 1 and self._did_together(jobs):
            return
        for job in jobs:
            job.do()

    def _taken(self) -> list[_Job]:
        jobs: list[_Job] = []
        while self._waiting and len(jobs) < self._max_shared:
            job = self._waiting.popleft()
            if job.future.set_running_or_notify_cancel():
                jobs.append(job)
        return jobs

    def _did_together(self, jobs: list[_Job]) -> bool:
        """Whether they are done and answered; if not, nothing of them is kept."""
        try:
            with self._together() as when_durable:
                answers = [job.tried() for job in jobs]
        except Exception:  # whatever broke what they shared: each will say by itself
            return False
        for call in (*when_durable, *answers):
            call()
        return True


class _Job:
    def __init__(self, future: Future[Any], call: Callable[[], Any]) -> None:
        self.future = future
        self._call = call

    def do(self) -> None:
        try:
            answer = self.tried()
        except StoreError as error:
            answer = partial(self.future.set_exception, error)
        answer()

    def tried(self) -> Answer:
        """The answer, to be given once it is durable. Raises: StoreError, when the transaction may have broken."""
        try:
            found = self._call()
        except StoreError:
            raise
        except BaseException as error:
            return partial(self.future.set_exception, error)
        return partial(self.future.set_result, found)
