"""The relay carries every byte of a sandbox's connection, from the first one."""

from __future__ import annotations

import asyncio
import socket
from asyncio import selector_events
from collections.abc import Callable
from typing import Any

import pytest

from gangline.sandbox.network.relay import Relay
from gangline.sandbox.shared.accounts import Traffic


def add_reader_of_python_3_11_2(self: Any, fd: int, callback: Callable[..., None], *args: object) -> None:
    """Debian 12's: a pause in `connection_made` ends as soon as reading begins."""
    if not self._closing:
        self._loop._add_reader(fd, callback, *args)


@pytest.fixture(params=["this Python", "Python 3.11.2"])
def _python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python 3.11.2":
        kind = selector_events._SelectorTransport  # type: ignore[attr-defined]
        monkeypatch.setattr(kind, "_add_reader", add_reader_of_python_3_11_2)


@pytest.mark.usefixtures("_python")
@pytest.mark.parametrize("half_closes", [False, True])
@pytest.mark.parametrize("num_bytes", [1, 500, 1_000_000])
async def test_what_is_sent_before_the_proxy_is_reached_arrives(num_bytes: int, half_closes: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await (reader.read() if half_closes else reader.readexactly(num_bytes))
        writer.write(b"got %d" % len(data))
        writer.close()

    proxy = await asyncio.start_server(answer, "127.0.0.1", 0)
    traffic = Traffic()
    relay = Relay(proxy.sockets[0].getsockname()[1], traffic)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    reader, writer = await asyncio.open_connection(*listening.getsockname())  # accepted below
    writer.write(b"x" * num_bytes)
    if half_closes:
        writer.write_eof()
    await relay.serve(listening)
    try:
        async with asyncio.timeout(20):
            assert await reader.read() == b"got %d" % num_bytes
        assert traffic.sent_bytes == num_bytes
    finally:
        writer.close()
        await relay.close()
        proxy.close()
