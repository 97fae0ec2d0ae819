"""The files tool in the server: a worker process runs the actions.

So a slow disk, or an endless pattern match, blocks neither shell nor interpreter.
"""

from __future__ import annotations

import os

from .loop import Loop, Timer
from .messages import dumps, loads
from .refusal import Refused
from .worker import Worker

TYPE_CHECKING = False  # `typing` takes as long to import as all the rest: see `gangline.agents.tools.in_sandbox`
if TYPE_CHECKING:
    from typing import Any

    from .refusal import Reply


class Workspace:
    """Runs actions in the order of their requests."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._worker: Worker | None = None
        self._waiting: list[tuple[dict[str, Any], Reply]] = []
        self._reply: Reply | None = None
        self._timer: Timer | None = None

    def act(self, order: dict[str, Any], reply: Reply) -> None:
        """`act`, `timeout_s`, and the action's arguments."""
        self._waiting.append((order, reply))
        self._next()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _next(self) -> None:
        if self._reply is not None or not self._waiting:
            return
        order, self._reply = self._waiting.pop(0)
        if self._worker is None:
            self._worker = Worker(self._loop, _serve, self._answered, self._ended)
        self._timer = self._loop.later(order["timeout_s"], lambda: self._too_long(order["timeout_s"]))
        self._worker.send(dumps(order).encode())

    def _too_long(self, timeout_s: float) -> None:
        self.close()
        self._finish(Refused("timed_out", f"it took longer than {timeout_s:g} s; what can be undone was forgotten"))

    def _answered(self, line: bytes) -> None:
        reply = loads(line)
        self._finish(Refused(**reply["refused"]) if "refused" in reply else reply["ok"])

    def _ended(self, code: int) -> None:
        self._worker = None
        if self._reply is not None:
            self._finish(Refused("failed", f"the process that works on files ended with exit code {code}: try again"))

    def _finish(self, answer: dict[str, Any] | Refused) -> None:
        reply, self._reply = self._reply, None
        if self._timer is not None:
            self._timer.cancel()
        if reply is not None:
            reply(answer)
        self._next()


def _serve(fd: int) -> None:
    """The worker's main loop."""
    from .files import Files  # only here: most servers never need it

    files = Files()
    with os.fdopen(fd, "rb") as lines:
        for line in lines:
            try:
                reply: dict[str, Any] = {"ok": files.act(loads(line))}
            except Refused as refused:
                reply = {"refused": {"reason": refused.reason, "message": refused.message}}
            except (OSError, ValueError) as error:
                reply = {"refused": {"reason": "failed", "message": str(error)}}
            answer = memoryview(dumps(reply).encode() + b"\n")
            while answer:
                answer = answer[os.write(fd, answer) :]
