"""The one form in which commands reach a sandbox of ours, whichever runtime has it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import msgspec

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.sandbox import Channel, ExecResult, OutputSink, RuntimeUser, Sandbox

__all__ = ["ExecRequest", "Handle", "SandboxFacts", "exec_request", "open_channel"]


class SandboxFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Constant properties of a sandbox: see `Sandbox`."""

    runtime_id: str
    workdir: str
    home: str
    grader_home: str | None
    proxy_url: str | None


class ExecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One command: see `Sandbox.exec`."""

    command: str | Sequence[str]
    cwd: str | None = None
    env: Mapping[str, str] = {}
    stdin: bytes | None = None
    timeout_s: float | None = None
    max_output_bytes: int = 1 << 20
    user: RuntimeUser = "agent"
    grace_s: float = 0.0


async def exec_request(handle: Sandbox, request: ExecRequest, on_output: OutputSink | None) -> ExecResult:
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
        grace_s=request.grace_s,
    )


async def open_channel(handle: Sandbox, request: ExecRequest) -> Channel:
    """Open a channel by any handle, also a third party's. Its other fields do not count.

    Raises: RuntimeUnavailable when the handle has no channels; as `Sandbox.channel`.
    """
    if not hasattr(handle, "channel"):
        raise RuntimeUnavailable(
            f"the runtime of sandbox {handle.runtime_id} has no channels: its handles lack the method `channel` of "
            "gangline.domain.sandbox.Sandbox. Use another runtime, such as `sandbox`."
        )
    return await handle.channel(request.command, cwd=request.cwd, env=request.env, user=request.user)


class Handle(ABC):
    """The part of `Sandbox` that our handles share."""

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
        grace_s: float = 0.0,
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        request = ExecRequest(
            command=command,
            cwd=cwd,
            env=env or {},
            stdin=stdin,
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
            user=user,
            grace_s=grace_s,
        )
        return await self.execute(request, on_output)

    async def channel(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: RuntimeUser = "agent",
    ) -> Channel:
        """See `Sandbox.channel`."""
        return await self.open_channel(ExecRequest(command=command, cwd=cwd, env=env or {}, user=user))

    @abstractmethod
    async def execute(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        """Run one command. Raises: as `Sandbox.exec`."""

    @abstractmethod
    async def open_channel(self, request: ExecRequest) -> Channel:
        """Start one command with a channel. Raises: as `Sandbox.channel`."""
