"""The agent's sandbox for a scorer: each command runs as the agent's user, isolated from the scorer."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import PIPE, Process
from importlib import import_module
from typing import Any

from .commands import CommandSandbox, Ended

_util: Any = import_module("inspect_ai.util")
_IN_FOLDER = ("/bin/sh", "-c", 'cd -- "$0" && exec "$@"')
_NOT_RUN = b"the solution's command did not run:"


class SolutionSandbox(CommandSandbox):
    """Runs commands through the client that evaluator `script` gives to a grader with a separate user."""

    async def _run(
        self,
        cmd: list[str],
        *,
        stdin: bytes,
        cwd: str | None,
        env: dict[str, str],
        user: str | None,
        timeout: float | None,
        max_output_bytes: int,
    ) -> Ended:
        if user not in (None, "agent"):
            raise _util.SandboxUserUnsupportedError(f"A scorer's commands run as `agent`, not {user!r}.")
        variables = [f"{name}={value}" for name, value in env.items()]
        process = await asyncio.create_subprocess_exec(
            *(os.environ["GANGLINE_SOLUTION"], *_IN_FOLDER, cwd or "."),
            *(["/usr/bin/env", *variables] if variables else []),
            *cmd,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
        )
        try:
            async with asyncio.timeout(timeout):
                ended = await _ended(process, stdin, max_output_bytes)
        finally:
            if process.returncode is None:
                process.kill()  # the command is killed with it
                await process.wait()
        if ended.code == 127 and ended.stderr.startswith(_NOT_RUN):
            raise _util.SandboxUnavailableError(ended.stderr.decode(errors="replace"))
        return ended

    @classmethod
    async def sample_cleanup(cls, task_name: str, config: Any, environments: Any, interrupted: bool) -> None:
        """Does nothing: the session owns the sandbox."""


async def _ended(process: Process, stdin: bytes, max_output_bytes: int) -> Ended:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr, _ = await asyncio.gather(
        _front(process.stdout, max_output_bytes), _front(process.stderr, max_output_bytes), _feed(process.stdin, stdin)
    )
    code = await process.wait()
    return Ended(code, stdout[0], stderr[0], stdout[1] or stderr[1])


async def _front(stream: asyncio.StreamReader, max_bytes: int) -> tuple[bytes, bool]:
    """The first `max_bytes`, and whether there were more."""
    kept, truncated = bytearray(), False
    while data := await stream.read(1 << 16):
        room = max_bytes - len(kept)
        kept += data[:room]
        truncated = truncated or len(data) > room
    return bytes(kept), truncated


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    try:
        stream.write(data)
        await stream.drain()
        stream.close()
        await stream.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the command reads no more
