"""What a node does first in a new life: it tells what became of the attempts of the last one."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import LeaseLost
from gangline.domain.ids import new_id
from gangline.domain.session import Heartbeat, HeartbeatReply, Lease, SessionResult
from gangline.domain.views import ResultReceipt
from gangline.node.backends.by_role import BackendsByRole
from gangline.node.calls.proxy import Proxy
from gangline.node.sessions.leases import delivery
from gangline.node.sessions.leases.delivery import Delivery
from gangline.node.sessions.leases.rollout_server import HeartbeatTaker
from gangline.node.sessions.parts import NodeParts
from gangline.node.sessions.pipeline import Pipeline
from gangline.node.sessions.stages import Pools, PoolSizes
from gangline.store.journal.log import AttemptOpened, Journal


class ForgetfulServer:
    """Has put every session back into its queue, and takes its time to refuse a result."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.told: list[Any] = []
        self.has_result = asyncio.Event()
        self.answers = asyncio.Event()
        self.is_asked_for_work = asyncio.Event()

    async def lease(self, *_: Any, **__: Any) -> list[Lease]:
        self.asked.append("lease")
        self.is_asked_for_work.set()
        await asyncio.Event().wait()
        return []

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        self.told.append(beat.sessions)
        return HeartbeatReply(renewed=(), lost=(), lease_s=30.0)

    def twin(self, *, timeout_s: float) -> AbstractAsyncContextManager[HeartbeatTaker]:
        raise NotImplementedError("the event loop is never held up here")

    async def release(self, node_id: str, *, session_id: str, fence: int) -> None:
        raise LeaseLost("it is queued")

    async def post_result(self, result: SessionResult, data: bytes | None = None) -> ResultReceipt:
        self.asked.append(f"result of {result.session_id}")
        self.has_result.set()
        await self.answers.wait()
        raise LeaseLost("it is queued")


def parts(folder: Path, journal: Journal, backends: BackendsByRole) -> NodeParts:
    return NodeParts(
        node_id="n1",
        owner=new_id("recovery"),
        runtimes_folder=folder / "runtimes",
        backends=backends,
        first_model="m",
        proxy=Proxy(),
        proxy_port=9,
        journal=journal,
        pools=Pools(PoolSizes()),
    )


async def test_a_node_has_told_of_its_last_life_before_it_asks_for_work(tmp_path: Path) -> None:
    """Else the same attempt, leased again, would lose its calls when what was left of it is refused."""
    journal, backends, server = Journal.open(tmp_path / "journal"), BackendsByRole(), ForgetfulServer()
    await journal.open_attempt(AttemptOpened("s1", 1, "t1", 1))
    pipeline = Pipeline(
        parts(tmp_path, journal, backends),
        server,
        Delivery(tmp_path / "outgoing", server, journal),
        url="http://node.test",
    )
    running = asyncio.create_task(pipeline.run())
    async with asyncio.timeout(30):
        await server.has_result.wait()
        for _ in range(20):  # whatever else it would do by now
            await asyncio.sleep(0)
        assert server.asked == ["result of s1"]
        assert server.told == [{"s1": (1, "postrun")}]  # not to be taken for one that never arrived
        server.answers.set()
        await server.is_asked_for_work.wait()
    assert server.asked == ["result of s1", "lease"]
    assert journal.unclosed() == []
    running.cancel()
    await asyncio.wait({running})
    await backends.close()
    await journal.close()


class FickleServer(ForgetfulServer):
    """Leases one session, takes its time to answer its result, and meanwhile takes the session away."""

    def __init__(self) -> None:
        super().__init__()
        self.has_taken_away = asyncio.Event()

    async def lease(self, *_: Any, **__: Any) -> list[Lease]:
        if self.asked:
            await asyncio.Event().wait()
        self.asked.append("lease")
        lease = Lease(
            session_id="s1",
            task_id="t1",
            sample_index=0,
            attempt=1,
            fence=1,
            expires_at=0.0,
            lease_s=0.3,
            task={"task_id": "t1", "instruction": "go", "agent": {"harness": "shell"}, "runtime": {"backend": "none"}},
        )
        return [lease]

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        if not self.has_result.is_set():
            return HeartbeatReply(renewed=tuple(beat.sessions), lost=(), lease_s=0.3)
        if self.has_taken_away.is_set():
            self.answers.set()
        self.has_taken_away.set()
        return HeartbeatReply(renewed=(), lost=tuple(beat.sessions), lease_s=0.3)


async def test_a_session_that_is_taken_away_while_its_result_is_sent_leaves_no_result_behind(tmp_path: Path) -> None:
    """The result is refused, and goes where refused results are. It would else lie there until the node's next life."""
    journal, backends, server = Journal.open(tmp_path / "journal"), BackendsByRole(), FickleServer()
    outgoing = tmp_path / "outgoing"
    pipeline = Pipeline(
        parts(tmp_path, journal, backends), server, Delivery(outgoing, server, journal), url="http://node.test"
    )
    running = asyncio.create_task(pipeline.run())
    async with asyncio.timeout(30):
        await server.answers.wait()
        while list(outgoing.glob("*.msgpack")) or journal.unclosed():
            await asyncio.sleep(0.02)
    assert [path.name for path in (outgoing / "refused").iterdir()] == ["s1.1.msgpack"]
    running.cancel()
    await asyncio.wait({running})
    await backends.close()
    await journal.close()


def test_of_results_that_nobody_wants_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_MAX_REFUSED_BYTES", 250)
    for number in range(5):
        path = tmp_path / f"s{number}.1.msgpack"
        path.write_bytes(b"x" * 100)
        os.utime(path, (number, number))
        delivery._set_aside(path)
    assert sorted(one.name for one in (tmp_path / "refused").iterdir()) == ["s3.1.msgpack", "s4.1.msgpack"]


def test_a_result_that_is_too_large_for_the_server_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server takes up to 1 GiB: what it refuses for its size is larger than all that is kept."""
    monkeypatch.setattr(delivery, "_MAX_REFUSED_BYTES", 250)
    for name in ("s0.1.msgpack", "s1.1.msgpack"):
        (tmp_path / name).write_bytes(b"x" * 1000)
        delivery._set_aside(tmp_path / name)
        assert [one.name for one in (tmp_path / "refused").iterdir()] == [name]


def test_results_that_are_set_aside_at_once_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_MAX_REFUSED_BYTES", 250)
    paths = [tmp_path / f"s{number}.1.msgpack" for number in range(300)]
    for path in paths:
        path.write_bytes(b"x" * 100)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(delivery._set_aside, paths))
    assert len(list((tmp_path / "refused").iterdir())) == 2
