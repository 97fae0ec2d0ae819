"""A web page of somebody else, in a browser on the operator's machine, against services that ask for no token.

Requests are written byte by byte, as browsers send them: what a page may send without a preflight, and the preflight.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from access import LINK, accesses

from gangline.domain.errors import InvalidRequest
from gangline.models.engine_server.app import serving as engine_serving
from gangline.node.node import control_routes
from gangline.server.app import all_routes
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.http.same_origin import OwnNames
from support.node.node import running_node
from support.service.running import any_plugin

_NONE: Any = SimpleNamespace(store=None, gate=None, backends=None)
SERVER = [(route.method, route.path) for route in all_routes(_NONE) if route.opened_by == "control"]
NODE = [
    (route.method, route.path)
    for route in control_routes(_NONE, *([cast(Any, None)] * 3))
    if route.opened_by == "control"
]
ENGINE = [
    *(("POST", path) for path in ("/pause", "/resume", "/collective_rpc", "/update_weight_version")),
    *(("POST", path) for path in ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/tokenize")),
    *(("GET", path) for path in ("/is_paused", "/weight_info", "/v1/models", "/version")),
]
SERVICES = ["server", "node", "engine"]
TASK = {"task_id": "t", "instruction": "id > /tmp/owned", "agent": {"harness": "shell"}}


class Service:
    """A running service, and its routes as (method, path)."""

    def __init__(self, url: str, routes: list[tuple[str, str]]) -> None:
        self.host, self.port = cast(str, urlsplit(url).hostname), cast(int, urlsplit(url).port)
        self.routes = [(method, re.sub(r"\{[a-z_]+\}", "x1", path)) for method, path in routes]

    @property
    def authority(self) -> str:
        return f"{self.host}:{self.port}"

    async def ask(
        self, method: str, path: str, headers: dict[str, str], body: bytes = b"", host: str | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One connection, one request: status, headers, what there is of a body."""
        head = {"Host": host or self.authority, "Connection": "close", **headers}
        if body or method in ("POST", "DELETE"):
            head["Content-Length"] = str(len(body))
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items() if value)]
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            with suppress(ConnectionError):
                await writer.drain()
            status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            told = b"" if "event-stream" in str(fields) else await reader.read()
        finally:
            writer.close()
        named = dict(field.lower().split(": ", 1) for field in fields if field)
        return int(status.split()[1]), named, told

    async def ask_all(self, headers: dict[str, str], body: bytes = b"", host: str | None = None) -> dict[str, int]:
        found = await asyncio.gather(*(self.ask(*route, headers, body, host) for route in self.routes))
        return {" ".join(route): answer[0] for route, answer in zip(self.routes, found, strict=True)}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(
        data_dir=tmp_path, control_token=None, check_task=any_plugin, allowed_hosts=["gangline.lab"]
    ) as running:
        yield Service(running.url, SERVER)


@pytest.fixture
async def engine() -> AsyncIterator[Service]:
    async with scripted_server({"default": {"text": "x"}}) as url:
        yield Service(url, ENGINE)


@pytest.fixture
async def node(tmp_path: Path, engine: Service) -> AsyncIterator[Service]:
    url = f"http://{engine.authority}"
    options = {"control_token": None, "public_url": "https://node.lab:8443/n1"}
    async with running_node(tmp_path / "n", url, **options) as running:
        yield Service(running.url, NODE)


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest) -> Service:
    return request.getfixturevalue(request.param)


SIMPLE = {
    "a plain fetch": {"Content-Type": "text/plain;charset=UTF-8"},
    "a form": {"Content-Type": "application/x-www-form-urlencoded"},
    "a form with files": {"Content-Type": "multipart/form-data; boundary=x"},
    "a fetch of bytes": {},
}
"""What needs no preflight."""


@pytest.mark.parametrize("kind", SIMPLE)
async def test_no_route_takes_what_a_page_of_another_site_sends(service: Service, kind: str):
    cross_site = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    found = await service.ask_all({**cross_site, **SIMPLE[kind]}, json.dumps(TASK).encode())
    assert set(found.values()) == {403}, found
    assert len(found) >= 10


@pytest.mark.parametrize("kind", SIMPLE)
async def test_a_body_that_is_not_json_is_refused_even_where_a_browser_says_nothing_of_its_page(
    service: Service, kind: str
):
    service.routes = [route for route in service.routes if route[0] == "POST"]
    found = await service.ask_all(SIMPLE[kind], json.dumps(TASK).encode())
    assert set(found.values()) == {415}, found


async def test_a_refusal_of_a_type_names_the_one_to_send(server: Service):
    status, headers, body = await server.ask("POST", "/v1/tasks", SIMPLE["a plain fetch"], json.dumps(TASK).encode())
    assert (status, headers["content-type"]) == (415, "application/problem+json")
    assert json.loads(body)["code"] == "unsupported_media_type"
    assert "application/json" in json.loads(body)["detail"]


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost.evil.example", "file://"]
)
async def test_a_page_with_another_origin_is_refused(service: Service, origin: str):
    found = await service.ask_all({"Origin": origin, "Content-Type": "application/json"}, b"{}")
    assert set(found.values()) == {403}, found


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_pictures_and_frames_of_other_pages_show_nothing(service: Service, site: str):
    found = await service.ask_all({"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"})
    assert set(found.values()) == {403}, found


REBOUND = [
    "evil.example",
    "evil.example:{port}",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "8.8.8.8",
    "a@b@c",
]


