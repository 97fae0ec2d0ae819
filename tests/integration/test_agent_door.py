"""The key of a served agent: whatever a client sends as one is compared, and answered in OpenAI's form."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from gangline.agent_api.app import create_app, shaped_error
from gangline.http.listening import listening
from gangline.http.same_origin import OwnNames


@pytest.mark.parametrize("key", [b"", b"wrong", b"\xff\xfe", "ключ".encode()], ids=repr)
async def test_a_wrong_key_is_refused(key: bytes) -> None:
    app = create_app(cast(Any, None), {}, names=OwnNames(), key="right")
    async with listening(app, shutdown_s=1.0, shape=shaped_error, host="127.0.0.1", port=0) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(
            b"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer " + key + b"\r\n"
            b"Content-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
        )
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    assert head.startswith(b"HTTP/1.1 401")
    assert msgspec.json.decode(body)["error"]["code"] == "invalid_api_key"
