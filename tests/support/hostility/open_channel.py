"""A channel without walls: a socket pair and a child process."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gangline.domain.errors import RuntimeFailed
from gangline.domain.sandbox import Channel, ExecResult

__all__ = ["OpenChannel"]


class OpenChannel(Channel):
    """See `gangline.domain.sandbox.Channel`."""

    def __init__(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                close_fds=False,
                preexec_fn=lambda: os.dup2(number, 3),
            )

    async def read(self, max_bytes: int = 1 << 16) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self._ours, max_bytes)
        except OSError:
            return b""

    async def write(self, data: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._ours, data)
        except OSError as error:
            raise RuntimeFailed("the channel has ended.") from error

    async def close(self) -> None:
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        self._ours.close()
        self._process.kill()
        await self.ended()

    async def ended(self) -> ExecResult:
        code = await asyncio.to_thread(self._process.wait)
        return ExecResult(exit_code=code if code >= 0 else None, signal=-code if code < 0 else None)
