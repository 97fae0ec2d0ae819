"""Every HTTP surface withstands every attack on it: server, node, model proxy of all dialects, engine server, agent.

That each attack can succeed is shown by a server that answers everything with 200, and one that fails everything.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
import pytest_asyncio

from gangline.interop.agent_api.app import create_app, shaped_error
from gangline.node.node import control_routes
from gangline.server.app import all_routes
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.node import NodeClient
from gangline.wire.client.server import ServerClient
from gangline.wire.http.listening import listening
from gangline.wire.http.same_origin import OwnNames
from hostile.http_attacks import ATTACKS, HttpAttack, Surface, succeeded
from support.node.node import TOKEN, running_node

_NONE: Any = SimpleNamespace(store=None, gate=None, backends=None)
_SERVER = [(route.method, route.path) for route in all_routes(_NONE) if route.opened_by == "control"]
_PASSWORD_TOO = [(route.method, route.path) for route in all_routes(_NONE) if route.password_too]
_NODE = [
    (route.method, route.path)
    for route in control_routes(_NONE, *([cast(Any, None)] * 3))
    if route.opened_by == "control"
]
_NO_BODY = {"/start", "/stop", "/clear_llm_server", "/v1/gate/resume", "/v1/drain"}
"""Routes that act without reading a body."""
_MODEL_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1beta/models/m:generateContent")
_AGAINST = {
    "server": ("listener", "token", "json"),
    "node": ("listener", "token", "json"),
    "proxy": ("listener", "json", "proxy"),
    "engine": ("listener", "json"),
    "agent": ("listener", "token", "json"),
}
"""Surface -> the kinds of attacks on it. A page's posts are not model calls: see `same_origin`."""


def _named(routes: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((method, re.sub(r"\{[a-z_]+\}", "named", path)) for method, path in routes)


def _posts(routes: list[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(path for method, path in _named(routes) if method == "POST" and path not in _NO_BODY)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def surfaces(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[dict[str, Surface]]:
    folder = tmp_path_factory.mktemp("http")
    outside = await asyncio.start_server(_answers(b"200 OK"), "127.0.0.1", 0)
    outside_url = f"http://127.0.0.1:{outside.sockets[0].getsockname()[1]}"
    async with (
        scripted_server({"default": {"text": "as you wish"}}) as engine,
        serving(data_dir=folder / "server", control_token=TOKEN) as server,
        running_node(folder / "node", engine) as node,
        ServerClient(server.url, TOKEN) as control,
        listening(
            create_app(control, {"agent": {"harness": "native"}}, names=OwnNames(), key=TOKEN),
            shutdown_s=1.0, shape=shaped_error, host="127.0.0.1", port=0,
        ) as (agent_host, agent_port),
    ):  # fmt: skip
        own, other = await node.client.open_session(), await node.client.open_session()
        cookie = await _read_only_cookie(server.url)
        own_calls, other_calls = (tuple(f"/s/{s.session_id}{path}" for path in _MODEL_PATHS) for s in (own, other))
        yield {
            "server": Surface(
                "server", server.url, "/health", TOKEN, _named(_SERVER), _posts(_SERVER),
                key=own.api_key, outside=outside_url, read_only=cookie, password_too=_named(_PASSWORD_TOO),
            ),
            "node": Surface(
                "node", node.url, "/health", TOKEN, _named(_NODE), _posts(_NODE),
                key=own.api_key, outside=outside_url,
            ),
            "proxy": Surface(
                "proxy", node.url, "/health", TOKEN, calls=own_calls, other_calls=other_calls,
                key=own.api_key, outside=outside_url,
            ),
            "engine": Surface(
                "engine", engine, "/health", outside=outside_url,
                posts=("/v1/chat/completions", "/v1/completions", "/inference/v1/generate"),
            ),
            "agent": Surface(
                "agent", f"http://{agent_host}:{agent_port}", "/health", TOKEN, (("POST", "/v1/responses"),),
                ("/v1/responses",), key=own.api_key, outside=outside_url,
            ),
        }  # fmt: skip
    outside.close()


async def _read_only_cookie(url: str) -> str:
    async with ServerClient(url, TOKEN) as control, aiohttp.ClientSession(url) as browser:
        link = await control.page_link(read_only=True)
        async with browser.post(link.path, headers={"Origin": url}) as answer:
            return answer.headers["Set-Cookie"].partition(";")[0]


def _cases() -> Iterator[Any]:
    for name, kinds in _AGAINST.items():
        for attack in ATTACKS:
            if attack.against in kinds:
                yield pytest.param(name, attack, id=f"{name}-{attack.name}")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("name", "attack"), list(_cases()))
async def test_a_surface_withstands(name: str, attack: HttpAttack, surfaces: dict[str, Surface]) -> None:
    if name == "proxy":  # what was posted to the node with its token may have closed the gate, as it should
        async with NodeClient(surfaces[name].url, TOKEN) as node:
            await node.resume()
    assert await succeeded(attack, surfaces[name]) is None


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_an_attack_succeeds_on_a_server_without_walls(attack: HttpAttack) -> None:
    status = b"200 OK" if attack.must == "be refused" else b"500 Oh"
    server = await asyncio.start_server(_answers(status), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    surface = Surface(
        "open", url, "/health", TOKEN, (("GET", "/v1/tasks/named"), ("POST", "/v1/tasks")), ("/v1/tasks",),
        ("/s/one/v1/messages",), "key", ("/s/two/v1/messages",), url,
    )  # fmt: skip
    try:
        assert await succeeded(attack, surface) is not None
    finally:
        server.close()


def _answers(status: bytes) -> Any:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    return answer
