"""The action server: requests and answers are lines of JSON on the socket.

A request is `{"id", "do", "with"}`; its answer is `{"id", "ok"}` or `{"id", "refused"}`. The end of the socket ends the
server and all that it has started in the foreground.
"""

from __future__ import annotations

import os

from .loop import Lines, Loop
from .messages import dumps, loads
from .python import Python
from .refusal import Refused
from .shell import Shell
from .workspace import Workspace

TYPE_CHECKING = False  # `typing` takes as long to import as all the rest: see `gangline.agents.tools.in_sandbox`
if TYPE_CHECKING:
    import signal as _signal
    from typing import Any, Callable

    from .refusal import Reply

    Action = Callable[[Any, Reply], None]
else:
    import _signal

_MAX_LINE_BYTES = 32 << 20
_MAX_ANSWER_BYTES = 8 << 20


class Server:
    """Serves one socket."""

    def __init__(self, fd: int, program: dict[str, Any]) -> None:
        self._loop = Loop()
        self._shell = Shell(self._loop, program["options"]["max_output_bytes"])
        self._python = Python(self._loop, program)
        self._workspace = Workspace(self._loop)
        self._lines = Lines(self._loop, fd, self._asked, self._loop.stop, _MAX_LINE_BYTES)
        shell, python = self._shell, self._python
        self._actions: dict[str, Action] = {
            "shell.run": shell.run,
            "shell.wait": shell.wait,
            "shell.keys": shell.keys,
            "shell.interrupt": shell.interrupt,
            "shell.resize": shell.resize,
            "shell.restart": shell.restart,
            "python.run": python.run,
            "python.interrupt": python.interrupt,
            "python.restart": python.restart,
            "files": self._workspace.act,
        }

    def serve(self) -> None:
        self._lines.send(b'{"id": "", "ok": {}}\n')
        self._loop.run()
        self._shell.close()
        self._python.close()
        self._workspace.close()

    def _asked(self, line: bytes) -> None:
        """Do one request. A line that cannot be read has no answer."""
        try:
            request = loads(line)
            id_, action = request["id"], self._actions[request["do"]]
        except (ValueError, KeyError, TypeError):
            return

        def reply(answer: dict[str, Any] | Refused) -> None:
            if isinstance(answer, Refused):
                result: dict[str, Any] = {"id": id_, "refused": {"reason": answer.reason, "message": answer.message}}
            else:
                result = {"id": id_, "ok": answer}
            line = dumps(result).encode() + b"\n"
            if len(line) > _MAX_ANSWER_BYTES:
                reply(Refused("too_large", f"the answer has {len(line)} bytes: ask for less"))
                return
            self._lines.send(line)

        try:
            action(request["with"], reply)
        except Refused as refused:
            reply(refused)
        except OSError as error:
            reply(Refused("failed", f"the sandbox refused it: {error}"))


def main(fd: int, program: dict[str, Any]) -> None:
    """Serve until the socket closes. program: `bootstrap`, `modules`, `bytecode`, `main` and `options`."""
    _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    Server(fd, program).serve()
    os._exit(0)  # a regular interpreter exit would walk all its objects again
