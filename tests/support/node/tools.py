"""An action server on this machine, and the context of a tool in a sandbox."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from gangline.agents.tools.action_server import ActionServer, ActionServerOptions
from gangline.agents.tools.contract import ToolContext
from gangline.agents.tools.session_server import SessionServer
from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.ids import new_id
from gangline.domain.sandbox import RuntimeStart
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.sandbox.process import ProcessRuntime

__all__ = ["action_server", "tool_context"]
from support.requirements import need


@contextlib.asynccontextmanager
async def action_server(
    folder: Path, options: ActionServerOptions | None = None, *, env: Mapping[str, str] | None = None
) -> AsyncGenerator[ActionServer]:
    """One in runtime `process`, whose folder and HOME are `folder`."""
    with tempfile.TemporaryDirectory() as root:
        name = new_id("tools")
        spec = RuntimeSpec(backend="process", network="none")
        start = RuntimeStart(runtime_id=name, owner="tests", spec=spec, folder=Path(root) / name)
        handle = await ProcessRuntime().start(start)
        try:
            env = {"HOME": str(folder), **(env or {})}
            async with await ActionServer.start(handle, options=options, cwd=str(folder), env=env) as server:
                yield server
        finally:
            await handle.stop()


@contextlib.asynccontextmanager
async def tool_context(
    folder: Path, *, max_output_bytes: int = 16_384, python: str = "python3"
) -> AsyncGenerator[ToolContext]:
    """A session in a sandbox without a network; a failed action server is replaced. Skips where none can start."""
    runtime = BubblewrapRuntime()
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        need(False, str(error))
    name = new_id("tools")
    spec = RuntimeSpec(backend="sandbox", network="none")
    handle = await runtime.start(RuntimeStart(runtime_id=name, owner="tests", spec=spec, folder=folder / name))
    server = SessionServer(handle, ActionServerOptions(python=python))
    try:
        yield ToolContext(
            runtime=handle,
            env={},
            action_server=server.current,
            command_timeout_s=60.0,
            max_output_bytes=max_output_bytes,
        )
    finally:
        await server.close()
        await handle.stop()
