"""No request makes a node answer a server error: every operation of its own description, by schemathesis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gangline.node.node import TITLE, control_routes
from gangline.serving.scripted.server import scripted_server
from gangline.wire.http.openapi import describe
from support.node.node import TOKEN, running_node
from support.sdk.fuzzed import assail, names_of, on_a_thread, operations

NUM_CASES = 8
"""Of what the description allows, and as many of what it does not, for each operation."""

_NO_PARTS: Any = SimpleNamespace(gate=None, backends=None)
DESCRIPTION = describe(control_routes(_NO_PARTS, *([cast(Any, None)] * 3)), TITLE)
OPERATIONS = operations(DESCRIPTION, without=frozenset({"POST /v1/drain"}))  # it would end the node


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with on_a_thread(lambda on_ready: _serve(tmp_path_factory.mktemp("fuzz"), on_ready)) as url:
        yield url


async def _serve(folder: Path, on_ready: Callable[[str], None]) -> None:
    script = {"default": {"text": "x"}}
    async with scripted_server(script) as engine, running_node(folder, engine) as node:
        on_ready(node.url)
        await asyncio.Event().wait()


@pytest.mark.parametrize("operation", OPERATIONS, ids=list(names_of(OPERATIONS)))
def test_no_request_makes_a_server_error(operation: Any, url: str):
    assail(operation, url, {"Authorization": f"Bearer {TOKEN}"}, num_cases=NUM_CASES)
