"""Runs short-lived programs that never outlive their block, including their helper processes.

Programs such as `unshare --map-auto` or rootless podman use helper processes. Killing only the program would leave them
behind, some of them forever, and asyncio would wait forever for the pipes that they hold open.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio import SubprocessTransport
from asyncio.subprocess import DEVNULL, PIPE, Process, SubprocessStreamProtocol
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from gangline.machine.event_loop import to_end

_BUFFER_BYTES = 1 << 16


@asynccontextmanager
async def program(
    *argv: str,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    stdin: int = DEVNULL,
    stdout: int = PIPE,
    stderr: int = DEVNULL,
) -> AsyncGenerator[Process]:
    """A running program in its own session. If it still runs at the end of the block, its process group is killed.

    Processes that left that group (such as a container) continue, but hold none of our pipes open. Raises: OSError.
    """
    beginning = _begun(argv, env=env, cwd=folder, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)
    process, transport = await to_end(beginning, lambda begun: _end(*begun))
    try:
        yield process
    finally:
        await _end(process, transport)


async def _begun(argv: Sequence[str], **options: Any) -> tuple[Process, SubprocessTransport]:
    """Like `asyncio.create_subprocess_exec`, but also returns the transport."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        lambda: SubprocessStreamProtocol(limit=_BUFFER_BYTES, loop=loop), *argv, **options
    )
    return Process(transport, protocol, loop), transport


async def _end(process: Process, transport: SubprocessTransport) -> None:
    """Closes its pipes first: asyncio reports the exit only after the pipes close."""
    try:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for number in range(3):
                pipe = transport.get_pipe_transport(number)
                if isinstance(pipe, asyncio.WriteTransport):
                    pipe.abort()
                elif pipe is not None:
                    pipe.close()
            await process.wait()
    finally:
        transport.close()
