"""One Chromium and one server for all tests of the page: each test gets a fresh profile."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from gangline.domain.errors import Failure
from gangline.domain.session import SessionResult
from gangline.server.run import serving
from gangline.wire.client.server import ServerClient
from support.page.browser import Visit, chromium, signed_in
from support.page.sessions import working_session
from support.service.running import FakeNode, any_plugin, request

TOKEN = "control-token"

# No test fails for its time: containers are tested alongside these, on the same processors.
expect.set_options(timeout=30_000)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncGenerator[Browser]:
    async with chromium() as running:
        yield running


@pytest.fixture(scope="package")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def control(data_folder: Path) -> AsyncGenerator[ServerClient]:
    """A server with a group of three: rewards 0, 1 and 0; and three sessions that failed, two of them alike."""
    async with (
        serving(data_dir=data_folder, control_token=TOKEN, check_task=any_plugin) as server,
        ServerClient(server.url, TOKEN) as client,
    ):
        await client.submit(request("task-1", num_samples=3))
        for lease in await FakeNode(client).lease():
            result = working_session(lease.session_id, reward=float(lease.sample_index == 1))
            await client.post_result(msgspec.structs.replace(result, node_id="n1", fence=lease.fence))
        await client.submit(request("broken", num_samples=3))
        for lease in await FakeNode(client).lease():
            message = f"agent ended with exit code {3 + (lease.sample_index == 2)}"
            why = f"no such model: m{lease.sample_index}" if lease.sample_index < 2 else message
            failure = Failure(boundary="harness", code="harness_error", message=why, retryable=False)
            await FakeNode(client).finish([lease], outcome="agent_error", failure=failure, reward=None)
        yield client


@pytest_asyncio.fixture(loop_scope="package")
async def visit(browser: Browser, control: ServerClient) -> AsyncGenerator[Visit]:
    async with signed_in(browser, control) as visit:
        yield visit


async def add_session(control: ServerClient, task_id: str, result: SessionResult) -> str:
    """Store a result as the only session of a new task. Returns the session's id."""
    await control.submit(request(task_id, num_samples=1))
    (lease,) = await FakeNode(control).lease()
    changes = {"session_id": lease.session_id, "task_id": task_id, "node_id": "n1", "fence": lease.fence}
    await control.post_result(msgspec.structs.replace(result, **changes))
    return lease.session_id
