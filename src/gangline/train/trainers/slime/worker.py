"""A thread with an event loop of its own, for a rollout function that is called from a program without one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from gangline.domain.errors import NodeError
from gangline.train.collecting.groups import Group

__all__ = ["Request", "Requests", "Worker"]


@dataclasses.dataclass(frozen=True)
class Request:
    num_groups: int
    version: int | None
    """Policy version that the trainer says its engines have; None: it does not say."""
    groups: Future[list[Group]]


Requests = asyncio.Queue[Request | None]
"""None: stop."""


class Worker:
    """Answers requests one by one."""

    def __init__(self, serve: Callable[[Requests], Coroutine[Any, Any, None]]) -> None:
        self._serve = serve
        self._loop = asyncio.new_event_loop()
        self._requests = Requests()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="gangline-rollout", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def collect(self, num_groups: int, version: int | None = None) -> list[Group]:
        """Raises: errors of collecting, or the one that ended the thread."""
        request = Request(num_groups, version, Future())
        self._send(request)
        waited_for: list[Future[Any]] = [request.groups, self._ended]
        wait(waited_for, return_when=FIRST_COMPLETED)
        if request.groups.done():
            return request.groups.result()
        self._ended.result()
        raise NodeError("the rollout was stopped while groups were waited for.")

    def stop(self) -> None:
        self._send(None)
        self._thread.join()

    def _send(self, request: Request | None) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended, and its loop is closed
            self._loop.call_soon_threadsafe(self._requests.put_nowait, request)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve(self._requests))
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)
