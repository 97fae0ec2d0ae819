"""Request bodies that are compressed, broken, or compressed in a way that nobody here reads, on every kind of route."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
import tempfile
import tracemalloc
import zlib
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.errors import InvalidRequest, LimitExceeded
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.http.content_codings import decompressed
from support.node.node import TOKEN, RunningNode, running_node
from support.service.running import any_plugin


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


PACKED: dict[str, Any] = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress}
for coding, modules in {"br": ["brotli"], "zstd": ["compression.zstd", "backports.zstd"]}.items():
    for module in modules:
        with suppress(ImportError):
            PACKED.setdefault(coding, import_module(module).compress)
if "br" in PACKED:
    PACKED["br"] = partial(PACKED["br"], quality=5)  # its default, 11, takes ten seconds for a long body
UNKNOWN = ["snappy", "gzip, gzip", "compress", *({"br", "zstd"} - set(PACKED))]

HELLO: Any = {"role": "user", "content": "hello"}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": "m", "messages": [HELLO]}),
    "responses": ("/v1/responses", {"model": "m", "input": [HELLO]}),
    "anthropic": ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": [HELLO]}),
    "anthropic count": ("/v1/messages/count_tokens", {"model": "m", "messages": [HELLO]}),
    "google": ("/v1beta/models/m:generateContent", {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}),
}
CONTROLS: dict[str, tuple[str, dict[str, Any]]] = {
    "node": ("/v1/sessions", {}),
    "server": ("/v1/tasks", {"instruction": "x", "agent": {"harness": "x"}}),
}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncGenerator[RunningNode]:
    async with scripted_server({"default": {"text": "fine"}}) as engine, running_node(tmp_path, engine) as running:
        yield running


async def post(url: str, path: str, key: str, body: bytes, *codings: str) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of the answer to these bytes, with a Content-Encoding header for each coding."""
    host, port = url.removeprefix("http://").split(":")
    head = [f"POST {path} HTTP/1.1", f"Host: {host}:{port}", f"Content-Length: {len(body)}", "Connection: close"]
    head += ["Content-Type: application/json", f"Authorization: Bearer {key}", f"x-api-key: {key}"]
    head += [f"x-goog-api-key: {key}", *(f"Content-Encoding: {coding}" for coding in codings), "", ""]
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write("\r\n".join(head).encode() + body)
        async with asyncio.timeout(30):
            answer = await reader.read()
    finally:
        writer.close()
    first, _, rest = answer.partition(b"\r\n\r\n")
    status, *lines = first.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(status.split()[1]), headers, json.loads(rest)


def assert_in_shape(name: str, status: int, answer: Any) -> str:
    """The message of an error, which has the shape of its provider."""
    error = answer["error"]
    match name:
        case "google":
            assert (error["code"], error["status"]) == (status, "INVALID_ARGUMENT")
        case "chat" | "responses":
            assert error["type"] == "invalid_request_error"
        case _:
            assert (answer["type"], error["type"]) == ("error", "invalid_request_error")
    return error["message"]


def no_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("name", CALLS)
async def test_models_read_every_known_coding_and_refuse_others_in_the_providers_shape(
    name: str, node: RunningNode, caplog: pytest.LogCaptureFixture
) -> None:
    key, (path, fields) = (await node.client.open_session()).api_key, CALLS[name]
    plain = json.dumps(fields).encode()
    for coding, pack in [*PACKED.items(), ("deflate", raw_deflate), ("GZip ", gzip.compress), ("identity", bytes)]:
        status, _, answer = await post(node.url, path, key, pack(plain), coding)
        assert status == 200, (coding, answer)
    for coding, pack in PACKED.items():
        packed = pack(plain)
        for broken in (b"this is not compressed", packed[:-3], packed + b"more"):
            status, _, answer = await post(node.url, path, key, broken, coding)
            assert status == 400, (coding, answer)
            assert f"not {coding}, as its Content-Encoding says" in assert_in_shape(name, status, answer)
    for coding in UNKNOWN:
        status, _, answer = await post(node.url, path, key, plain, *coding.split(", "))
        assert status == 415, (coding, answer)
        message = assert_in_shape(name, status, answer)
        assert coding in message
        assert f"Send one of {', '.join(PACKED)}, or no encoding" in message
    no_tracebacks(caplog)


