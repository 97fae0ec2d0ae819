"""A runtime that starts nothing, for benchmarks of what stands around it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from gangline.domain.errors import NotFound
from gangline.domain.sandbox import Checkpoint, ExecRequest, ExecResult, OutputSink, Runtime, RuntimeStart, Sandbox

__all__ = ["NoHandle", "NoRuntime"]


class NoRuntime(Runtime):
    """Sandboxes that are nothing: every command ends well at once."""

    name: ClassVar[str] = "sandbox"

    async def start(self, start: RuntimeStart) -> Sandbox:
        return NoHandle(start.runtime_id)

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        return 0


class NoHandle(Sandbox):
    def __init__(self, runtime_id: str, proxy_url: str | None = None) -> None:
        super().__init__(runtime_id=runtime_id, workdir="/nowhere", home="/nowhere", proxy_url=proxy_url)

    async def run(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        return ExecResult(exit_code=0)

    async def upload(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        return

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        raise NotFound(path)

    async def clear(self, path: str) -> None:
        return

    async def kill(self, *, grace_s: float = 0.0) -> None:
        return

    async def reset(self, checkpoint: Checkpoint | None = None) -> None:
        return

    async def stop(self) -> None:
        return

    def limits(self) -> dict[str, str]:
        return {}
