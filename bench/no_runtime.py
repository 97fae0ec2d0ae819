"""A runtime that starts nothing, for benchmarks of what stands around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from gangline.domain.errors import NotFound, RuntimeUnavailable
from gangline.domain.sandbox import Channel, Checkpoint, ExecResult, OutputSink, RuntimeStart, RuntimeUser, Sandbox
from gangline.domain.usage import Usage

__all__ = ["NoHandle", "NoRuntime"]


class NoRuntime:
    """Sandboxes that are nothing: every command ends well at once."""

    name: ClassVar[str] = "sandbox"

    async def check(self) -> None:
        return

    async def start(self, start: RuntimeStart) -> Sandbox:
        return NoHandle(start.runtime_id)

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        return 0


class NoHandle:
    workdir = home = "/nowhere"
    grader_home: str | None = None
    proxy_url: str | None = None

    def __init__(self, runtime_id: str) -> None:
        self.runtime_id = runtime_id

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        on_output: OutputSink | None = None,
        max_output_bytes: int = 1 << 20,
        user: RuntimeUser = "agent",
        grace_s: float = 0.0,
    ) -> ExecResult:
        return ExecResult(exit_code=0)

    async def channel(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: RuntimeUser = "agent",
    ) -> Channel:
        raise RuntimeUnavailable("nothing runs here that a channel could lead to.")

    async def upload(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        return

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        raise NotFound(path)

    async def clear(self, path: str) -> None:
        return

    async def kill(self, *, grace_s: float = 0.0) -> None:
        return

    async def checkpoint(self, name: str = "") -> Checkpoint:
        raise RuntimeUnavailable("there are no files to keep.")

    async def reset(self, checkpoint: Checkpoint | None = None) -> None:
        return

    async def stop(self) -> None:
        return

    async def usage(self) -> Usage:
        return Usage(disk_bytes=None)

    def limits(self) -> dict[str, str]:
        return {}
