"""An Inspect sandbox environment that needs only one method: run a command.

Files are also read and written with commands, as the sandbox's own user and in its own file system, so paths, links and
permissions mean the same as for the agent.
"""

from __future__ import annotations

import errno
from abc import abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_util: Any = import_module("inspect_ai.util")
_Base: Any = _util.SandboxEnvironment

_FILE_TIMEOUT_S = 180
# Absolute shell path and fixed PATH: an image's own PATH may begin with folders that the agent can write to.
_SHELL = ("/bin/sh", "-c")
_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
_READ = 'exec head -c "$2" -- "$1"'
_WRITE = 'case "$1" in */*) mkdir -p -- "${1%/*}/" || exit;; esac; exec cat >"$1"'
_ERRORS = (
    ("is a directory", IsADirectoryError, errno.EISDIR, "Is a directory"),
    ("permission denied", PermissionError, errno.EACCES, "Permission denied"),
    ("read-only file system", PermissionError, errno.EROFS, "Read-only file system"),
    ("no such file or directory", FileNotFoundError, errno.ENOENT, "No such file or directory"),
    ("not a directory", FileNotFoundError, errno.ENOTDIR, "Not a directory"),
    ("file name too long", FileNotFoundError, errno.ENAMETOOLONG, "File name too long"),
)


@dataclass(frozen=True)
class Ended:
    """The result of a command. Signal N is reported as code 128 + N."""

    code: int
    stdout: bytes
    stderr: bytes
    truncated: bool = False
    """Whether output beyond the limit was discarded."""


class CommandSandbox(_Base):
    """See `inspect_ai.util.SandboxEnvironment`. Subclasses implement `_run`."""

    @abstractmethod
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
        """Run a command. `max_output_bytes` applies to each stream.

        Raises: TimeoutError; SandboxUserUnsupportedError; SandboxUnavailableError.
        """

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> Any:
        """Run a command. It is not retried after a timeout: no failure here is due to the transport alone.

        Raises: TimeoutError, PermissionError, OutputLimitExceededError, and as `_run`.
        """
        ended = await self._run(
            cmd,
            stdin=_bytes(input or b""),
            cwd=cwd,
            env=env or {},
            user=user,
            timeout=timeout,
            max_output_bytes=_util.SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
        )
        stdout, stderr = ended.stdout.decode(errors="replace"), ended.stderr.decode(errors="replace")
        if ended.truncated:
            limit = _util.SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR
            raise _util.OutputLimitExceededError(limit, stdout + stderr)
        if ended.code == 126 and "permission denied" in stderr.lower():
            raise PermissionError(errno.EACCES, stderr.strip(), cmd[0])
        return _util.ExecResult(success=ended.code == 0, returncode=ended.code, stdout=stdout, stderr=stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Raises: IsADirectoryError, PermissionError, OSError, TimeoutError."""
        ended = await self._file_command([_WRITE, "sh", file], _bytes(contents), 1 << 20)
        if ended.code != 0:
            raise _file_error(ended, file)

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Raises: FileNotFoundError, IsADirectoryError, PermissionError, OSError, UnicodeDecodeError, TimeoutError,
        OutputLimitExceededError."""
        limits = _util.SandboxEnvironmentLimits
        limit = limits.MAX_READ_FILE_SIZE
        ended = await self._file_command([_READ, "sh", file, str(limit + 1)], b"", limit + 1)
        if ended.code != 0:
            raise _file_error(ended, file)
        if len(ended.stdout) > limit:
            raise _util.OutputLimitExceededError(limits.MAX_READ_FILE_SIZE_STR, None)
        return ended.stdout.decode() if text else ended.stdout

    async def _file_command(self, script: list[str], stdin: bytes, max_output_bytes: int) -> Ended:
        return await self._run(
            [*_SHELL, *script],
            stdin=stdin,
            cwd=None,
            env=_ENV,
            user=None,
            timeout=_FILE_TIMEOUT_S,
            max_output_bytes=max_output_bytes,
        )

    def default_polling_interval(self) -> float:
        """Seconds. Commands are local, so polling is cheap."""
        return 0.2


def _bytes(given: str | bytes) -> bytes:
    return given.encode() if isinstance(given, str) else given


def _file_error(ended: Ended, file: str) -> OSError:
    errors = ended.stderr.decode(errors="replace").strip()
    for words, kind, number, message in _ERRORS:
        if words in errors.lower():
            return kind(number, message, file)
    return OSError(errno.EIO, errors or f"exit code {ended.code}", file)
