"""Sessions of Harbor's rollouts: opened once, when a node has room, and ended as Harbor ends them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.errors import Conflict, GanglineError, NotFound, ServerUnavailable, SessionOver, TooMany
from gangline.domain.node_views import ExternalView, OpenedSession
from gangline.domain.task import TaskRequest
from gangline.interop.harbor.relay.api import HarborRollout
from gangline.interop.harbor.relay.rollouts import RolloutBook
from gangline.interop.harbor.relay.sessions import RolloutSessions

ABOUT = {"job_id": "j", "name": "hello__a", "state": "running", "task": {"name": "t"}, "agent": {}, "model": {}}
TEMPLATE = TaskRequest.model_validate(
    {"instruction": "", "agent": {"harness": "harbor"}, "capture": {"tier": "observe"}}
)


class FakeHarborApi:
    num_asked = 0

    async def rollout(self, rollout_id: str) -> HarborRollout:
        self.num_asked += 1
        return msgspec.convert({**ABOUT, "id": rollout_id, "retry_ids": [rollout_id]}, HarborRollout)


class FakeServer:
    """refusals: of the next requests to open a session."""

    def __init__(self, *refusals: GanglineError) -> None:
        self.refusals = list(refusals)
        self.wanted: list[dict[str, Any]] = []
        self.ended: list[tuple[str, str]] = []
        self.num_calls = 0
        """Of sessions that another connector opened."""

    async def open_session(self, **wanted: Any) -> OpenedSession:
        await asyncio.sleep(0)
        self.wanted.append(wanted)
        if self.refusals:
            raise self.refusals.pop(0)
        session_id = wanted.get("session_id", "another")
        urls = dict.fromkeys(("openai", "anthropic", "google"), f"http://n/s/{session_id}")
        return OpenedSession(
            session_id=session_id, node_id="n", api_key="k", base_url="http://n", base_urls=urls, model="m"
        )

    async def wait_session(self, session_id: str, timeout_s: float = 60.0) -> ExternalView:
        assert timeout_s == 0
        return ExternalView(
            session_id=session_id,
            task_id="t",
            status="open",
            model="m",
            created_at=0.0,
            num_calls=self.num_calls,
            claim=None,
            metadata={},
        )

    async def finalize(self, session_id: str) -> None:
        self.ended.append(("finalize", session_id))

    async def abort_session(self, session_id: str) -> None:
        self.ended.append(("abort", session_id))
        if session_id == "harbor-gone":
            raise NotFound("no such session")


def sessions(folder: Path, server: FakeServer, waits: list[str | None], **options: Any) -> RolloutSessions:
    client: Any = server
    harbor: Any = FakeHarborApi()
    return RolloutSessions(client, harbor, RolloutBook(folder), TEMPLATE, waits.append, pause_s=0.0, **options)


async def test_calls_at_a_time_open_one_session(tmp_path: Path) -> None:
    server = FakeServer()
    made = sessions(tmp_path, server, [])
    found = await asyncio.gather(*(made.of("r1") for _ in range(5)), made.of("r2"))
    assert {address.session_id for _, address in found} == {"harbor-r1", "harbor-r2"}
    assert len(server.wanted) == 2
    assert server.wanted[0]["task_id"] == server.wanted[1]["task_id"], "both are of one group"
    assert server.wanted[0]["capture"] == {"tier": "observe"}


async def test_a_full_service_is_waited_for_and_said(tmp_path: Path) -> None:
    waits: list[str | None] = []
    made = sessions(tmp_path, FakeServer(TooMany("4096 sessions are open"), ServerUnavailable("no node")), waits)
    _, address = await made.of("r1")
    assert address.session_id == "harbor-r1"
    assert waits == ["4096 sessions are open", "no node", None]


async def test_a_service_that_stays_full_is_an_error_and_later_calls_try_again(tmp_path: Path) -> None:
    server = FakeServer(TooMany("full"), TooMany("full"))
    made = sessions(tmp_path, server, [], patience_s=-1.0)
    for _ in range(2):
        with pytest.raises(TooMany):
            await made.of("r1")
    assert (await made.of("r1"))[1].api_key == "k"


async def test_a_session_whose_key_was_lost_is_replaced(tmp_path: Path) -> None:
    """A connector died between opening it and writing its key down: no call was made with it."""
    server = FakeServer(Conflict("exists already"))
    _, address = await sessions(tmp_path, server, []).of("r1")
    assert address.session_id == "another"
    assert server.ended == [("abort", "harbor-r1")]


async def test_a_session_whose_calls_another_connector_answered_is_left_alone(tmp_path: Path) -> None:
    server = FakeServer(Conflict("exists already"))
    server.num_calls = 1
    with pytest.raises(Conflict, match="with another data folder"):
        await sessions(tmp_path, server, []).of("r1")
    assert (server.ended, len(server.wanted)) == ([], 1)


async def test_a_rollout_that_ended_takes_no_calls_also_after_a_restart(tmp_path: Path) -> None:
    server = FakeServer()
    for rollout_id, keep in (("kept", True), ("superseded", False), ("gone", False)):
        made = sessions(tmp_path, server, [])
        rollout, _ = await made.of(rollout_id)
        await made.end(rollout, keep=keep)
        with pytest.raises(SessionOver):
            await made.of(rollout_id)
        with pytest.raises(SessionOver):
            await sessions(tmp_path, server, []).of(rollout_id)
    assert server.ended == [("finalize", "harbor-kept"), ("abort", "harbor-superseded"), ("abort", "harbor-gone")]


@pytest.mark.parametrize("rollout_id", ["../../etc/passwd", "", "a/b", ".hidden", "x" * 200, "a\0b"])
async def test_ids_that_are_no_ids_reach_no_file(tmp_path: Path, rollout_id: str) -> None:
    with pytest.raises(GanglineError):
        await sessions(tmp_path, FakeServer(), []).of(rollout_id)
    assert list(tmp_path.rglob("*.json")) == []
