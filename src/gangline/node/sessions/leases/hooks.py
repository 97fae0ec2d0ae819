"""Hooks: the operator's commands that receive each attempt's result before the server does.

For side effects of every session of a node: a line in a tracker, a copy in an archive, a message. A hook is a shell
command on the node's machine, with the node's rights. It gets the `SessionResult` as JSON on stdin, and its key facts
as variables: `GANGLINE_SESSION_ID`, `GANGLINE_TASK_ID`, `GANGLINE_ATTEMPT`, `GANGLINE_OUTCOME`, and `GANGLINE_REWARD`,
which is empty without a reward.

Laws
- The result is on the node's disk before a hook begins: no effect or failure of a hook changes the result, its reward
  or its delivery.
- Each hook has a budget and is killed when it ends, even if the node itself was killed meanwhile.
- After a restart the node runs the hooks again for results that it had not delivered, after delivering them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence

from gangline.domain.plain import plain
from gangline.domain.session import SessionResult
from gangline.domain.tokens import encode_json
from gangline.machine.programs import program

log = logging.getLogger("gangline.node")

_MAX_SAID_CHARS = 500
_MORE_S = 1.0
"""Extra time after its budget, so that `timeout` ends it first."""


class Hooks:
    """commands: run with `sh -c`, one after another.
    budget_s: for each command.
    at_once: sessions whose hooks run at the same time.
    """

    def __init__(self, commands: Sequence[str], *, budget_s: float = 60.0, at_once: int = 4) -> None:
        self._commands = tuple(commands)
        self._budget_s = budget_s
        self._places = asyncio.Semaphore(at_once)

    async def run(self, result: SessionResult) -> None:
        """Return when all hooks have ended; failures are logged. Raises only CancelledError."""
        async with self._places:
            try:
                document = await asyncio.to_thread(encode_json, result)
                whys = [why for command in self._commands if (why := await self._why_failed(command, result, document))]
            except Exception as error:
                whys = [plain(error)]
            for why in whys:
                log.error("hook.failed session=%s attempt=%d message=%s", result.session_id, result.attempt, why)

    async def _why_failed(self, command: str, result: SessionResult, document: bytes) -> str | None:
        # `timeout` ends the hook's whole process group, even if the node was killed meanwhile.
        argv = ("timeout", "--signal=KILL", f"{self._budget_s:g}", "sh", "-c", command)
        env = {**os.environ, **_environment(result)}
        errors = b""
        try:
            async with program(*argv, env=env, stdin=PIPE, stdout=DEVNULL, stderr=PIPE) as hook:
                try:
                    # Processes that the hook left running may hold its output open.
                    async with asyncio.timeout(self._budget_s + _MORE_S):
                        _, errors = await hook.communicate(document)
                except TimeoutError:
                    pass
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(hook.pid, signal.SIGKILL)
        except OSError as error:
            return f"the hook {command!r} could not be started: {error}"
        if hook.returncode == 0:
            return None
        how = (
            f"exited {hook.returncode}" if hook.returncode != -signal.SIGKILL else f"was killed ({self._budget_s:g} s)"
        )
        return f"the hook {command!r} {how}: {errors[-_MAX_SAID_CHARS:].decode(errors='replace')}"


def _environment(result: SessionResult) -> dict[str, str]:
    return {
        "GANGLINE_SESSION_ID": result.session_id,
        "GANGLINE_TASK_ID": result.task_id,
        "GANGLINE_ATTEMPT": str(result.attempt),
        "GANGLINE_OUTCOME": result.outcome,
        "GANGLINE_REWARD": "" if result.reward is None else repr(result.reward),
    }
