"""The one form in which commands reach a sandbox of ours, whichever runtime has it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import msgspec

from gangline.domain.contracts import ExecResult, OutputSink, RuntimeHandle, RuntimeUser

__all__ = ["ExecRequest", "Handle", "SandboxFacts", "exec_request"]


class SandboxFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Constant properties of a sandbox: see `RuntimeHandle`."""

    runtime_id: str
    workdir: str
    home: str
    grader_home: str | None
    proxy_url: str | None


class ExecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One command: see `RuntimeHandle.exec`."""

    command: str | Sequence[str]
    cwd: str | None = None
    env: Mapping[str, str] = {}
    stdin: bytes | None = None
    timeout_s: float | None = None
    max_output_bytes: int = 1 << 20
    user: RuntimeUser = "agent"


async def exec_request(handle: RuntimeHandle, request: ExecRequest, on_output: OutputSink | None) -> ExecResult:
    """Run a command by any handle, also a third party's."""
    return await handle.exec(
        request.command,
        cwd=request.cwd,
        env=request.env,
        stdin=request.stdin,
        timeout_s=request.timeout_s,
        on_output=on_output,
        max_output_bytes=request.max_output_bytes,
        user=request.user,
    )


class Handle(ABC):
    """The part of `RuntimeHandle` that our handles share."""

    def __init__(self, facts: SandboxFacts) -> None:
        self.runtime_id = facts.runtime_id
        self.workdir = facts.workdir
        self.home = facts.home
        self.grader_home = facts.grader_home
        self.proxy_url = facts.proxy_url

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
    ) -> ExecResult:
        """See `RuntimeHandle.exec`."""
        request = ExecRequest(
            command=command,
            cwd=cwd,
            env=env or {},
            stdin=stdin,
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
            user=user,
        )
        return await self.execute(request, on_output)

    @abstractmethod
    async def execute(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        """Run one command. Raises: as `RuntimeHandle.exec`."""
