"""The action server of a session: started by its first use, and replaced when it has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gangline.agents.tools.action_server import ActionServer, ActionServerOptions
from gangline.domain.sandbox import Sandbox

__all__ = ["SessionServer"]


class SessionServer:
    """`current` is a context's `action_server`. Call `close` at the session's end."""

    def __init__(
        self, handle: Sandbox, options: ActionServerOptions | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """env: of the agent's commands."""
        self._handle = handle
        self._options = options
        self._env = env
        self._server: ActionServer | None = None
        self._starting = asyncio.Lock()

    async def current(self) -> ActionServer:
        """Raises: RuntimeFailed when the sandbox is gone; ActionServerFailed when the server did not start."""
        async with self._starting:
            if self._server is None or self._server.has_ended:
                self._server = None
                self._server = await ActionServer.start(self._handle, options=self._options, env=self._env)
            return self._server

    async def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            await self._server.close()