@pytest.mark.parametrize("host", REBOUND)
async def test_a_name_that_was_bound_to_our_address_opens_nothing(service: Service, host: str):
    name = host.format(port=service.port)
    rebound = {"Origin": f"http://{name}", "Sec-Fetch-Site": "same-origin", "Content-Type": "application/json"}
    found = await service.ask_all(rebound, b"{}", host=name)
    assert set(found.values()) == {403}, found


async def test_no_preflight_is_granted(service: Service):
    wanted = {
        "Origin": "https://evil.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        "Access-Control-Request-Private-Network": "true",
    }
    for path in {path for _, path in service.routes} | {"/health", "/s/x1/v1/messages"}:
        status, headers, _ = await service.ask("OPTIONS", path, wanted)
        assert status in (401, 403, 404, 405)
        assert not [name for name in headers if name.startswith("access-control")]


async def test_own_names_and_pages_are_served(server: Service, node: Service, engine: Service):
    port = server.port
    for name in (f"localhost:{port}", f"127.0.0.2:{port}", f"LOCALHOST.:{port}", "gangline.lab", "[::1]"):
        headers = {"Origin": f"http://{name.lower()}", "Sec-Fetch-Site": "same-origin"}
        assert (await server.ask("GET", "/v1/status", headers, host=name))[0] == 200
    page = {"Origin": "https://node.lab:8443", "Sec-Fetch-Site": "same-origin"}
    assert (await node.ask("GET", "/v1/status", page, host="node.lab"))[0] == 200
    assert (await engine.ask("GET", "/v1/models", {}))[0] == 200
    status, _, body = await server.ask("POST", "/v1/tasks", {"Content-Type": "application/json; charset=utf-8"}, b"{")
    assert status == 400
    assert b"cannot be read" in body or b"instruction" in body or b"JSON" in body


POSTED = {"chat": "chat/completions", "messages": "messages", "responses": "responses", "tokenize": "tokenize"}
"""First segments of paths without `/v1` -> a path of theirs, which takes POST alone."""
ONLY_NAMED = ("complete", "completions", "embeddings")
"""First segments below which nothing is served: the answer says what to use."""


def _example(path: str) -> str:
    """A path that a route serves. The proxy's end in a pattern: what follows a session, or a provider's whole path."""
    before, is_pattern, pattern = path.partition("{path:")
    root = pattern.partition("(")[0]
    of_root = POSTED.get(root, "models" if root == "models" else f"{root or '/v1'}/models")
    return re.sub(r"\{[a-z_]+(:[^}]*)?\}", "x1", before) + (of_root if is_pattern else "")


async def test_the_page_of_access_says_how_each_route_answers(tmp_path: Path, engine: Service):
    async with (
        serving(data_dir=tmp_path, control_token="right") as of_server,
        running_node(tmp_path / "n", f"http://{engine.authority}", control_token="right") as of_node,
    ):
        urls = {"server": of_server.url, "node": of_node.url}
        for row in accesses():
            service = engine if row.service == "engine" else Service(urls[row.service], [])
            path = _example(row.path)
            if path.strip("/").split("/")[0] in ONLY_NAMED:
                continue
            posted = path.strip("/") in POSTED.values()
            method = row.method if row.method != "*" else "POST" if posted else "GET"
            foreign, _, _ = await service.ask(method, path, {"Origin": "https://evil.example"})
            assert (foreign == 403) == row.own_names, (row, foreign)
            body = b"" if method in ("GET", "HEAD") else b"{}"
            json_body = {"Content-Type": "application/json"} if body else {}
            unknown, _, _ = await service.ask(method, path, {"Authorization": "Bearer no", **json_body}, body)
            assert (unknown == 401) == (row.opened_by not in ("", LINK)), (row, unknown)


def test_a_server_without_a_token_has_to_be_asked_for(tmp_path: Path):
    with pytest.raises(TypeError, match="control_token"):
        cast(Any, serving)(data_dir=tmp_path)


@pytest.mark.parametrize(("host", "num_warnings"), [("127.0.0.1", 0), ("::1", 0), ("localhost", 0), ("0.0.0.0", 1)])
async def test_an_engine_server_that_others_may_reach_says_so_at_every_start(
    host: str, num_warnings: int, caplog: pytest.LogCaptureFixture
):
    for _ in range(2):
        caplog.clear()
        async with engine_serving(web.Application(), host=host):
            told = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
        assert len(told) == num_warnings
        assert all(line.startswith(f"engine.open host={host}: it has no key") for line in told)


async def test_health_answers_whoever_asks(service: Service):
    assert (await service.ask("GET", "/health", {}, host="probe.of.a.balancer"))[0] == 200


async def test_agents_reach_the_proxy_under_any_name_and_need_the_key_of_their_session(node: Service):
    for path in ("/s/x1/v1/chat/completions", "/v1/messages", "/v1/responses"):
        headers = {"Content-Type": "application/json", "Authorization": "Bearer no"}
        status, _, body = await node.ask("POST", path, headers, b"{}", host="proxy.sandbox")
        assert status == 401
        assert b"key" in body


async def test_a_refused_page_is_in_the_log_of_refusals(server: Service, tmp_path: Path):
    await server.ask("POST", "/v1/tasks", {"Origin": "https://evil.example"})
    lines = [json.loads(line) for line in (tmp_path / "server" / "actions" / "refused.jsonl").read_text().splitlines()]
    assert [(line["path"], line["status"]) for line in lines] == [("/v1/tasks", 403)]


@pytest.mark.parametrize("name", ["http://a.example", "a.example:80", "a/b", "", "user@a.example", "[::1"])
def test_a_name_to_allow_is_a_name(name: str):
    with pytest.raises(InvalidRequest, match="--allowed-host"):
        OwnNames(allowed_hosts=[name])
