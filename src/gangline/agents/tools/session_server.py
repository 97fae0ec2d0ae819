"""The action server of a session: started on first use, and replaced if it has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gangline.agents.tools.action_server import ActionServer, ActionServerOptions
from gangline.domain.sandbox import Sandbox


class SessionServer:
    """`current` is the `action_server` of a tool context. Call `close` at the session's end."""

    def __init__(
        self, sandbox: Sandbox, options: ActionServerOptions | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """env: for the agent's commands."""
        self._sandbox = sandbox
        self._options = options
        self._env = env
        self._server: ActionServer | None = None
        self._starting = asyncio.Lock()

    async def current(self) -> ActionServer:
        """Raises: RuntimeFailed if the sandbox is gone; ActionServerFailed if the server did not start."""
        async with self._starting:
            if self._server is None or self._server.has_ended:
                self._server = None
                self._server = await ActionServer.start(self._sandbox, options=self._options, env=self._env)
            return self._server

    async def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            await self._server.close()
