"""Callbacks arrive: through a receiver that is down, errors, and a restart of the server; signed, and with one key."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from gangline.domain.errors import InvalidRequest
from gangline.server.run import serving
from gangline.server.service.callbacks import signature
from gangline.store.sql.outbox import Outbox
from gangline.store.sql.tasks import TaskStore
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode, any_plugin, request

TOKEN = "control-secret"


class Received(NamedTuple):
    headers: dict[str, str]
    body: bytes


class Receiver:
    """A trainer's callback endpoint: answers what `answers` says, then 204."""

    def __init__(self, *answers: int) -> None:
        self.received: asyncio.Queue[Received] = asyncio.Queue()
        self._answers = list(answers)
        self.answering = asyncio.Event()
        self.answering.set()

    async def take(self, call: web.Request) -> web.Response:
        await self.received.put(Received(dict(call.headers), await call.read()))
        await self.answering.wait()
        return web.Response(status=self._answers.pop(0) if self._answers else 204)

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[int]:
        app = web.Application()
        app.router.add_post("/done", self.take)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()

    async def next(self) -> Received:
        return await asyncio.wait_for(self.received.get(), 30)


@asynccontextmanager
async def served(folder: Path, **options: Any) -> AsyncIterator[ServerClient]:
    async with (
        serving(
            data_dir=folder, control_token=TOKEN, check_task=any_plugin, callback_base_s=0.02, **options
        ) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        yield client


async def finish_a_task(client: ServerClient, port: int, task_id: str = "t") -> None:
    await client.submit(request(task_id, callback_url=f"http://127.0.0.1:{port}/done", metadata={"step": 7}))
    node = FakeNode(client)
    await node.finish(await node.lease())


async def settled(client: ServerClient, state: str, task_id: str = "t") -> None:
    async for event in client.events(after=0, task_id=task_id):
        if event.kind == f"callback.{state}":
            return


@pytest.fixture
async def free_port() -> int:
    async with Receiver().listening() as port:
        return port


async def test_a_callback_tells_what_came_of_the_task_and_who_says_so(tmp_path: Path):
    receiver = Receiver()
    async with receiver.listening() as port, served(tmp_path) as client:
        await finish_a_task(client, port)
        got = await receiver.next()
        assert json.loads(got.body) == {
            "task_id": "t",
            "status": "ended",
            "rewards": [1.0, 1.0],
            "outcomes": ["completed", "completed"],
            "metadata": {"step": 7},
            "result_url": f"{client.url}/v1/tasks/t/result",
        }
        assert got.headers["X-Gangline-Signature"] == signature(TOKEN, got.body)
        await asyncio.wait_for(settled(client, "delivered"), 30)
        assert (await client.status()).callbacks == {"delivered": 1}


@pytest.mark.parametrize(
    ("public_url", "told"),
    [(None, f"http://{socket.gethostname()}:"), ("https://lab.example/gl/", "https://lab.example/gl/")],
)
async def test_a_receiver_is_told_an_address_that_it_can_reach(tmp_path: Path, public_url: str | None, told: str):
    receiver = Receiver()
    async with receiver.listening() as port, served(tmp_path, host="0.0.0.0", public_url=public_url) as client:
        assert client.url.startswith("http://127.0.0.1:")
        await finish_a_task(client, port)
        result_url = json.loads((await receiver.next()).body)["result_url"]
        assert result_url.startswith(told)
        assert result_url.endswith("/v1/tasks/t/result")


async def test_a_form_that_no_part_of_the_server_makes_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As where a wing was left out."""
    monkeypatch.setattr("gangline.server.run.server_parts", lambda _place: [])
    receiver = Receiver()
    async with receiver.listening() as port, served(tmp_path) as client:
        url = f"http://127.0.0.1:{port}/done"
        polars = request("polars", num_samples=1, callback_url=url, callback_form="polar", callback_expiry_seconds=1)
        await client.submit(polars)
        node = FakeNode(client)
        await node.finish(await node.lease())
        await asyncio.wait_for(settled(client, "expired", "polars"), 30)
        await finish_a_task(client, port)
        assert json.loads((await receiver.next()).body)["task_id"] == "t"


async def test_a_task_may_name_the_secret_that_signs_its_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GANGLINE_TASK_KEY", "trainer-secret")
    receiver = Receiver()
    async with receiver.listening() as port, served(tmp_path) as client:
        url = f"http://127.0.0.1:{port}/done"
        await client.submit(request("t", num_samples=1, callback_url=url, callback_secret="GANGLINE_TASK_KEY"))
        node = FakeNode(client)
        await node.finish(await node.lease())
        got = await receiver.next()
        assert got.headers["X-Gangline-Signature"] == signature("trainer-secret", got.body)
        for name in ("GANGLINE_TOKEN", "GANGLINE_TASK_KEY_NOT_SET", "HOME"):
            with pytest.raises(InvalidRequest, match=name):
                await client.submit(request("other", callback_url=url, callback_secret=name))
        assert b"trainer-secret" not in (tmp_path / "server" / "gangline.db").read_bytes()


async def test_a_callback_is_sent_again_until_it_is_acknowledged(tmp_path: Path):
    receiver = Receiver(500, 404, 302)
    async with receiver.listening() as port, served(tmp_path) as client:
        await finish_a_task(client, port)
        tries = [await receiver.next() for _ in range(4)]
        assert {got.headers["Idempotency-Key"] for got in tries} == {"t:ended"}
        await asyncio.wait_for(settled(client, "delivered"), 30)
    assert receiver.received.empty()


async def test_a_receiver_that_thinks_for_long_is_asked_once_and_holds_up_nobody(tmp_path: Path):
    slow, quick = Receiver(), Receiver()
    slow.answering.clear()
    async with slow.listening() as slow_port, quick.listening() as quick_port, served(tmp_path) as client:
        await finish_a_task(client, slow_port, "slow")
        await slow.next()
        for index in range(3):
            await finish_a_task(client, quick_port, f"quick-{index}")
            await quick.next()
        assert slow.received.empty()
        slow.answering.set()
        await asyncio.wait_for(settled(client, "delivered", "slow"), 30)
    assert slow.received.empty()


async def test_a_callback_follows_no_redirect(tmp_path: Path):
    """A receiver does not choose what the server dials from inside its network."""
    elsewhere, asked = Receiver(), asyncio.Queue[None]()

    async def send_elsewhere(_call: web.Request) -> web.Response:
        await asked.put(None)
        return web.Response(status=307, headers={"Location": f"http://127.0.0.1:{port}/done"})

    app = web.Application()
    app.router.add_post("/done", send_elsewhere)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with elsewhere.listening() as port, served(tmp_path) as client:
            await finish_a_task(client, runner.addresses[0][1])
            async with asyncio.timeout(30):
                for _ in range(2):  # it was no acknowledgement, so it is tried again
                    await asked.get()
            assert elsewhere.received.empty()
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/y", "gopher://x:70/_", "//x/y", "unix:///run/x.sock"])
async def test_a_callback_is_an_http_address(tmp_path: Path, url: str):
    async with served(tmp_path) as client:
        with pytest.raises(InvalidRequest, match="callback_url"):
            await client.submit({"instruction": "x", "agent": {"harness": "shell"}, "callback_url": url})


async def test_a_callback_waits_for_a_receiver_that_is_down_and_survives_a_restart(tmp_path: Path, free_port: int):
    async with served(tmp_path) as client:
        await finish_a_task(client, free_port)
        assert (await client.status()).callbacks == {"pending": 1}
    receiver = Receiver()
    async with receiver.listening(free_port), served(tmp_path) as client:
        assert json.loads((await receiver.next()).body)["task_id"] == "t"
        await asyncio.wait_for(settled(client, "delivered"), 30)


def test_a_callback_that_nobody_takes_expires(tmp_path: Path):
    now = [0.0]
    with TaskStore(tmp_path / "gangline.db", clock=lambda: now[0], callback_expiry_s=60.0) as store:
        store.submit([request(callback_url="http://trainer.test/done")])
        store.cancel_task("t")
        outbox = Outbox(store.database)
        (callback,) = outbox.due(0.0, 10)
        assert outbox.due(0.0, 10, busy=[callback.id]) == []
        outbox.failed(callback, now=0.0, next_at=10.0, error="HTTP 500")
        assert (outbox.due(9.0, 10), outbox.next_due_at()) == ([], 10.0)
        (again,) = outbox.due(10.0, 10)
        assert (again.num_tries, again.key, again.expires_at) == (1, callback.key, 60.0)
        outbox.failed(again, now=60.0, next_at=None, error="HTTP 500")
        assert (outbox.due(1e9, 10), outbox.next_due_at()) == ([], None)
        assert outbox.all_states() == [("t:ended", "expired")]
        assert store.events()[-1].kind == "callback.expired"
