"""What a stranger can do to a real server and a real node: nothing without the token, and only so much with it."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from gangline.domain.errors import LimitExceeded
from gangline.node.node import control_routes
from gangline.server.app import all_routes
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.server import ServerClient
from support.node.node import TOKEN, running_node
from support.service.running import any_plugin, request

_NONE: Any = SimpleNamespace(store=None, gate=None, backends=None)
SERVER = [(route.method, route.path) for route in all_routes(_NONE) if route.opened_by == "control"]
NODE = [
    (route.method, route.path)
    for route in control_routes(_NONE, *([cast(Any, None)] * 3))
    if route.opened_by == "control"
]
SWAPPED = base64.b64encode(f"{TOKEN}:wrong".encode()).decode()
KEYS = [
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": f"Basic {TOKEN}"},
    {"Authorization": f"Basic {SWAPPED}"},
    {"X-Polar-Control-Token": "x"},
]
HOSTILE_IDS = [
    "..",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    ".hidden",
    "a%00b",
    "a%2fb",
    "x" * 129,
    "-rf",
    "%F0%9F%92%A5",
    "a b",
]
OWN_FILES = {"actions", "actions.jsonl", "backends.json", ".incoming"}
"""What a server and a node may write while they refuse."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[str]:
    async with serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running:
        yield running.url


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[str]:
    async with scripted_server({"default": {"text": "x"}}) as engine, running_node(tmp_path / "n", engine) as running:
        yield running.url


def filled(path: str, name: str) -> str:
    return re.sub(r"\{[a-z_]+\}", lambda _: name, path)


async def answers(
    url: str, routes: list[tuple[str, str]], headers: dict[str, str], body: bytes = b"{}"
) -> dict[str, int]:
    """`METHOD path` -> status."""
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json", **headers}) as http:

        async def ask(method: str, path: str) -> int:
            async with http.request(method, url + path, data=BytesIO(body)) as response:
                return response.status

        statuses = await asyncio.gather(*(ask(*route) for route in routes))
    return {f"{method} {path}": status for (method, path), status in zip(routes, statuses, strict=True)}


@pytest.mark.parametrize("key", KEYS, ids=["none", "wrong", "no password", "as the user", "wrong, Polar's"])
async def test_no_route_of_the_server_opens_without_the_token(server: str, key: dict[str, str]):
    routes = [(method, filled(path, "t1")) for method, path in SERVER]
    found = await answers(server, routes, key)
    assert len(found) > 30
    assert set(found.values()) == {401}


@pytest.mark.parametrize("key", KEYS[:3], ids=["none", "wrong", "wrong scheme"])
async def test_no_control_route_of_a_node_opens_without_the_token(node: str, key: dict[str, str]):
    routes = [(method, filled(path, "s1")) for method, path in NODE]
    found = await answers(node, routes, key)
    assert len(found) > 10
    assert set(found.values()) == {401}


@pytest.mark.parametrize("name", HOSTILE_IDS)
async def test_ids_are_ids_wherever_a_path_takes_one(server: str, node: str, name: str, tmp_path: Path):
    key = {"Authorization": f"Bearer {TOKEN}"}
    before = set(tmp_path.rglob("*"))
    for url, routes in ((server, SERVER), (node, NODE)):
        # The client itself makes `/`, which is the page, of `/page/../../..` and of `/nodes/..`, and a list of others.
        made = ("/nodes/{node_id}", "/v1/sessions/{session_id}/tokens")
        named = [
            (method, filled(path, name))
            for method, path in routes
            if "{" in path and not path.startswith("/page/") and (name != ".." or path not in made)
        ]
        found = await answers(url, named, key)
        assert set(found.values()) <= {400, 404, 405}, found
    assert {path.name for path in set(tmp_path.rglob("*")) - before} <= OWN_FILES


def deep() -> bytes:
    return b'{"metadata":' * 100_000 + b"1" + b"}" * 100_000


def deep_list() -> bytes:
    return b"[" * 500_000


def huge_number() -> bytes:
    return b'{"max_sessions": ' + b"9" * 100_000 + b"}"


def not_text() -> bytes:
    return b'{"instruction": "\xff\xfe"}'


@pytest.mark.parametrize("body", [deep, deep_list, huge_number, not_text])
async def test_a_body_that_is_made_to_hurt_is_a_bad_request_on_every_route(
    server: str, node: str, body: Callable[[], bytes]
):
    key = {"Authorization": f"Bearer {TOKEN}"}
    reads_none = {"/start", "/stop", "/clear_llm_server", "/v1/gate/resume", "/v1/drain"}
    reads_none |= {"/admin/inference/pause", "/admin/inference/resume"}
    for url, routes in ((server, SERVER), (node, NODE)):
        posts = [(m, filled(p, "s1")) for m, p in routes if m == "POST" and p not in reads_none]
        found = await answers(url, posts, key, body())
        assert set(found.values()) <= {400, 404, 413}, found


async def test_one_request_submits_so_many_sessions_and_no_more(server: str):
    async with ServerClient(server, TOKEN) as client:
        with pytest.raises(LimitExceeded, match="100000 sessions"):
            await client.submit_many([request(f"t{n}", num_samples=4096) for n in range(25)])
        assert (await client.tasks()).tasks == ()


async def test_a_problem_does_not_tell_the_token_or_the_hosts_paths(server: str, tmp_path: Path):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        for call in (
            http.post(f"{server}/v1/tasks", data=b"{", headers={"Content-Type": "application/json"}),
            http.post(f"{server}/process", json={"instance": {"data_source": "none"}}),
            http.get(f"{server}/v1/tasks/none"),
        ):
            async with call as response:
                told = json.dumps(await response.json(content_type=None))
                assert response.status in (400, 404)
                assert TOKEN not in told
                assert str(tmp_path) not in told
