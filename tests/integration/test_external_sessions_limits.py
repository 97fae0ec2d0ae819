"""Sessions that nobody ends, sessions that are too many, and state that a node finds on its disk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.completion import Completion
from gangline.domain.errors import InvalidRequest, LimitExceeded, NotFound, StoreError
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.node.calls.proxy import Proxy
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.node.external.sessions import ClaimRequest, ExternalSessions, SessionRequest
from gangline.node.external.store import ExternalStore
from gangline.node.node import serve
from gangline.serving.scripted.server import scripted_server
from gangline.settings.node import NodeSettings
from gangline.store.journal.log import AttemptOpened, Journal
from support.node.node import RunningNode, running_node

NOBODY = "http://127.0.0.1:9"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Host:
    """Sessions before an engine that nobody asks; `released` gets the ids of those that have ended."""

    def __init__(self, engine: VllmEngine, journal: Journal, clock: Clock, released: list[str] | None) -> None:
        self._engine, self._journal, self._clock, self._proxy = engine, journal, clock, Proxy()
        self._released = [] if released is None else released

    def serves(self, session_id: str) -> bool:
        return self._proxy.serves(session_id)

    def open_session(self, spec: SessionSpec, completions: Sequence[Completion] = ()) -> ModelSession:
        session = ModelSession(spec, self._engine, self._journal, completions=completions, clock=self._clock)
        self._proxy.add(session)
        return session

    def close_session(self, session_id: str) -> None:
        self._proxy.remove(session_id)
        self._released.append(session_id)


@asynccontextmanager
async def opened_sessions(
    folder: Path, clock: Clock, released: list[str] | None = None, **options: Any
) -> AsyncGenerator[ExternalSessions]:
    journal, engine = Journal.open(folder / "journal"), VllmEngine(NOBODY)

    sessions = ExternalSessions(
        node_id="n1",
        store=ExternalStore(folder / "sessions"),
        journal=journal,
        host=Host(engine, journal, clock, released),
        clock=clock,
        **options,
    )
    try:
        await sessions.restore()
        yield sessions
    finally:
        await sessions.close()
        await journal.close()
        await engine.close()


def request(**fields: Any) -> SessionRequest:
    return SessionRequest.model_validate(fields)


async def test_a_session_that_nobody_uses_is_aborted_and_then_forgotten(tmp_path: Path) -> None:
    clock, released = Clock(), list[str]()
    async with opened_sessions(tmp_path, clock, released) as sessions:
        opened = await sessions.create(request(ttl_s=10), "http://node", "m")
        clock.now += 10
        await sessions.expire()
        assert sessions.view(opened.session_id).status == "open"
        clock.now += 1
        await sessions.expire()
        assert sessions.view(opened.session_id).status == "aborted"
        assert released == [opened.session_id]
        clock.now += 11
        await sessions.expire()
        with pytest.raises(NotFound):
            sessions.view(opened.session_id)
        assert list((tmp_path / "sessions").iterdir()) == []


async def test_a_session_that_expired_while_the_node_was_down_is_aborted(tmp_path: Path) -> None:
    clock = Clock()
    async with opened_sessions(tmp_path, clock) as sessions:
        opened = await sessions.create(request(ttl_s=10), "http://node", "m")
    clock.now += 11
    async with opened_sessions(tmp_path, clock) as sessions:
        await sessions.expire()
        assert sessions.view(opened.session_id).status == "aborted"


async def test_more_sessions_than_allowed_are_refused_until_one_ends(tmp_path: Path) -> None:
    async with opened_sessions(tmp_path, Clock(), max_open=2) as sessions:
        first = await sessions.create(request(), "http://node", "m")
        await sessions.create(request(), "http://node", "m")
        with pytest.raises(LimitExceeded):
            await sessions.create(request(), "http://node", "m")
        await sessions.abort(first.session_id)
        await sessions.create(request(), "http://node", "m")
        assert sessions.num_open() == 2


async def test_a_claim_outlives_the_node(tmp_path: Path) -> None:
    clock = Clock()
    async with opened_sessions(tmp_path, clock) as sessions:
        asked = request(reward_policy="claimed", allow_no_model_call=True)
        opened = await sessions.create(asked, "http://node", "m")
        await sessions.complete(opened.session_id, ClaimRequest(reward=0.25))
    async with opened_sessions(tmp_path, clock) as sessions:
        assert sessions.view(opened.session_id).status == "completed"
        assert (await sessions.wait(opened.session_id, 60)).status == "completed"
        assert (await sessions.finalize(opened.session_id)).reward == 0.25


async def test_the_journal_lets_go_of_what_has_ended_or_has_no_state(tmp_path: Path) -> None:
    async with opened_sessions(tmp_path, Clock()) as sessions:
        opened = await sessions.create(request(), "http://node", "m")
        other = await sessions.create(request(), "http://node", "m")
        await sessions.finalize(opened.session_id)
    (tmp_path / "sessions" / f"{other.session_id}.json").unlink()
    leased = AttemptOpened("leased", 1, "task", 1)
    journal = Journal.open(tmp_path / "journal")
    await journal.open_attempt(leased)
    await journal.close()
    async with opened_sessions(tmp_path, Clock()):
        pass
    journal = Journal.open(tmp_path / "journal")
    assert journal.unclosed() == [leased]
    await journal.close()


async def test_the_id_of_a_leased_session_is_taken(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    await journal.open_attempt(AttemptOpened("leased", 1, "task", 1))
    await journal.close()
    async with opened_sessions(tmp_path, Clock()) as sessions:
        with pytest.raises(Exception, match="exists already"):
            await sessions.create(request(session_id="leased"), "http://node", "m")


async def test_a_damaged_state_costs_that_session_only(tmp_path: Path) -> None:
    async with opened_sessions(tmp_path, Clock()) as sessions:
        opened = await sessions.create(request(), "http://node", "m")
    (tmp_path / "sessions" / "broken.json").write_bytes(b'{"session_id": "bro')
    async with opened_sessions(tmp_path, Clock()) as sessions:
        assert [view.session_id for view in sessions.views()] == [opened.session_id]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncGenerator[RunningNode]:
    async with scripted_server({"default": {"text": "x"}}) as url, running_node(tmp_path, url) as running:
        yield running


@pytest.mark.parametrize("info", [{"n": 2**70}, {"text": "x" * 70_000}])
async def test_an_agent_cannot_claim_what_a_result_cannot_carry(node: RunningNode, info: dict[str, Any]) -> None:
    opened = await node.client.open_session()
    path = f"/s/{opened.session_id}/complete"
    status, problem = await node.ask("POST", path, {"reward_info": info}, opened.api_key)
    assert (status, problem["code"]) == (400, "invalid_request")
    assert (await node.client.finalize(opened.session_id)).reward_details == {}


async def test_a_node_that_anyone_could_reach_wants_a_control_token(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="GANGLINE_TOKEN"):
        await serve(
            NodeSettings(engines=(NOBODY,), host="0.0.0.0"),
            data_dir=tmp_path,
            node_id="n1",
            server_url=NOBODY,
            control_token=None,
        )


async def test_an_id_is_free_again_when_its_session_could_not_be_opened(tmp_path: Path) -> None:
    async with opened_sessions(tmp_path, Clock()) as sessions:
        (tmp_path / "sessions").rename(tmp_path / "away")
        with pytest.raises(StoreError):
            await sessions.create(request(session_id="mine"), "http://node", "m")
        (tmp_path / "away").rename(tmp_path / "sessions")
        assert (await sessions.create(request(session_id="mine"), "http://node", "m")).session_id == "mine"
