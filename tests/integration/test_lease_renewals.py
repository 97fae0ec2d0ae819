"""Leases of a node whose event loop is held up, with a real server in another process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from gangline.node.sessions.leases.server_link import Renewals
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode, beat, request

LEASE_S = 1.5
SERVER = f"""
import asyncio, sys
from pathlib import Path
from gangline.server.run import serve
ready = lambda url: print(url, flush=True)
options = dict(control_token="token", lease_s={LEASE_S}, sweep_every_s=0.1, on_ready=ready)
asyncio.run(serve(data_dir=Path(sys.argv[1]), **options))
"""


@pytest.fixture
def server_url(tmp_path: Path) -> Generator[str]:
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.terminate()
    server.wait(10)
    server.stdout.close()


async def test_a_loop_that_is_held_up_keeps_its_leases(server_url: str) -> None:
    async with ServerClient(server_url, "token") as client:
        await client.submit(request(num_samples=1, agent={"harness": "shell", "settings": {"command": "true"}}))
        node = FakeNode(client)
        leases = await node.lease()
        renewals = Renewals(client, every_s=0.2)
        renewals.start()
        try:
            renewals.sending(beat(leases))
            time.sleep(3 * LEASE_S)
            assert (await node.beat(leases)).renewed == ("t.0",)
        finally:
            await renewals.stop()


async def test_a_loop_that_stays_silent_loses_them(server_url: str) -> None:
    async with ServerClient(server_url, "token") as client:
        await client.submit(request(num_samples=1, agent={"harness": "shell", "settings": {"command": "true"}}))
        node = FakeNode(client)
        leases = await node.lease()
        renewals = Renewals(client, every_s=0.1, max_silence_s=0.5)
        renewals.start()
        try:
            renewals.sending(beat(leases))
            async with asyncio.timeout(30):
                while not (again := await FakeNode(client, "n2").lease(wait_s=5)):
                    pass
            assert again[0].attempt == 2
        finally:
            await renewals.stop()
