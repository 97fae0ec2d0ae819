"""One contract of HTTP for two applications: a real server and a real node, asked over sockets, answer alike.

Requests are written byte by byte. Routes that both have carry the contract: `/v1/status`, `/v1/sessions` and what is
below it, `/health`, `/metrics`, the description. Paths of providers' model calls, which only a node has, are left out.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from gangline.domain.errors import MethodNotAllowed
from gangline.machine.telemetry.logs import LineFormatter
from gangline.node.calls.proxy import Proxy
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.store.audit import read_actions
from gangline.wire.client.base import error_of
from gangline.wire.http.listening import listening
from gangline.wire.http.routes import Action
from support.node.node import TOKEN, running_node
from support.service.running import any_plugin

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEARER = f"Authorization: Bearer {TOKEN}"
JSON = "application/json"
MSGPACK = "application/msgpack"
PROBLEM = "application/problem+json"
NONE = "/v1/sessions/nosuch"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def kind(self) -> str:
        return self.headers.get("content-type", "")

    def problem(self, status: int, code: str) -> dict[str, Any]:
        """The body, after a look at all that every problem has."""
        told = json.loads(self.body)
        assert (self.status, told["status"], told["code"]) == (status, status, code), told
        assert self.kind == PROBLEM
        assert told.keys() == {"type", "title", "status", "detail", "code", "boundary", "retryable", "details"}
        assert told["detail"]
        assert self.headers["x-request-id"].startswith("req-")
        return told


class Service:
    def __init__(self, name: str, url: str, actions: Path) -> None:
        self.name = name
        self.actions = actions
        parts = urlsplit(url)
        self._host, self.port = str(parts.hostname), int(parts.port or 0)

    async def send(self, data: bytes) -> Answer:
        """One request on its own connection, and the one answer."""
        reader, writer = await asyncio.open_connection(self._host, self.port)
        try:
            writer.write(data)
            async with asyncio.timeout(20):
                first, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
                headers = dict(field.lower().split(": ", 1) for field in fields if field)
                length = 0 if data.startswith(b"HEAD") else int(headers.get("content-length", "0"))
                return Answer(int(first.split()[1]), headers, await reader.readexactly(length))
        finally:
            writer.close()

    async def ask(
        self, method: str, path: str, *headers: str, body: bytes = b"", kind: str = JSON, token: str = BEARER
    ) -> Answer:
        lines = [f"{method} {path} HTTP/1.1", *(line for line in headers if line.lower().startswith("host:"))]
        lines += [] if len(lines) > 1 else ["Host: 127.0.0.1"]
        lines += [line for line in (token, *headers) if line and line not in lines]
        if body:
            lines += [f"Content-Type: {kind}"] if kind else []
        if body or method in ("POST", "PUT", "DELETE"):
            lines.append(f"Content-Length: {len(body)}")
        return await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def actions_of(self, path: str, *, refused: bool = False) -> list[Action]:
        return [action for action in read_actions([self.actions], refused=refused) if action.path == path]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Service]]:
    folder = tmp_path_factory.mktemp("contract")
    async with (
        scripted_server({"default": {"text": "x"}}) as engine,
        serving(data_dir=folder / "s", control_token=TOKEN, check_task=any_plugin) as server,
        running_node(folder / "n", engine) as node,
    ):
        yield {
            "server": Service("server", server.url, folder / "s" / "server" / "actions"),
            "node": Service("node", node.url, folder / "n" / "nodes" / "n1" / "actions"),
        }


@pytest.fixture(params=["server", "node"])
def service(request: pytest.FixtureRequest, services: dict[str, Service]) -> Service:
    return services[request.param]


# -- the query string --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        *("", "abc", "-1", "-0.001", "1_000", "%205", "5%20", "+5", ".5", "5.", "nan", "inf", "-inf", "1e999", "0x10"),
        *(quote("٣"), quote("五"), "true", "1,5", "%00", "x" * 500),
    ],
)
async def test_what_is_no_number_in_its_bounds_is_refused_by_name(service: Service, value: str):
    told = (await service.ask("GET", f"{NONE}/wait?timeout_s={value}")).problem(400, "invalid_request")
    assert "timeout_s" in told["detail"]
    assert told["details"] == {"param": "timeout_s"}
    assert len(told["detail"]) < 200


@pytest.mark.parametrize("value", ["0", "1", "1.5", "1e3", "1E-2", "300", "301", "9" * 30, "0.0", "-0"])
async def test_a_number_is_taken_and_held_to_its_maximum(service: Service, value: str):
    (await service.ask("GET", f"{NONE}/wait?timeout_s={value}")).problem(404, "not_found")


async def test_a_parameter_given_twice_is_refused(service: Service):
    told = (await service.ask("GET", f"{NONE}/wait?timeout_s=1&timeout_s=1")).problem(400, "invalid_request")
    assert "once" in told["detail"]


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("GET", "/v1/status?verbose=1", "verbose"),
        ("GET", f"{NONE}/wait?tiemout_s=1", "tiemout_s"),
        ("POST", f"{NONE}/finalize?completion=1", "completion"),
        ("GET", "/v1/openapi.json?v=2", "v"),
    ],
)
async def test_a_parameter_that_a_route_does_not_have_is_refused(service: Service, method: str, path: str, name: str):
    told = (await service.ask(method, path)).problem(400, "invalid_request")
    assert repr(name) in told["detail"]
    assert told["details"] == {"param": name}


@pytest.mark.parametrize("path", ["/health?probe=7", "/metrics?collect=all", "/openapi.json?v=2"])
async def test_probes_may_send_parameters_of_their_own(service: Service, path: str):
    assert (await service.ask("GET", path)).status == 200


@pytest.mark.parametrize("value", ["banana", "", "2", "yes", "True", "-1"])
async def test_a_flag_is_nothing_but_yes_or_no(service: Service, value: str):
    told = (await service.ask("POST", f"{NONE}/finalize?completions={value}")).problem(400, "invalid_request")
    assert "completions must be 0 or 1" in told["detail"]


@pytest.mark.parametrize("value", ["0", "1", "true", "false"])
async def test_a_flag_is_taken(service: Service, value: str):
    (await service.ask("POST", f"{NONE}/finalize?completions={value}")).problem(404, "not_found")


# -- formats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, JSON),
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        (JSON, JSON),
        (PROBLEM, JSON),
        ("text/html", JSON),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,image/webp,*/*;q=0.8", JSON),
        ("image/png", JSON),
        (MSGPACK, MSGPACK),
        (MSGPACK.upper(), MSGPACK),
        (f"text/plain, {MSGPACK}", MSGPACK),
        (f"{JSON}, {MSGPACK}", MSGPACK),
        (f"{MSGPACK}; q=1.0; x=y", MSGPACK),
        (f"{MSGPACK}, {JSON};q=0.5", MSGPACK),
        (f"{MSGPACK};q=0.1, {JSON}", JSON),
        (f"{MSGPACK};q=0.5, */*", JSON),
        (f"{MSGPACK}, */*;q=0.1", MSGPACK),
        (f"{JSON};q=0, */*", MSGPACK),
        (f"{MSGPACK};q=0", JSON),
        (f"{MSGPACK};q=0, */*", JSON),
        (f"{MSGPACK};q=bad", JSON),
        (f"{MSGPACK}x", JSON),
        (f"{JSON};q=0", JSON),
        (";;,,q=", JSON),
    ],
)
@pytest.mark.parametrize("path", ["/v1/status", "/v1/sessions", "/openapi.json"])
async def test_accept_chooses_the_format_of_a_record(service: Service, path: str, accept: str | None, kind: str):
    answer = await service.ask("GET", path, *([] if accept is None else [f"Accept: {accept}"]))
    assert (answer.status, answer.kind) == (200, kind)
    decoded = json.loads(answer.body) if kind == JSON else msgspec.msgpack.decode(answer.body)
    assert isinstance(decoded, dict | list)


@pytest.mark.parametrize("accept", [JSON, MSGPACK, "text/html", "image/png", "*/*"])
async def test_an_error_is_a_problem_whatever_is_accepted(service: Service, accept: str):
    (await service.ask("GET", NONE, f"Accept: {accept}")).problem(404, "not_found")


async def test_numbers_for_prometheus_are_text_whatever_is_accepted(service: Service):
    for accept in (JSON, "text/plain", "*/*"):
        assert (await service.ask("GET", "/metrics", f"Accept: {accept}")).kind.startswith("text/plain; version=")


async def test_a_condition_or_a_range_changes_no_answer(service: Service):
    for header in ("If-None-Match: *", 'If-None-Match: "x"', "Range: bytes=0-3", "Upgrade: websocket"):
        answer = await service.ask("GET", "/v1/status", header)
        assert (answer.status, answer.kind) == (200, JSON), header
        assert "etag" not in answer.headers


# -- paths and methods -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("/nothing", "//", "/favicon.ico", "//v1/status", "/v1/status/", "/v1/status/x", "/v1/sessions/", "/health/"),
        *("/metrics/", f"{NONE}/nothing", f"{NONE}/wait/", "/v1/sessions/%2e%2e/status", "/openapi.json/x"),
    ],
)
async def test_an_unknown_route_is_a_problem_that_says_where_the_routes_stand(service: Service, path: str):
    for method in ("GET", "POST", "OPTIONS"):
        told = (await service.ask(method, path)).problem(404, "not_found")
        assert "GET /openapi.json" in told["detail"]
    (await service.ask("GET", path, token="")).problem(401, "unauthorized")


@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS", "DELETE", "TRACE", "POST"])
@pytest.mark.parametrize("path", ["/v1/status", "/health", "/metrics", "/openapi.json"])
async def test_another_method_is_told_which_the_path_takes(service: Service, method: str, path: str):
    answer = await service.ask(method, path, body=b"any" if method == "PUT" else b"", kind="text/plain")
    told = answer.problem(405, "method_not_allowed")
    assert answer.headers["allow"] == "get, head"
    assert told["detail"] == f"{path} does not take {method}; it takes GET, HEAD."
    assert isinstance(error_of(405, answer.body, "x"), MethodNotAllowed)
    (await service.ask(method, path, token="")).problem(401, "unauthorized")


async def test_allow_names_every_method_of_a_path(service: Service):
    assert (await service.ask("PUT", "/v1/sessions")).headers["allow"] == "get, head, post"


@pytest.mark.parametrize("path", ["/v1/status", "/health", "/metrics", "/v1/sessions", "/v1/openapi.json"])
async def test_head_is_get_without_its_body(service: Service, path: str):
    head, whole = await service.ask("HEAD", path), await service.ask("GET", path)
    assert (head.status, head.kind) == (200, whole.kind)
    assert int(head.headers["content-length"]) > 0


async def test_health_says_the_version_to_whoever_asks(service: Service):
    answer = await service.ask("GET", "/health", "Host: probe.of.a.balancer", "Origin: https://x.example", token="")
    assert (answer.status, answer.kind) == (200, JSON)
    assert json.loads(answer.body).keys() == {"status", "version"}


async def test_the_description_stands_at_two_places_and_names_each_operation_once(service: Service):
    found = [json.loads((await service.ask("GET", path)).body) for path in ("/openapi.json", "/v1/openapi.json")]
    assert found[0] == found[1]
    described = found[0]
    assert described["openapi"] == "3.1.0"
    operations = [one for methods in described["paths"].values() for one in methods.values()]
    names = [one["operationId"] for one in operations]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)
    assert {"/health", "/metrics", "/v1/status", "/v1/sessions", "/openapi.json"} <= described["paths"].keys()
    text = json.dumps(described)
    for name in {piece.split('"')[0] for piece in text.split('"#/components/schemas/')[1:]}:
        assert name in described["components"]["schemas"]
    wait = described["paths"][next(path for path in described["paths"] if path.endswith("/wait"))]["get"]
    assert wait["parameters"][1]["schema"] == {"type": "number", "minimum": 0, "maximum": 300.0, "default": 60.0}


# -- bodies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"{", ("byte 1", "column 1")),
        (b'{"a": 1} more', ("byte 10", "column 10")),
        (b"\xef\xbb\xbf{}", ("byte 0", "column 1")),
        (b"\xff{}", ("byte 0", "column 1")),
        (b'{"task_id": "\\ud800"}', ("byte 21", "column 20")),
        (b"[1, 2]", ("object",)),
        (b"null", ("object",)),
        (b'"x"', ("object",)),
        (b'{"a":' * 3000, ("nested", "recursion")),
        (b"[" * 100_000, ("object", "recursion")),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_a_body_that_is_no_object_is_refused_where_it_breaks(
    service: Service, body: bytes, where: tuple[str, ...]
):
    told = (await service.ask("POST", "/v1/sessions", body=body)).problem(400, "invalid_request")
    assert any(word in told["detail"] for word in where), told["detail"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "", "multipart/form-data; boundary=x", "text/json", MSGPACK, f"{JSON}, text/plain"]
)
async def test_a_body_of_another_type_is_refused(service: Service, kind: str):
    told = (await service.ask("POST", "/v1/sessions", body=b"{", kind=kind)).problem(415, "unsupported_media_type")
    assert f"`Content-Type: {JSON}`" in told["detail"]


@pytest.mark.parametrize("kind", [f"{JSON}; charset=utf-8", "application/vnd.x+json", "application/JSON"])
async def test_a_body_of_json_by_any_of_its_names_is_read(service: Service, kind: str):
    (await service.ask("POST", "/v1/sessions", body=b"{", kind=kind)).problem(400, "invalid_request")


async def test_a_route_that_takes_no_body_needs_no_type(service: Service):
    (await service.ask("POST", f"{NONE}/abort")).problem(404, "not_found")


async def test_a_body_beyond_its_limit_is_refused_by_its_length_or_as_it_comes(service: Service):
    head = f"POST /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\n{BEARER}\r\nContent-Type: {JSON}\r\n"
    claimed = await service.send(f"{head}Content-Length: 999999999999\r\n\r\n".encode())
    assert claimed.problem(413, "limit_exceeded")["details"] == {"max_bytes": 4 << 20}
    piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    chunked = await service.send(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + piece * 5)
    chunked.problem(413, "limit_exceeded")


async def test_a_refused_body_is_freed_without_the_garbage_collector(service: Service):
    body = b'{"x": "' + b"x" * (3 << 20)  # an object that does not end
    await service.ask("POST", "/v1/sessions", body=body)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(6):
            (await service.ask("POST", "/v1/sessions", body=body)).problem(400, "invalid_request")
        assert tracemalloc.get_traced_memory()[0] < 6 << 20
    finally:
        tracemalloc.stop()
        gc.enable()


async def test_a_coding_is_decoded_or_named(service: Service):
    packed = await service.ask("POST", "/v1/sessions", "Content-Encoding: gzip", body=b"no gzip")
    assert "gzip" in packed.problem(400, "invalid_request")["detail"]
    strange = await service.ask("POST", "/v1/sessions", "Content-Encoding: compress", body=b"x")
    assert "gzip" in strange.problem(415, "unsupported_media_type")["detail"]


async def test_an_id_that_is_none_is_refused(service: Service):
    assert "must match" in (await service.ask("GET", "/v1/sessions/-x")).problem(400, "invalid_request")["detail"]


# -- who asks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        *("", "Authorization: Bearer wrong", "Authorization: Bearer", f"Authorization: {TOKEN}", f"x-api-key: {TOKEN}"),
        *(f"Authorization: Basic {TOKEN}", f"Authorization: Bearer {TOKEN}x", "Authorization: Bearer \u00e9"),
    ],
)
async def test_who_has_no_token_is_told_how_to_send_it(service: Service, given: str):
    answer = await service.ask("GET", "/v1/status", token=given)
    assert "Authorization: Bearer TOKEN" in answer.problem(401, "unauthorized")["detail"]
    assert answer.headers["www-authenticate"] == "bearer"
    assert TOKEN not in answer.body.decode()


@pytest.mark.parametrize(
    "given", [f"Authorization: bearer {TOKEN}", f"AUTHORIZATION: BEARER  {TOKEN} ", f"X-Polar-Control-Token: {TOKEN}"]
)
async def test_the_scheme_has_no_case_and_polars_header_counts(service: Service, given: str):
    assert (await service.ask("GET", "/v1/status", token=given)).status == 200


@pytest.mark.parametrize("path", ["/v1/status", "/nothing", "/v1/sessions/x/nothing"])
@pytest.mark.parametrize(
    "header",
    [
        *("Host: evil.example", "Host: a@b", "Host: 8.8.8.8", "Origin: https://evil.example", "Origin: null"),
        *("Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-site"),
    ],
)
async def test_a_foreign_host_or_page_is_refused_before_all_else(service: Service, path: str, header: str):
    for method, token in (("GET", BEARER), ("PUT", BEARER), ("GET", "")):
        (await service.ask(method, path, header, token=token)).problem(403, "foreign_request")


# -- what is not HTTP ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\nno header\r\n\r\n", "Invalid header"),
        (b"GET /v1/status HTTP/1.1\r\n\r\n", "Host"),
        (b"GET /v1/status HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "Host"),
        (b"POST /v1/sessions HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", "Content-Length"),
        (b"POST /v1/sessions HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "Length"),
        (b"GET /v1/status HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 9000 + b"\r\n\r\n", "8190 bytes"),
        (b"GET /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nno header\r\n\r\n", "Invalid header"),
        (b"POST /v1/sessions HTTP/1.1\r\nHost: a\r\nExpect: 200-maybe\r\nContent-Length: 1\r\n\r\n", "100-continue"),
    ],
    ids=["header", "no host", "two hosts", "length", "two lengths", "long header", "unknown path", "expect"],
)
async def test_what_is_no_http_is_a_problem_too(service: Service, data: bytes, why: str):
    assert why in (await service.send(data)).problem(400, "invalid_request")["detail"]


async def test_many_requests_of_one_connection_are_answered_in_their_order(service: Service):
    one = f"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n{BEARER}\r\n\r\n"
    paths = ["/health", "/nothing", "/v1/status?x=1", "/v1/sessions"]
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write("".join(one % path for path in paths).encode())
    found: list[int] = []
    for _ in paths:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        found.append(int(head.split()[1]))
        await reader.readexactly(int(head.split("content-length: ")[1].split()[0]))
    writer.close()
    assert found == [200, 404, 400, 200]


# -- what is written down ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", NONE, b"", 404, "not_found"),
        ("GET", "/nothing", b"", 404, "not_found"),
        ("PUT", "/v1/status", b"", 405, "method_not_allowed"),
        ("GET", "/v1/status?x=1", b"", 400, "invalid_request"),
        ("POST", "/v1/sessions", b"[", 400, "invalid_request"),
    ],
)
async def test_a_refusal_is_one_line_of_the_log_with_the_id_of_its_answer(
    service: Service, caplog: pytest.LogCaptureFixture, method: str, path: str, body: bytes, status: int, code: str
):
    caplog.handler.setFormatter(LineFormatter())
    caplog.set_level(logging.DEBUG, "gangline.wire.http")  # where refusals are not bounded
    answer = await service.ask(method, path, "X-Request-Id: of-the-client", body=body)
    assert answer.status == status
    (line,) = [line for line in caplog.text.splitlines() if "request.refused" in line]
    plain, number = path.partition("?")[0], answer.headers["x-request-id"]
    assert line.endswith(f"request.refused method={method} path={plain} status={status} code={code} request={number}")
    assert number != "of-the-client"


async def test_a_change_and_a_refusal_are_in_the_log_of_actions_and_a_look_is_not(service: Service):
    await service.ask("POST", "/v1/sessions/written/abort")
    await service.ask("GET", "/v1/sessions/written")
    await service.ask("HEAD", "/v1/sessions/written")
    await service.ask("PUT", "/v1/sessions/written")
    await service.ask("GET", "/v1/sessions/written", token="")
    await service.ask("POST", "/no-such-route", token="Authorization: bearer wrong")
    (changed,) = service.actions_of("/v1/sessions/written/abort")
    assert (changed.method, changed.status, changed.who.split()[0]) == ("POST", 404, "token")
    assert service.actions_of("/v1/sessions/written") == []
    assert [one.who for one in service.actions_of("/v1/sessions/written", refused=True)] == ["no token"]
    assert [one.status for one in service.actions_of("/no-such-route", refused=True)] == [401]


async def test_the_log_of_a_node_names_the_session_that_was_opened(services: dict[str, Service]):
    node = services["node"]
    opened = json.loads((await node.ask("POST", "/v1/sessions", body=b'{"session_id": "opened"}')).body)
    assert opened["session_id"] == "opened"
    assert node.actions_of("/v1/sessions")[-1].subject == "opened"


# -- where only agents come --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "status"), [("/nothing", 404), ("/", 405), ("/v1/status", 404)])
async def test_an_agents_mistake_is_answered_in_the_shape_of_a_provider(path: str, status: int):
    proxy = Proxy()
    app = web.Application()
    app.add_routes(proxy.routes())
    async with listening(app, shutdown_s=0.1, shape=proxy.shaped_error, host="127.0.0.1", port=0) as (host, port):
        answer = await Service("agents", f"http://{host}:{port}", Path()).ask("GET", path, token="")
    assert (answer.status, answer.kind) == (status, JSON)
    assert json.loads(answer.body)["error"]["message"]
