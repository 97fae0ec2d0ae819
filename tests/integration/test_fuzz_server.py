"""No request makes the rollout server answer a server error: every operation of its description, by schemathesis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gangline.domain.errors import GanglineError
from gangline.server.app import TITLE, all_routes
from gangline.server.run import serving
from gangline.wire.client.server import ServerClient
from gangline.wire.http.openapi import describe
from support.sdk.fuzzed import NOWHERE, assail, names_of, on_a_thread, operations
from support.service.running import any_plugin, result

TOKEN = "fuzz-token"
NUM_CASES = 6
"""Of what the description allows, and as many of what it does not, for each operation."""

ENDLESS = frozenset({"GET /v1/events", "GET /events"})
OPERATIONS = operations(describe(all_routes(cast(Any, SimpleNamespace(store=None))), TITLE), without=ENDLESS)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with on_a_thread(lambda on_ready: _serve(tmp_path_factory.mktemp("fuzz"), on_ready)) as url:
        yield url


async def _serve(folder: Path, on_ready: Callable[[str], None]) -> None:
    """With a node that ends each session at once, so that no `/process` waits."""
    async with (
        serving(data_dir=folder, control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        on_ready(running.url)
        while True:
            for lease in await client.lease("fuzz-node", url=NOWHERE, max_sessions=1000, wait_s=1.0):
                with suppress(GanglineError):  # another request may have taken the session away
                    await client.post_result(result(lease, "fuzz-node"))
            await asyncio.sleep(0)


@pytest.mark.parametrize("operation", OPERATIONS, ids=list(names_of(OPERATIONS)))
def test_no_request_makes_a_server_error(operation: Any, url: str):
    assail(operation, url, {"Authorization": f"Bearer {TOKEN}"}, num_cases=NUM_CASES)
