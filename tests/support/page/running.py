"""A session that runs on a real node, and makes its next model call when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gangline.domain.session import SessionResult
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.server import ServerClient
from support.node.node import running_node
from support.service.running import request

__all__ = ["SteppedSession", "stepped_session"]


@dataclass
class SteppedSession:
    session_id: str
    client: ServerClient
    _folder: Path
    _num_steps: int = 0

    def step(self) -> None:
        """Let the tool that the agent waits for return: the next model call follows."""
        (self._folder / f"go-{self._num_steps}").touch()
        self._num_steps += 1

    async def result(self) -> SessionResult:
        """Of the session at its end."""
        task_id = self.session_id.rpartition(".")[0]
        async with asyncio.timeout(60):
            while not (await self.client.task(task_id, wait_s=5)).ended:
                pass
        return (await self.client.result(task_id))[0]


@asynccontextmanager
async def stepped_session(
    client: ServerClient, token: str | None, folder: Path, task_id: str
) -> AsyncGenerator[SteppedSession]:
    """An agent with two tool calls that wait for `step`, and a last reply."""
    folder.mkdir(parents=True, exist_ok=True)
    waits = [f"until [ -e {folder}/go-{turn} ]; do sleep 0.02; done; echo step {turn}" for turn in range(2)]
    rules = [{"turn": turn, "pattern": ".", "text": f"I wait {turn}.", "tool_calls": [{"run": wait}]}
             for turn, wait in enumerate(waits)]  # fmt: skip
    script = {"rules": [*rules, {"pattern": ".", "text": "Everything is done."}]}
    options = {"node_id": f"node-{task_id}", "server_url": client.url, "control_token": token}
    async with scripted_server(script) as engine, running_node(folder / "node", engine, **options):
        agent = {"harness": "native"}
        runtime = {"backend": "process"}
        task = request(task_id, num_samples=1, agent=agent, runtime=runtime, capture={"token_texts": True})
        submitted = await client.submit(task)
        yield SteppedSession(submitted.session_ids[0], client, folder)
