"""One child process of `gangline up`: a `gangline engine`, `server` or `node` in its own process group.

Its first line on stdout reports that it is ready, or why it is not; its stderr goes to a log file. It ends with this
process: the kernel signals it when its parent dies (see `serving.py`). Its arguments contain no secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gangline.domain.errors import GanglineError, NodeError, PortUnavailable, errors_by_code
from gangline.machine.event_loop import to_end
from gangline.machine.private import open_private
from gangline.settings.service import FROM_STDIN

_TAIL_LINES = 8
_MAX_LOG_BYTES = 64 << 20
_END_AFTER_EOF_S = 2.0


class Child:
    """A process of the service: its start, its settings, its first line, its log and its end.

    Long because these are the steps of one life, and each needs the process.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str],
        port: int | None,
        may_move: bool = False,
        ready_timeout_s: float = 120,
        may_end: bool = False,
        tables: bytes | Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        """
        tables: settings that it reads from its stdin, instead of environment and config file (`write_tables`). A
            function is awaited while the child runs its imports.
        port: to listen on, 0 is any free one. None for a child that does not listen.
        may_move: whether it may use any free port if `port` is taken at the first start.
        may_end: whether a normal exit is not a failure, as for a drained node.
        """
        self.name = name
        self.log_path = log_path
        self.url = ""
        """Its URL; set by the first `start` and kept over restarts."""
        self.port = port
        self.is_waiting = False
        """Whether it waits for settings that are not known yet."""
        self._is_ready = asyncio.Event()
        self._command, *self._arguments = arguments
        self._may_move = may_move
        self._env = dict(env)
        self._ready_timeout_s = ready_timeout_s
        self._may_end = may_end
        self._tables = tables
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None
        self._started_at = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def kind(self) -> str:
        """`node` of node, node-2 and so on."""
        return self.name.partition("-")[0]

    async def address(self) -> str:
        """Its URL once it is ready."""
        await self._is_ready.wait()
        return self.url

    def age_s(self) -> float:
        return time.monotonic() - self._started_at

    async def start(self) -> None:
        """Start it and wait until it is ready. Later starts reuse the port of the first.

        Raises: the error that the child reported, else NodeError with the end of its log.
        """
        try:
            await self._start()
        except PortUnavailable:
            if self.url or not (self._may_move and self.port):
                raise
            self.port = 0
            await self._start()

    async def _start(self) -> None:
        self._started_at = time.monotonic()
        port = () if self.port is None else ("--port", str(self.port))
        handed_over = () if self._tables is None else (FROM_STDIN,)
        arguments = [self._command, *port, "--json", "--parent", str(os.getpid()), *handed_over, *self._arguments]
        process = await self._begin(arguments)
        try:
            await self._hand_over(process)
            ready = await self._first_line(process)
        except GanglineError:
            self.kill()
            await process.wait()
            raise
        self.url = ready[f"{self.kind}_url"]
        if self.port is not None:
            self.port = int(self.url.rsplit(":", 1)[1].split("/")[0])
        self._is_ready.set()
        self._pump = asyncio.create_task(self._drain(process))

    async def _begin(self, arguments: Sequence[str]) -> asyncio.subprocess.Process:
        """Completes even when the caller is cancelled: otherwise asyncio would wait forever for a pipe held by a
        grandchild."""
        with self._log() as log:
            beginning = asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "gangline", *arguments),
                stdin=asyncio.subprocess.DEVNULL if self._tables is None else asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
            self._process = await to_end(beginning, self._end)
        return self._process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.kill()
        await process.wait()

    async def _hand_over(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is not None and self._tables is not None:
            # A child that ended at once gives the reason in its first line, or in its log.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(await self._settings(process))
                await process.stdin.drain()
            process.stdin.close()

    async def _settings(self, process: asyncio.subprocess.Process) -> bytes:
        assert self._tables is not None
        if isinstance(self._tables, bytes):
            return self._tables
        self.is_waiting = True
        try:
            return await self._tables()
        except BaseException:
            self.kill()  # it has done nothing yet
            await process.wait()
            self._process = None
            raise
        finally:
            self.is_waiting = False

    async def _first_line(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), self._ready_timeout_s)
        except TimeoutError:
            raise NodeError(
                f"the {self.name} was not ready after {self._ready_timeout_s:.0f} s. Its log: {self.log_path}"
            ) from None
        try:
            document: dict[str, Any] = msgspec.json.decode(line)
        except msgspec.DecodeError:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_AFTER_EOF_S)
            self.kill()
            how = await self.wait()
            tail = self.log_tail()
            end = f"The end of {self.log_path}:\n{tail}" if tail else "It gave no reason."
            raise NodeError(f"the {self.name} did not start: it {how}. {end}") from None
        if error := document.get("error"):
            raise errors_by_code().get(error["code"], NodeError)(f"the {self.name} did not start: {error['message']}")
        return document

    async def _drain(self, process: asyncio.subprocess.Process) -> None:
        """Copy its later output to its log, so that a full pipe never blocks it."""
        assert process.stdout is not None
        while piece := await process.stdout.read(1 << 16):
            with self._log() as log:
                log.write(piece)

    def _log(self) -> BinaryIO:
        return open(self.log_path, "ab", opener=open_private)

    def bound_log(self) -> None:
        """Move the content of a large log to `NAME.log.1`, overwriting it. The child keeps appending to the same file.

        Raises: OSError.
        """
        if not self.log_path.exists() or self.log_path.stat().st_size < _MAX_LOG_BYTES:
            return
        with (
            open(self.log_path, "r+b") as log,
            open(self.log_path.with_name(f"{self.log_path.name}.1"), "wb", opener=open_private) as older,
        ):
            shutil.copyfileobj(log, older)
            log.truncate(0)

    def log_tail(self) -> str:
        if not self.log_path.exists():
            return ""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])

    async def wait(self) -> str:
        """Wait until it has ended. Returns a description for people."""
        if self._process is None:
            return "was not started"
        code = await self._process.wait()
        if self._pump is not None:
            await self._pump
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    @property
    def ended_by_itself(self) -> bool:
        """False if it was killed, and could not clean up."""
        return self._process is None or (self._process.returncode or 0) >= 0

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def is_done(self) -> bool:
        """Whether it ended as allowed, and is not restarted."""
        return self._may_end and self._process is not None and self._process.returncode == 0

    def terminate(self) -> None:
        """Ask it to clean up and end."""
        if self._process is not None and self.is_running:
            self._process.terminate()

    def kill(self) -> None:
        """End it and its process group at once."""
        if self._process is not None and self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
