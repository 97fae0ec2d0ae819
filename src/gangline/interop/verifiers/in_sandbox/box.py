"""The sandbox as a verifiers runtime: each command runs as the agent's user.

A grader with a separate user goes through `$GANGLINE_SOLUTION`; set-up already runs as the agent's user.
"""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import PIPE
from importlib import import_module
from typing import Any

_base: Any = import_module("verifiers.v1.runtimes.base")
_local: Any = import_module("verifiers.v1.runtimes.subprocess")
_errors: Any = import_module("verifiers.v1.errors")
_Base: Any = _base.Runtime

_MAX_BYTES = 64 << 20
_NOT_RUN = b"the solution's command did not run:"
_IN_FOLDER = ("/bin/sh", "-c", 'cd -- "$0" && exec "$@"', ".")
_READ = 'exec head -c "$2" -- "$1"'
_WRITE = 'case "$1" in */*) mkdir -p -- "${1%/*}/" || exit;; esac; exec cat >"$1"'


class Box(_Base):
    """See `verifiers.v1.Runtime`. The session owns the sandbox: starting and stopping do nothing."""

    def __init__(self) -> None:
        super().__init__("gangline")
        self.config = _local.SubprocessConfig()
        self.info = _local.SubprocessRuntimeInfo(id="gangline")

    async def start(self) -> None:
        return

    async def run(self, argv: list[str], env: dict[str, str]) -> Any:
        """Raises: SandboxError if the command did not run, or its output is too long."""
        code, stdout, stderr = await self._ended(argv, env, b"")
        return _base.ProgramResult(code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        """Raises: SandboxError."""
        limit = _MAX_BYTES if max_bytes is None else max_bytes
        code, stdout, stderr = await self._ended(["/bin/sh", "-c", _READ, "sh", path, str(limit)], {}, b"")
        if code != 0:
            raise _errors.SandboxError(f"read {path!r}: {stderr[-500:].decode(errors='replace')}")
        return stdout

    async def write(self, path: str, data: bytes) -> None:
        """Raises: SandboxError."""
        code, _, stderr = await self._ended(["/bin/sh", "-c", _WRITE, "sh", path], {}, data)
        if code != 0:
            raise _errors.SandboxError(f"write {path!r}: {stderr[-500:].decode(errors='replace')}")

    async def _ended(self, argv: list[str], env: dict[str, str], stdin: bytes) -> tuple[int, bytes, bytes]:
        """Exit code, stdout and stderr. Raises: SandboxError."""
        client = os.environ.get("GANGLINE_SOLUTION")
        variables = [f"{name}={value}" for name, value in self.process_env(env).items()]
        process = await asyncio.create_subprocess_exec(
            *((client, *_IN_FOLDER) if client else ()),
            *(["/usr/bin/env", *variables] if variables else []),
            *argv,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            stdout, stderr, _ = await asyncio.gather(
                _front(process.stdout), _front(process.stderr), _feed(process.stdin, stdin)
            )
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()  # the command is killed with it
                await process.wait()
        if code == 127 and stderr.startswith(_NOT_RUN):
            raise _errors.SandboxError(stderr[-500:].decode(errors="replace"))
        return (128 - code if code < 0 else code), stdout, stderr


async def _front(stream: asyncio.StreamReader) -> bytes:
    """Raises: SandboxError beyond the limit."""
    kept = bytearray()
    while data := await stream.read(1 << 16):
        kept += data
        if len(kept) > _MAX_BYTES:
            raise _errors.SandboxError(f"a command said more than {_MAX_BYTES >> 20} MiB")
    return bytes(kept)


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    try:
        stream.write(data)
        await stream.drain()
        stream.close()
        await stream.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the command reads no more
