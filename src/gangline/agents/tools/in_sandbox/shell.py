"""The shell tool: commands in sequence, in a shell that keeps its folder, variables, functions and jobs.

At most one request waits for the shell: a later one replaces it. A command that outlives its request's timeout is still
the running one: `wait`, `keys` and `interrupt` apply to it, `restart` ends it.
"""

from __future__ import annotations

import os
import time

from .loop import Loop, Timer
from .output import Output
from .processes import command_lines, is_reading, kill_session
from .refusal import Refused
from .terminal import Terminal

TYPE_CHECKING = False  # `typing` takes as long to import as all the rest: see `gangline.agents.tools.in_sandbox`
if TYPE_CHECKING:
    import signal as _signal
    from typing import Any

    from .refusal import Reply
else:
    import _signal

_QUIET_S = 0.1
"""Seconds without output or typing before a program can count as waiting for input."""
_LONGEST_PAUSE_S = 1.0
"""Maximum interval between checks of a program that may be waiting for input."""
_END_POLL_S = 0.01


class Shell:
    """Starts its terminal with the first request, and replaces it after it ends."""

    def __init__(self, loop: Loop, max_output_bytes: int) -> None:
        self._loop = loop
        self._max_bytes = max_output_bytes
        self._size = (50, 200)
        self._terminal: Terminal | None = None
        self._is_ready = False
        self._command: bytes | None = None
        """A command waiting for the shell to be ready."""
        self._began_at: float | None = None
        """Start time of the running command."""
        self._unseen_end: tuple[int, float] | None = None
        """Exit code and duration of a command that ended while no request was waiting."""
        self._output = Output(self._max_bytes)
        self._earlier: dict[str, Any] = {}
        self._changed_at = 0.0
        """Time of the last output or typing."""
        self._request: _Request | None = None
        self._folder = ""
        self._is_new = False
        """Whether a shell has ended since the last answer."""

    def run(self, order: dict[str, Any], reply: Reply) -> None:
        """`command`, `timeout_s`."""
        if self._began_at is not None:
            raise Refused(
                "running",
                f"a command has been running for {time.monotonic() - self._began_at:.1f} s"
                f" ({'; '.join(self._foreground()) or 'in the shell itself'}):"
                " wait for it, send it keys, interrupt it, or restart the shell",
            )
        terminal = self._started()
        terminal.drain()
        self._earlier = self._output.as_dict()
        self._output = Output(self._max_bytes)
        self._began_at, self._unseen_end = time.monotonic(), None
        self._begin(order["timeout_s"], reply)
        command = order["command"].encode(errors="surrogateescape")
        if self._is_ready:
            terminal.evaluate(command)
        else:
            self._command = command

    def wait(self, order: dict[str, Any], reply: Reply) -> None:
        """`timeout_s`."""
        self._take_over()
        self._begin(order["timeout_s"], reply)
        if self._began_at is None:
            self._answer_at_rest()

    def keys(self, order: dict[str, Any], reply: Reply) -> None:
        """`keys`, `timeout_s`: typed for any program that reads them."""
        self._take_over()
        self._started().type(order["keys"].encode(errors="surrogateescape"))
        self._changed_at = time.monotonic()
        self._begin(order["timeout_s"], reply)
        if self._began_at is None:
            self._answer("idle")

    def interrupt(self, order: dict[str, Any], reply: Reply) -> None:
        """`timeout_s`: seconds for the program to end."""
        self._take_over()
        self._begin(order["timeout_s"], reply)
        if self._began_at is None or self._terminal is None:
            self._answer_at_rest()
            return
        if self._command is not None:  # the shell is still starting, and has not received it
            self._command = None
            self._answer("ended", 128 + _signal.SIGINT)
            return
        self._terminal.forget_keys()  # as Ctrl-C does
        group = self._terminal.foreground()
        if group > 0:
            try:
                os.killpg(group, _signal.SIGINT)
            except OSError:  # it has ended
                pass
        self._changed_at = time.monotonic()

    def resize(self, order: dict[str, Any], reply: Reply) -> None:
        """`rows`, `columns`."""
        self._size = (order["rows"], order["columns"])
        if self._terminal is not None:
            self._terminal.resize(*self._size)
        reply({})

    def restart(self, order: dict[str, Any], reply: Reply) -> None:
        """End the shell and its jobs and start another. A waiting request is answered first."""
        self.close()
        self._started()
        reply({})

    def close(self) -> None:
        if self._terminal is not None:
            kill_session(self._terminal.pid)
            os.waitpid(self._terminal.pid, 0)
            self._end(128 + _signal.SIGKILL)

    # The terminal's reports.

    def _written(self, piece: bytes) -> None:
        if self._is_ready:  # before that: the first prompt
            self._output.add(piece)
            self._changed_at = time.monotonic()

    def _status(self, code: int, options: str, folder: str) -> None:
        self._folder = folder
        terminal = self._terminal
        assert terminal is not None
        terminal.drain()
        if not self._is_ready:
            self._is_ready = True
            if self._command is not None:
                command, self._command = self._command, None
                terminal.evaluate(command)
        elif self._began_at is not None:
            self._answer("ended", code)

    def _lost(self, terminal: Terminal) -> None:
        """The shell has ended, or was replaced by another program."""
        if terminal is not self._terminal:
            return
        code = terminal.exit_status()
        if code is None:
            self._loop.later(_END_POLL_S, lambda: self._lost(terminal))
        else:
            self._end(code)

    def _end(self, code: int) -> None:
        terminal, self._terminal = self._terminal, None
        assert terminal is not None
        terminal.drain()
        terminal.close()
        was_ready, self._is_ready, self._is_new, self._command = self._is_ready, False, True, None
        if self._request is not None and not was_ready:
            request, self._request, self._began_at = self._request, None, None
            request.refuse(Refused("no_shell", f"the sandbox's shell ended with exit code {code} when it started"))
        elif self._request is not None:
            self._answer("ended", code)
        self._began_at = None

    # Answers.

    def _started(self) -> Terminal:
        if self._terminal is None:
            self._terminal = Terminal(self._loop, self._size, self._written, self._status, self._lost)
        return self._terminal

    def _take_over(self) -> None:
        """Answer the waiting request, whose client may be gone, because another one replaces it."""
        if self._request is not None:
            self._answer("running")

    def _begin(self, timeout_s: float, reply: Reply) -> None:
        self._changed_at = time.monotonic()
        self._request = _Request(
            reply,
            self._loop.later(timeout_s, lambda: self._answer("running")),
            self._loop.later(_QUIET_S, lambda: self._look(_QUIET_S)),
        )

    def _look(self, pause_s: float) -> None:
        """Answer if the foreground program waits for input."""
        request, terminal = self._request, self._terminal
        if request is None or terminal is None:
            return
        quiet_s = time.monotonic() - self._changed_at
        if quiet_s >= _QUIET_S and is_reading(terminal) and terminal.is_driven:  # asked in this order
            self._answer("waiting")
            return
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S) if quiet_s >= _QUIET_S else _QUIET_S
        request.look = self._loop.later(pause_s, lambda: self._look(pause_s))

    def _answer_at_rest(self) -> None:
        """Answer while no command runs; one may have ended since the last answer."""
        if self._unseen_end is None:
            self._answer("idle")
        else:
            self._answer("ended", self._unseen_end[0])

    def _answer(self, state: str, exit_code: int | None = None) -> None:
        request, self._request = self._request, None
        duration_s = 0.0 if self._began_at is None else time.monotonic() - self._began_at
        if state == "ended":
            self._began_at = None
        if request is None:
            if exit_code is not None:
                self._unseen_end = exit_code, duration_s
            return
        if state == "ended" and self._unseen_end is not None:
            (_, duration_s), self._unseen_end = self._unseen_end, None
        request.cancel()
        output, self._output = self._output, Output(self._max_bytes)
        request.reply(
            {
                "state": state,
                "output": output.as_dict(),
                "earlier": self._earlier or Output(0).as_dict(),
                "exit_code": exit_code,
                "duration_s": duration_s,
                "folder": self._folder,
                "foreground": [] if state in ("ended", "idle") else self._foreground(),
                "is_new": self._is_new,
            }
        )
        self._earlier = {}
        self._is_new = False

    def _foreground(self) -> list[str]:
        terminal = self._terminal
        if terminal is None:
            return []
        return command_lines(terminal.foreground(), but=terminal.pid)


class _Request:
    """A request that waits for the shell."""

    def __init__(self, reply: Reply, deadline: Timer, look: Timer) -> None:
        self.reply = reply
        self.deadline = deadline
        self.look = look

    def cancel(self) -> None:
        self.deadline.cancel()
        self.look.cancel()

    def refuse(self, refused: Refused) -> None:
        self.cancel()
        self.reply(refused)
