"""A runtime without a single wall, in which every attack must succeed: an attack that cannot is not a check.

Never use it for an agent. Commands run on this machine with all rights, all descriptors and the whole environment of
this process. Files are moved through links. `kill` and `stop` know only the processes that they started, and clean up
as the files' owner would, without privileges, so that modes of files stand in the way. `reset` ends those processes and
leaves everything else.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from gangline.domain.errors import NotFound
from gangline.domain.ids import new_id
from gangline.domain.sandbox import (
    Channel,
    Checkpoint,
    ExecRequest,
    ExecResult,
    OutputSink,
    Runtime,
    RuntimeStart,
    Sandbox,
)
from support.hostility.open_channel import OpenChannel
from support.hostility.open_forwarding import OpenForwarding
from support.hostility.open_layers import ENDLESS_BYTES, copied

__all__ = ["OpenRuntime"]

_REMOVE = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"


class OpenRuntime(Runtime):
    name: ClassVar[str] = "open"

    async def start(self, start: RuntimeStart) -> Sandbox:
        forwarding = OpenForwarding() if start.spec.network == "list" else None
        if forwarding is not None:
            await forwarding.open()
        if start.base is not None:
            await copied(Path(start.base.folder), start.folder)
        return _OpenHandle(start, forwarding)

    async def release(self, checkpoint: Checkpoint) -> None:
        await _removed(Path(checkpoint.folder))

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        return 0


class _OpenHandle(Sandbox):
    def __init__(self, start: RuntimeStart, forwarding: OpenForwarding | None) -> None:
        super().__init__(
            runtime_id=start.runtime_id,
            workdir=str(start.folder / "work"),
            home=str(start.folder / "home"),
            proxy_url=f"http://127.0.0.1:{start.proxy_port}" if start.proxy_port else None,
        )
        self._start = start
        self._folder = start.folder
        self._forwarding = forwarding
        self._env = dict(start.spec.env) | ({} if forwarding is None else forwarding.env)
        self._children: set[asyncio.subprocess.Process] = set()
        for path in (self.workdir, self.home):
            Path(path).mkdir(parents=True, exist_ok=True)

    async def run(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        argv, env = self._called(request)
        child = await asyncio.create_subprocess_exec(
            *argv,
            cwd=Path(self.workdir, request.cwd or ""),
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=False,
        )
        self._children.add(child)
        timed_out, stdout, stderr = False, b"", b""
        try:
            async with asyncio.timeout(request.timeout_s):
                stdout, stderr = await child.communicate(request.stdin or b"")
        except TimeoutError:
            timed_out = True
        finally:
            with suppress(ProcessLookupError):
                child.kill()
            child._transport.close()  # type: ignore[attr-defined]  # pipes that survivors hold
            await child.wait()
            self._children.discard(child)
        code = child.returncode
        ended = code is not None and not timed_out
        return ExecResult(
            exit_code=code if ended and code is not None and code >= 0 else None,
            signal=-code if ended and code is not None and code < 0 else None,
            timed_out=timed_out,
            stdout=stdout,
            stderr=stderr,
        )

    async def open_channel(self, request: ExecRequest) -> Channel:
        argv, env = self._called(request)
        return OpenChannel(argv, Path(self.workdir, request.cwd or ""), env)

    def _called(self, request: ExecRequest) -> tuple[list[str], dict[str, str]]:
        command = request.command
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        return argv, {**os.environ, **self._env, **request.env, "HOME": self.home}

    async def upload(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await asyncio.to_thread(self._write, Path(self.workdir, path), data, mode)

    def _write(self, target: Path, data: bytes, mode: int) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        target = Path(self.workdir, path)
        if not await asyncio.to_thread(os.path.lexists, target):
            raise NotFound(str(target))
        argv = ["head", "-c", str(ENDLESS_BYTES), str(target)]
        reader = await asyncio.create_subprocess_exec(*argv, stdout=-1, stderr=-3, close_fds=False)
        try:
            return (await reader.communicate())[0]
        finally:
            if reader.returncode is None:
                reader.kill()
                await reader.wait()

    async def checkpoint(self, name: str = "") -> Checkpoint:
        checkpoint_id = new_id("checkpoint")
        target = self._folder.parent / checkpoint_id
        await copied(self._folder, target)
        return Checkpoint(
            checkpoint_id=checkpoint_id,
            runtime_id=self.runtime_id,
            owner=self._start.owner,
            runtime=OpenRuntime.name,
            spec_digest="",
            number=1,
            name=name,
            method="frozen_copy",
            is_frozen=True,
            num_bytes=0,
            num_files=0,
            made_at=0.0,
            folder=str(target),
        )

    async def reset(self, checkpoint: Checkpoint | None = None) -> None:
        await self.kill()

    async def kill(self, *, grace_s: float = 0.0) -> None:
        for child in tuple(self._children):
            with suppress(ProcessLookupError):
                child.kill()

    async def clear(self, path: str) -> None:
        await asyncio.to_thread(shutil.rmtree, Path(self.workdir, path), ignore_errors=True)

    async def stop(self) -> None:
        await self.kill()
        if self._forwarding is not None:
            await self._forwarding.close()
        await _removed(self._folder)

    def limits(self) -> dict[str, str]:
        """A promise of everything, so that every attack is tried."""
        names = (
            "memory_bytes",
            "cpus",
            "max_pids",
            "max_file_bytes",
            "disk_bytes",
            "max_files",
            "network",
            "system_calls",
            "checkpoints",
        )
        return dict.fromkeys(names, "cgroup v2")


async def _removed(folder: Path) -> None:
    argv = [sys.executable, "-c", _REMOVE, str(folder)]
    if os.geteuid() == 0:
        argv = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", *argv]
    remover = await asyncio.create_subprocess_exec(*argv)
    await remover.wait()
