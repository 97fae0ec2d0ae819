"""The Python tool: cells in an interpreter that keeps its variables.

The interpreter is a separate process, started with the first cell, so the tool survives when a cell is interrupted,
runs out of memory or crashes. Its output, and its child processes' output, goes through a pipe.
"""

from __future__ import annotations

import os
import time

from .loop import Loop, Timer
from .messages import dumps, loads
from .output import Output
from .refusal import Refused
from .worker import Worker, encoded

TYPE_CHECKING = False  # `typing` takes as long to import as all the rest: see `gangline.agents.tools.in_sandbox`
if TYPE_CHECKING:
    from typing import Any

    from .refusal import Reply

_GRACE_S = 2.0
"""Seconds for a cell to end after its interrupt."""
_START_S = 60.0
"""Seconds for an interpreter to start, with IPython on a slow disk."""
_PIECE_BYTES = 1 << 16
_MAX_DRAINED_BYTES = 1 << 20


class Python:
    """Starts its interpreter with the first cell, and replaces it after it ends."""

    def __init__(self, loop: Loop, program: dict[str, Any]) -> None:
        """program: the server's own; its options are `python`, `max_output_bytes` and `python_memory_bytes`."""
        self._loop = loop
        self._program = program
        self._options = program["options"]
        self._worker: Worker | None = None
        self._pipe = -1
        self._output = Output(self._options["max_output_bytes"])
        self._earlier: dict[str, Any] = {}
        self._began_at: float | None = None
        self._reply: Reply | None = None
        self._timer: Timer | None = None
        self._timeout_s = 0.0
        self._is_ready = False
        """Whether the interpreter has started; a cell's time counts from then."""
        self._is_interrupted = False
        self._is_new = False
        """Whether an interpreter has ended since the last answer."""

    def run(self, order: dict[str, Any], reply: Reply) -> None:
        """`code`, `timeout_s`."""
        if self._began_at is not None:
            raise Refused(
                "running",
                f"a cell has been running for {time.monotonic() - self._began_at:.1f} s"
                f"{' and ignores its interrupt' if self._is_interrupted else ''}: restart the interpreter",
            )
        worker = self._started()
        self._drain()
        self._earlier = self._output.as_dict()
        self._output = Output(self._options["max_output_bytes"])
        self._began_at = time.monotonic()
        self._is_interrupted = False
        self._reply = reply
        self._timeout_s = order["timeout_s"]
        self._timer = self._loop.later(self._timeout_s if self._is_ready else _START_S, self._too_long)
        worker.send(dumps({"code": order["code"]}).encode())

    def interrupt(self, order: dict[str, Any], reply: Reply) -> None:
        """Raise KeyboardInterrupt in the running cell, whose own request is then answered."""
        if self._began_at is not None and self._worker is not None:
            self._is_interrupted = True
            self._worker.interrupt()
        reply({})

    def restart(self, order: dict[str, Any], reply: Reply) -> None:
        """End the interpreter; the next cell starts another."""
        self.close()
        reply({})

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._ended(128 + 9)

    def _started(self) -> Worker:
        if self._worker is not None:
            return self._worker
        import shutil  # only here: it takes 10 ms, and most sessions never need it

        program: str | None = shutil.which(str(self._options["python"]))
        if program is None:
            raise Refused("no_python", f"the sandbox has no program {self._options['python']!r}")
        self._pipe, theirs = os.pipe()
        os.set_blocking(self._pipe, False)
        argv: list[str] = [program, "-u", "-c", self._program["bootstrap"]]
        try:
            self._worker = Worker(
                self._loop, lambda _fd: os.execv(program, argv), self._answered, self._ended, output=theirs
            )
        finally:
            os.close(theirs)
        self._is_ready = False
        self._worker.send_raw(encoded({**self._program, "main": "interpreter"}))
        self._loop.read(self._pipe, self._readable)
        return self._worker

    def _too_long(self) -> None:
        """Interrupt the cell. If that does not end it, answer anyway."""
        if self._worker is None:
            return
        if not self._is_ready:
            self.close()
            return
        self._is_interrupted = True
        self._worker.interrupt()
        self._timer = self._loop.later(_GRACE_S, lambda: self._answer("running", {}))

    def _answered(self, line: bytes) -> None:
        if not self._is_ready:
            self._is_ready = True
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.later(self._timeout_s, self._too_long)
            return
        self._drain()
        try:
            report = loads(line)
        except ValueError:
            report = {"traceback": "the interpreter's answer cannot be read: it was too large"}
        self._answer("ended", report)

    def _ended(self, code: int) -> None:
        """The interpreter has exited."""
        self._drain()
        if self._pipe >= 0:
            self._loop.read(self._pipe, None)
            os.close(self._pipe)
            self._pipe = -1
        self._worker = None
        self._is_new = True
        self._answer("died", {"exit_code": code})

    def _answer(self, state: str, report: dict[str, Any]) -> None:
        """report: `result`, `traceback`, `images`, `exit_code`; all optional."""
        reply, self._reply = self._reply, None
        duration_s = 0.0 if self._began_at is None else time.monotonic() - self._began_at
        if state != "running":
            self._began_at = None
        if self._timer is not None:
            self._timer.cancel()
        if reply is None:
            return
        output, self._output = self._output, Output(self._options["max_output_bytes"])
        reply(
            {
                "state": state,
                "output": output.as_dict(),
                "earlier": self._earlier or Output(0).as_dict(),
                "result": report.get("result"),
                "traceback": report.get("traceback"),
                "images": report.get("images", []),
                "num_images_omitted": report.get("num_images_omitted", 0),
                "exit_code": report.get("exit_code"),
                "is_interrupted": self._is_interrupted,
                "duration_s": duration_s,
                "is_new": self._is_new and state != "died",
            }
        )
        self._earlier = {}
        if state != "died":
            self._is_new = False

    def _readable(self) -> None:
        self._read()

    def _read(self) -> int:
        try:
            piece = os.read(self._pipe, _PIECE_BYTES)
        except BlockingIOError:
            return 0
        if not piece:  # no process has it open any more
            self._loop.read(self._pipe, None)
        self._output.add(piece)
        return len(piece)

    def _drain(self) -> None:
        drained = 0
        while self._pipe >= 0 and drained < _MAX_DRAINED_BYTES:
            num_read = self._read()
            if num_read == 0:
                return
            drained += num_read
