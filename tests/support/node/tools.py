"""An action server on this machine, for tests of its tools."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from gangline.domain.contracts import RuntimeStart
from gangline.domain.ids import new_id
from gangline.domain.task import RuntimeSpec
from gangline.runtimes.process import ProcessRuntime
from gangline.tools.action_server import ActionServer, ActionServerOptions

__all__ = ["action_server"]


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
