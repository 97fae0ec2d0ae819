"""Callbacks of tenants' tokens reach nothing of the server's own machine, and are not signed by the control token."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.server.service.receivers import check_receiver, is_open
from gangline.wire.client.server import ServerClient
from integration.test_server_callbacks import Receiver, served
from support.service.running import FakeNode, request

CLOSED = (
    "127.0.0.1", "127.9.9.9", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0", "0.0.0.0", "0.0.0.1",
    "localhost", "LOCALHOST", "localhost.", "a.localhost", "127.0.0.1.", "[::1]", "[::]", "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]", "[::127.0.0.1]", "[2002:7f00:1::]", "[64:ff9b::7f00:1]", "169.254.169.254",
    "[::ffff:169.254.169.254]", "[fe80::1]", "[fd00:ec2::254]", "100.100.100.200", "168.63.129.16", "224.0.0.1",
    "[ff02::1]", "255.255.255.255", "me@127.0.0.1",
)  # fmt: skip


@pytest.mark.parametrize("host", CLOSED)
def test_closed_addresses_are_refused_at_submit(host: str) -> None:
    with pytest.raises(InvalidRequest, match="callbacks of tenants"):
        check_receiver(f"http://{host}:8700/done")


@pytest.mark.parametrize("host", ["10.0.0.1", "192.168.1.1", "172.16.0.1", "8.8.8.8", "[fd00::1]", "trainer.example"])
def test_private_networks_and_names_are_accepted(host: str) -> None:
    check_receiver(f"http://{host}/done")


def test_the_operator_opens_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_CALLBACK_NETWORKS", "127.0.0.1 fe80::/10")
    assert all(map(is_open, ("127.0.0.1", "::ffff:127.0.0.1", "fe80::1")))
    assert not any(map(is_open, ("127.0.0.2", "::1")))


async def finish(client: ServerClient, admin: ServerClient, host: str, port: int) -> None:
    await client.submit(request("t", callback_url=f"http://{host}:{port}/done"))
    node = FakeNode(admin)
    await node.finish(await node.lease())


@pytest.mark.parametrize("tenant", ["default", "vision"])
async def test_names_of_closed_addresses_are_refused_at_delivery(
    tmp_path: Path, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = socket.getaddrinfo, asyncio.Event()
    loop = asyncio.get_running_loop()

    def rebound(host: str, *args: object, **more: object) -> object:
        if host == "rebound.example" and not int(str(more.get("flags", 0))) & socket.AI_NUMERICHOST:
            loop.call_soon_threadsafe(asked.set)
            host = "127.0.0.1"
        return real(host, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", rebound)
    receiver = Receiver()
    async with receiver.listening() as port, served(tmp_path) as admin:
        token = (await admin.create_token(role="submit", tenant=tenant)).token
        async with ServerClient(admin.url, token) as client:
            with pytest.raises(InvalidRequest, match="not sent to 127"):
                await client.submit(request("u", callback_url=f"http://127.0.0.1:{port}/done"))
            await finish(client, admin, "rebound.example", port)
            await asyncio.wait_for(asked.wait(), 20)
            await asyncio.sleep(0.5)
        assert receiver.received.empty()


@pytest.mark.parametrize("tenant", ["default", "vision"])
async def test_the_control_token_signs_no_callback_of_a_tenant(
    tmp_path: Path, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGLINE_CALLBACK_NETWORKS", "127.0.0.1")
    receiver = Receiver()
    async with receiver.listening() as port, served(tmp_path) as admin:
        token = (await admin.create_token(role="submit", tenant=tenant)).token
        async with ServerClient(admin.url, token) as client:
            await finish(client, admin, "127.0.0.1", port)
            assert "X-Gangline-Signature" not in (await receiver.next()).headers
