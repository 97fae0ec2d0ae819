"""A runtime over a temporary folder, with real processes: a fake for tests of harnesses and evaluators.

It keeps the contract's promises that those rooms rely on, and no others: it isolates nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

from gangline.domain.errors import InvalidRequest, LimitExceeded, NotFound
from gangline.domain.sandbox import ExecRequest, ExecResult, OutputSink, Sandbox
from gangline.sandbox.shared.files import SharedFolders


class FolderRuntime(Sandbox):
    """`log` tells in which order `exec`, `upload`, `download` and `kill` were asked for."""

    def __init__(self, folder: Path, *, path: str = os.defpath) -> None:
        self._root = folder / "work"
        self._home = folder / "home"
        self._root.mkdir(parents=True)
        self._home.mkdir()
        self._path = path
        super().__init__(runtime_id=folder.name, workdir=str(self._root), home=str(self._home))
        self.log: list[str] = []

    async def run(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        assert request.user == "agent", "it has no other"
        command = request.command
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        self.log.append(f"exec {argv[0] if not isinstance(command, str) else command}")
        child = await asyncio.create_subprocess_exec(
            *argv,
            cwd=str(Path(self.workdir) / (request.cwd or "")),
            env={"PATH": self._path, "HOME": self.home, "LANG": "C.UTF-8", **request.env},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        timed_out = False
        try:
            async with asyncio.timeout(request.timeout_s):
                stdout, stderr = await child.communicate(request.stdin or b"")
        except TimeoutError:
            timed_out, stdout, stderr = True, b"", b""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
        if on_output is not None:
            on_output("stdout", stdout)
            on_output("stderr", stderr)
        code = child.returncode
        return ExecResult(
            exit_code=code if code is not None and code >= 0 and not timed_out else None,
            signal=-code if code is not None and code < 0 and not timed_out else None,
            timed_out=timed_out,
            stdout=stdout[: request.max_output_bytes],
            stderr=stderr[: request.max_output_bytes],
            truncated=max(len(stdout), len(stderr)) > request.max_output_bytes,
        )

    async def upload(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self.log.append(f"upload {path}")
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        self.log.append(f"download {path}")
        source = self._root / path
        if source.is_symlink():
            raise InvalidRequest(f"{path} is a link")
        if not source.is_file():
            raise NotFound(f"{path} does not exist")
        if source.stat().st_size > max_bytes:
            raise LimitExceeded(f"{path} is larger than {max_bytes} bytes")
        return source.read_bytes()

    async def clear(self, path: str) -> None:
        self.log.append(f"clear {path}")
        folders = {str(self._root): self._root, self.home: self._home}
        await asyncio.to_thread(SharedFolders(folders, self.workdir).clear, path)

    async def kill(self, *, grace_s: float = 0.0) -> None:
        self.log.append("kill")

    async def stop(self) -> None:
        self.log.append("stop")

    def limits(self) -> dict[str, str]:
        return {}

    def file(self, path: str) -> Path:
        return self._root / path
