"""A node's state as `status` and `watch` show it: never `up` with a broken engine, or with heartbeats that are lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gangline.cli.terminal.views import node_state
from gangline.cli.terminal.waiting import reasons_to_wait, waits_told
from gangline.domain.errors import DiskFull, ServerUnavailable, StoreError
from gangline.domain.session import Heartbeat
from gangline.domain.views import NodeView, ServiceStatus
from gangline.server.service.core import RefusedHeartbeats

HEALTHY = {"url": "http://a:1", "state": "healthy", "num_failures": 0, "error": None}


def node(**changes: Any) -> NodeView:
    fields: dict[str, Any] = {"node_id": "n", "url": "", "capacity": 1, "draining": False, "num_sessions": 0}
    fields |= {"first_seen_at": 0.0, "last_seen_at": 0.0, "age_s": 0.0}
    return NodeView(**fields | changes)


def status(**changes: Any) -> ServiceStatus:
    fields: dict[str, Any] = {"version": "", "at": 0.0, "tasks": {}, "sessions": {}, "stages": {}, "callbacks": {}}
    fields |= {"oldest_queued_s": None, "nodes": ()}
    return ServiceStatus(**fields | changes)


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({}, "up"),
        ({"num_failures": 1}, "engine http://a:1 does not answer"),
        ({"state": "unhealthy", "error": "it timed out"}, "engine http://a:1 is unhealthy (it timed out)"),
        ({"state": "unhealthy", "error": "\x1b[2J\nx"}, "engine http://a:1 is unhealthy (?[2J x)"),
        ({"state": "draining"}, "up"),
    ],
)
def test_an_engine_that_does_not_answer_is_in_the_nodes_state(engine: dict[str, Any], told: str) -> None:
    others = {**HEALTHY, "url": "http://b:1"}
    assert node_state(node(backends=({**HEALTHY, **engine}, others))) == told
    assert node_state(node(backends=({},))) == "up"  # of another implementation, which says nothing


def test_a_heartbeat_that_the_full_disk_refused_is_shown_all_the_same() -> None:
    now = 100.0
    refused = RefusedHeartbeats(lambda: now)
    stored = status(nodes=(node(age_s=50.0),))
    assert refused.shown_in(stored) is stored
    broken = {**HEALTHY, "state": "unhealthy"}
    told: dict[str, Any] = {"node_id": "n", "url": "", "sessions": {}, "capacity": 1, "draining": False}
    beat = Heartbeat(**told, backends=(broken,), metrics={"run": 2.0})
    with pytest.raises(StoreError), refused.noted(beat):
        raise DiskFull("the disk that holds the database is full")
    now = 103.0
    (shown,) = refused.shown_in(stored).nodes
    assert (shown.age_s, shown.metrics["run"]) == (3.0, 2.0)
    assert node_state(shown) == (
        "the server's disk is full: its heartbeats are refused; engine http://a:1 is unhealthy"
    )
    with pytest.raises(StoreError), refused.noted(beat):
        raise StoreError("the database failed")
    (shown,) = refused.shown_in(stored).nodes
    assert node_state(shown).startswith("its heartbeats fail: store_error; ")
    with refused.noted(beat):
        pass
    assert refused.shown_in(stored) is stored


QUEUED = {"queued": 4}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (status(), []),
        (status(sessions={"ended": 4}), []),
        (status(sessions=QUEUED, nodes=(node(),)), []),
        (status(sessions=QUEUED), ["No node has joined: start one with `gangline node`. Queued sessions: 4."]),
        (
            status(sessions=QUEUED, nodes=(node(),), unplaced={"no node has docker": 4}),
            ["No node can run queued sessions (4): no node has docker."],
        ),
        (status(sessions=QUEUED, nodes=(node(age_s=60.0),)), ["Node n: silent."]),
        (status(sessions={"leased": 1}, nodes=(node(draining=True),)), ["Node n: draining."]),
        (
            status(sessions={"leased": 1}, nodes=(node(backends=({**HEALTHY, "num_failures": 2},)),)),
            ["Node n: engine http://a:1 does not answer."],
        ),
    ],
)
def test_whoever_waits_hears_why(found: ServiceStatus, told: list[str]) -> None:
    assert list(reasons_to_wait(found)) == told


async def test_each_reason_is_said_once_and_again_when_it_comes_back() -> None:
    answers = iter([status(sessions=QUEUED)] * 3 + [status(sessions=QUEUED, nodes=(node(),)), status(sessions=QUEUED)])
    is_over = asyncio.Event()
    said: list[str] = []

    class Service:
        async def status(self) -> ServiceStatus:
            found = next(answers, None)
            if found is None:
                is_over.set()
                raise ServerUnavailable("nobody answers")
            return found

    async with waits_told(Service(), said.append, look_s=0.0):
        await is_over.wait()
    assert [line.split(":")[0] for line in said[:2]] == ["No node has joined"] * 2
