"""The key of served agents and served tasks: whatever a client sends as one is compared, and refused if it is wrong."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web

from gangline.interop.agent_api.app import create_app, shaped_error
from gangline.interop.openenv.app import create_app as create_openenv
from gangline.wire.http.listening import listening
from gangline.wire.http.same_origin import OwnNames

WRONG = [b"", b"Bearer wrong", b"Bearer \xff\xfe", "Bearer ключ".encode(), b"Basic right", b"Bearer"]
NONE = cast(Any, None)


async def answered(app: web.Application, line: bytes, authorization: bytes) -> tuple[bytes, Any]:
    """Status line and body."""
    async with listening(app, shutdown_s=1.0, shape=shaped_error, host="127.0.0.1", port=0) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(
            line + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: " + authorization + b"\r\n"
            b"Content-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
        )
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    return head.partition(b"\r\n")[0], msgspec.json.decode(body)


@pytest.mark.parametrize("authorization", WRONG, ids=repr)
async def test_an_agent_refuses_a_wrong_key_in_openai_s_form(authorization: bytes) -> None:
    app = create_app(NONE, {}, names=OwnNames(), key="right")
    status, told = await answered(app, b"POST /v1/responses", authorization)
    assert (status, told["error"]["code"]) == (b"HTTP/1.1 401 Unauthorized", "invalid_api_key")


@pytest.mark.parametrize("authorization", WRONG, ids=repr)
async def test_served_tasks_refuse_a_wrong_key(authorization: bytes) -> None:
    app = create_openenv(NONE, name="tasks", names=OwnNames(), key="right")
    status, told = await answered(app, b"GET /schema", authorization)
    assert (status, told["code"]) == (b"HTTP/1.1 401 Unauthorized", "unauthorized")


async def test_the_right_key_opens_both() -> None:
    agent = create_app(NONE, {}, names=OwnNames(), key="right")
    status, told = await answered(agent, b"POST /v1/responses", b"Bearer right")
    assert (status, told["error"]["param"]) == (b"HTTP/1.1 400 Bad Request", "input")
    tasks = create_openenv(NONE, name="tasks", names=OwnNames(), key="right")
    status, _ = await answered(tasks, b"GET /schema", b"bearer right")
    assert status == b"HTTP/1.1 200 OK"
