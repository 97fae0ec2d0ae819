"""A node's state as `status` and `watch` show it: never `up` with a broken engine, or with heartbeats that are lost."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from gangline.cli.tasks.watch_view import Picture
from gangline.cli.tasks.watching import Watched
from gangline.cli.terminal.views import node_state, status_view
from gangline.cli.terminal.waiting import reasons_to_wait, waits_told
from gangline.domain.errors import DiskFull, ServerUnavailable, StoreError
from gangline.domain.session import Heartbeat
from gangline.domain.views import NodeView, ServiceStatus, SessionView
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
    (unknown,) = refused.shown_in(status()).nodes
    assert (unknown.node_id, unknown.metrics["run"]) == ("n", 2.0), "it joined after the database was full"
    with refused.noted(beat):
        pass
    assert refused.shown_in(stored) is stored


def test_a_refused_heartbeat_is_kept_while_its_node_is_heard_and_no_longer() -> None:
    now = 0.0
    refused = RefusedHeartbeats(lambda: now)
    for number in range(1000):  # each pod has a new name, and none comes back
        now = 1.0 * number
        told: dict[str, Any] = {"url": "", "sessions": {}, "capacity": 1}
        with pytest.raises(StoreError), refused.noted(Heartbeat(node_id=f"n{number}", **told)):
            raise StoreError("the database failed")
        shown = refused.shown_in(status()).nodes
        assert [one.node_id for one in shown] == [f"n{one}" for one in range(max(0, number - 30), number + 1)]
    now += 31.0
    stored = status()
    assert refused.shown_in(stored) is stored


QUEUED = {"queued": 4}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (status(), []),
        (status(sessions={"ended": 4}), []),
        (status(sessions=QUEUED, nodes=(node(),)), []),
        (status(sessions=QUEUED), ["No node has joined: start one with `gangline node`. Queued sessions: 4."]),
        (status(sessions=QUEUED, tenant="vision"), []),
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


def test_a_tenant_is_shown_no_nodes_rather_than_told_to_start_one() -> None:
    for found, is_told in ((status(), True), (status(tenant="vision"), False)):
        watched = Watched()
        watched.status = found
        for shown in (drawn(status_view(found, [])), drawn(Picture(watched))):
            assert "tasks: none" in shown
            assert ("No node has joined" in shown) is is_told


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


SPEED = {"first_token_s": 8.0, "waits_s": 0.0, "reply_s": 9.0, "tokens_per_s": 2.5, "num_queued": 3}


def drawn(found: RenderableType) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(found)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_status_shows_engines_disk_and_the_largest_sandboxes() -> None:
    cache = {"num_tokens": 12000, "usable": 1.0, "num_held_tokens": 9000, "num_places": 3, "hit_rate": 0.81}
    slow = {**HEALTHY, "speed": SPEED, "num_calls": 4, "num_sessions": 5, "cache": cache}
    frozen = {**HEALTHY, "url": "http://b:1", "speed": {**SPEED, "first_token_s": None, "waits_s": 31.0}}
    metrics = {"sandbox_memory_bytes": 3.0 * 2**30, "memory_bytes": 8.0 * 2**30, "disk_free_bytes": 2.0**30}
    metrics |= {"takes_bytes_leak.0": 1.5 * 2**30, "takes_cpus_leak.0": 0.25, "orphans": 2.0}
    shown = drawn(status_view(status(nodes=(node(backends=(slow, frozen), metrics=metrics),)), []))
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    for text in ("3.0 GiB of 8.0 GiB", "1.0 GiB", "orphaned folders of sandboxes: 2 (gangline doctor)"):
        assert text in lines["n"]
    for text in ("healthy", "8 s", "2.5", "4 (3 queued)", "5; 9000 of 12000 tokens held by 3 sessions"):
        assert text in lines["http://a:1"]
    assert "slow: a call has waited 31 s" in lines["http://b:1"]
    assert lines["leak.0"].split()[1:] == ["n", "1.5", "GiB", "0.25"]


def waiting(**changes: Any) -> SessionView:
    fields: dict[str, Any] = {"session_id": "t.0", "task_id": "t", "sample_index": 0, "state": "queued", "attempt": 2}
    return SessionView(**fields | {"max_attempts": 3, "fence": 0, "created_at": 10.0, **changes})


@pytest.mark.parametrize(
    ("oldest", "nodes", "why"),
    [
        ({"unplaced": "no node has docker"}, (node(),), "no node has docker"),
        ({"ready_at": 57.0}, (node(),), "it rests for 7 s after a fault"),
        ({}, (), "no node has joined"),
        ({}, (node(age_s=60.0),), "no node takes sessions (n: silent)"),
        ({}, (node(num_sessions=1),), "the nodes have 1 of at most 1 sessions"),
    ],
)
def test_status_says_what_waits_longest_and_why(oldest: dict[str, Any], nodes: Any, why: str) -> None:
    found = status(at=50.0, nodes=nodes, oldest_queued=waiting(**oldest))
    assert f"waits longest: t.0 has waited 40 s: {why}" in drawn(status_view(found, []))
