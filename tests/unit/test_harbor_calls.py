"""One call of Harbor's agents: a node that is away, an agent that leaves, keys, and a relay that refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gangline.domain.errors import Conflict, GanglineError, InvalidRequest, ServerUnavailable
from gangline.interop.harbor.relay.rollouts import RelayedRollout, RolloutBook, SessionAddress
from support.service.harbor_relay import (
    Death,
    FakeNode,
    FakeRelay,
    Refused,
    asked,
    connector_of,
    handshake_error,
    stopped,
)

AWAY = aiohttp.ServerDisconnectedError()


@asynccontextmanager
async def connected(relay: FakeRelay, node: FakeNode, folder: Path, **options: Any) -> AsyncGenerator[None]:
    kept = asyncio.create_task(connector_of(relay, node, folder, **options).keep())
    try:
        yield
    finally:
        await stopped(kept)


async def test_a_node_that_restarts_is_asked_again_with_the_same_key(tmp_path: Path) -> None:
    relay, node = FakeRelay(), FakeNode()
    node.outages = [AWAY, TimeoutError(), AWAY]
    async with connected(relay, node, tmp_path):
        assert await asked(relay, "r", b"hi") == node.samples[0].whole
    assert node.outages == []
    assert len(node.keys) == 1


async def test_a_node_that_stays_away_is_an_error_for_the_agent(tmp_path: Path) -> None:
    relay, node = FakeRelay(), FakeNode()
    node.outages = [AWAY] * 3
    async with connected(relay, node, tmp_path, patience_s=-1.0):
        with pytest.raises(Refused, match="server_unavailable"):
            await relay.ask("r", "/v1/chat/completions", b"hi")


async def test_an_agent_that_leaves_ends_its_call_on_the_node(tmp_path: Path) -> None:
    relay, node = FakeRelay(), FakeNode(num_pieces=1000)
    async with connected(relay, node, tmp_path):
        call = asyncio.create_task(relay.ask("r", "/v1/chat/completions", b"hi"))
        while relay.num_taken < 3:
            await asyncio.sleep(0)
        await stopped(call)
        while not node.samples[0].failed:
            await asyncio.sleep(0)
        assert node.samples[0].num_sampled < 1000


@pytest.mark.parametrize("deaths", [(), (Death(2),)])
async def test_the_agents_own_key_is_kept_over_all_tries(tmp_path: Path, deaths: tuple[Death, ...]) -> None:
    relay, node = FakeRelay(deaths), FakeNode()
    async with connected(relay, node, tmp_path):
        for key in ("one", "two"):
            while True:
                try:
                    await relay.ask("r", "/v1/chat/completions", b"hi", **{"Idempotency-Key": key})
                    break
                except Exception:  # as an SDK, which keeps its key
                    await asyncio.sleep(0)
    assert sorted(set(node.keys)) == ["one", "two"]
    assert len(node.samples) == 2


async def test_the_same_question_after_its_answer_is_another_sample(tmp_path: Path) -> None:
    relay, node = FakeRelay(), FakeNode()
    async with connected(relay, node, tmp_path):
        assert await asked(relay, "r", b"hi") != await asked(relay, "r", b"hi")
    assert len(node.samples) == 2


async def test_rollouts_do_not_share_their_calls(tmp_path: Path) -> None:
    """Two agents ask the same; the connection dies before either is answered."""
    relay, node = FakeRelay([Death(0)]), FakeNode()
    async with connected(relay, node, tmp_path):
        answers = await asyncio.gather(asked(relay, "a", b"hi"), asked(relay, "b", b"hi"))
    assert sorted(answers) == sorted(sample.whole for sample in node.samples)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, InvalidRequest), (403, InvalidRequest), (400, InvalidRequest), (502, ServerUnavailable), (409, Conflict)],
)
async def test_a_relay_that_refuses_at_first_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, kind: type[GanglineError]
) -> None:
    monkeypatch.setattr("gangline.interop.harbor.relay.connection._TAKEN_S", -1.0)
    relay = FakeRelay()

    async def refuse(*_arguments: Any, **_options: Any) -> Any:
        raise handshake_error(status)

    monkeypatch.setattr(relay, "ws_connect", refuse)
    with pytest.raises(kind):
        await connector_of(relay, FakeNode(), tmp_path).keep()


async def test_a_relay_that_is_away_later_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is so busy that it holds a connection of ours that has died, for however long."""
    monkeypatch.setattr("gangline.interop.harbor.relay.connection._TAKEN_S", -1.0)
    relay, node = FakeRelay([Death(1)]), FakeNode()
    connect, refusals = relay.ws_connect, [None, 502, 409, 503, None]

    async def sometimes(url: str, **options: Any) -> Any:
        if (status := refusals.pop(0)) is not None:
            raise handshake_error(status)
        return await connect(url, **options)

    monkeypatch.setattr(relay, "ws_connect", sometimes)
    async with connected(relay, node, tmp_path):
        assert await asked(relay, "r", b"hi") == node.samples[0].whole
    assert refusals == []
    assert len(node.samples) == 1


async def test_what_is_remembered_is_private_and_what_was_delivered_stays(tmp_path: Path) -> None:
    book = RolloutBook(tmp_path / "book")
    address = SessionAddress(session_id="s", api_key="secret", url="http://node.test")
    rollout = RelayedRollout("r1", "j1", session=address)
    lost = rollout.ask("digest", "link", own_key=None, new_key="k1")
    heard = rollout.ask("digest", "link", own_key=None, new_key="k2")
    rollout.close(heard, was_heard=True)
    book.add(rollout)
    await book.save(rollout)
    assert (tmp_path / "book" / "r1.json").stat().st_mode & 0o077 == 0
    again = RolloutBook(tmp_path / "book")
    found = again.find("r1")
    assert found is not None
    assert found.session == address
    assert [found.ask("digest", "other", own_key=None, new_key=new).asked.key for new in "ab"] == [lost.asked.key, "b"]
    await again.add_delivered("j1", frozenset({"r1"}))
    await again.add_delivered("j1", frozenset({"r2"}))
    again.forget("j1", {one.rollout_id for one in again})
    assert RolloutBook(tmp_path / "book").jobs() == []
    assert RolloutBook(tmp_path / "book").delivered("j1") == {"r1", "r2"}


async def test_a_rollout_that_came_after_a_jobs_end_is_not_forgotten_with_it(tmp_path: Path) -> None:
    """Somebody retried one by hand while the last group was being delivered."""
    book = RolloutBook(tmp_path)
    for name, job in (("ended", "j1"), ("again", "j1"), ("other", "j2")):
        book.add(RelayedRollout(name, job))
    book.forget("j1", {"ended", "other"})
    assert [one.rollout_id for one in book] == ["again", "other"]