@pytest.mark.parametrize("place", CONTROLS)
async def test_control_routes_do_so_as_problems(
    place: str, node: RunningNode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(data_dir=tmp_path / "server", control_token=TOKEN, check_task=any_plugin) as server:
        url, (path, fields) = server.url if place == "server" else node.url, CONTROLS[place]
        plain = json.dumps(fields).encode()
        for coding, pack in PACKED.items():
            status, _, answer = await post(url, path, TOKEN, pack(plain), coding)
            assert status < 300, (coding, answer)
            status, headers, answer = await post(url, path, TOKEN, pack(plain)[:-3], coding)
            assert (status, headers["content-type"]) == (400, "application/problem+json"), answer
            assert answer["details"] == {"error_code": "request_body_encoding_invalid"}
        for coding in UNKNOWN:
            status, headers, answer = await post(url, path, TOKEN, plain, coding)
            assert (status, headers["content-type"]) == (415, "application/problem+json"), answer
            assert answer["code"] == "unsupported_media_type"
            assert "gzip, x-gzip, deflate" in answer["detail"]
    no_tracebacks(caplog)


@given(st.binary(max_size=3000), st.sampled_from(list(PACKED)), st.sampled_from([1, 7, 1000, 1 << 20]))
def test_whole_bodies_and_nothing_else_are_decompressed_up_to_the_limit(
    plain: bytes, coding: str, piece_bytes: int
) -> None:
    packed = PACKED[coding](plain)

    def pieces(body: bytes) -> list[bytes]:
        return [body[start : start + piece_bytes] for start in range(0, len(body), piece_bytes)]

    assert b"".join(decompressed(pieces(packed), coding, len(plain))) == plain
    for broken in (packed[:-1], packed + b"\0"):
        with pytest.raises(InvalidRequest):
            decompressed(pieces(broken), coding, len(plain))
    if plain:
        with pytest.raises(LimitExceeded):
            decompressed(pieces(packed), coding, len(plain) - 1)


@pytest.mark.parametrize("coding", PACKED)
def test_a_long_body_is_decompressed_in_short_pieces(coding: str) -> None:
    plain = b"".join(b"line %d\n" % number for number in range(400_000))
    pieces = decompressed([PACKED[coding](plain)], coding, len(plain))
    assert b"".join(pieces) == plain
    assert max(map(len, pieces)) <= 1 << 20


@pytest.mark.parametrize("coding", PACKED)
def test_a_bomb_costs_no_more_than_the_limit(coding: str) -> None:
    bomb = PACKED[coding](bytes(16 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceeded):
            decompressed([bomb], coding, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# -- a machine without brotli and zstandard ---------------------------------------------------------------------------

ABSENT = ("brotli", "backports.zstd", "compression.zstd")


def test_a_body_in_a_coding_whose_package_is_absent_is_a_415_in_shape_that_names_the_extra() -> None:
    here = Path(__file__)
    code = [
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); sys.path[:0] = {[str(here.parents[1])]!r}",
        "from importlib.util import module_from_spec, spec_from_file_location",
        f"spec = spec_from_file_location('codings', {str(here)!r}); codings = module_from_spec(spec)",
        "spec.loader.exec_module(codings); codings.print_answers_to_absent_codings()",
    ]
    told = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr[-4000:]
    answers: dict[str, list[Any]] = json.loads(told.stdout)
    assert set(answers) == {*CALLS, *CONTROLS}
    for name, of_codings in answers.items():
        for coding, (status, answer) in zip(("br", "zstd"), of_codings, strict=True):
            assert status == 415, (name, answer)
            message = answer["detail"] if name in CONTROLS else assert_in_shape(name, status, answer)
            assert (
                f"'{coding}' is not read here (the machine that serves this lacks Gangline's extra `codings`)"
                in message
            )
            assert "Send one of gzip, x-gzip, deflate, or no encoding." in message


def print_answers_to_absent_codings() -> None:
    """In its own process, which lacks the packages."""
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(json.dumps(asyncio.run(_answers(Path(folder)))))


async def _answers(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Route -> what it answers to a body in br, and to one in zstd."""
    found: dict[str, list[tuple[int, Any]]] = {}
    async with (
        scripted_server({"default": {"text": "x"}}) as engine,
        running_node(folder, engine) as node,
        serving(data_dir=folder / "server", control_token=TOKEN) as server,
    ):
        key = (await node.client.open_session()).api_key
        for name, (path, fields) in (CALLS | CONTROLS).items():
            url, opened_by = (server.url if name == "server" else node.url), (TOKEN if name in CONTROLS else key)
            body = json.dumps(fields).encode()
            answers = [await post(url, path, opened_by, body, coding) for coding in ("br", "zstd")]
            found[name] = [(status, answer) for status, _, answer in answers]
    return found
