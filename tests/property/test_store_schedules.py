"""Whatever nodes, clocks and messages do: each session ends once, and no lease is held twice.

The pure decisions, and the SQL store over SQLite and PostgreSQL, are driven through the same random schedules of
leases, late and doubled reports, lost heartbeats, given-back sessions, cancellations and jumps of the clock.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gangline.domain.errors import LeaseLost
from gangline.domain.session import Lease
from gangline.store.sql.leasing import Standing, cancel, expire, holds, lease, release, renew, report
from gangline.store.sql.tasks import TaskStore
from support.service.running import beat, engine_down, request, result
from support.store.postgres import Cluster

LEASE_S = 30.0
NODES = st.sampled_from(["n1", "n2"])


class DecisionSchedules(RuleBasedStateMachine):
    """One session, and every claim that was ever handed out on it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.claims: list[tuple[str, int]] = []
        self.accepted: set[int] = set()
        self.num_ends = 0

    @initialize(max_attempts=st.integers(1, 4))
    def queue(self, max_attempts: int) -> None:
        self.standing = Standing(max_attempts=max_attempts)

    def follow(self, after: Standing | None) -> None:
        if after is None:
            return
        if after.state == "ended" and self.standing.state != "ended":
            self.num_ends += 1
        if self.standing.state == "ended":
            assert after == self.standing
        assert after.fence >= self.standing.fence
        assert after.attempt >= self.standing.attempt
        self.standing = after

    @precondition(lambda self: self.standing.state == "queued")
    @rule(node_id=NODES)
    def claim(self, node_id: str) -> None:
        self.follow(lease(self.standing, node_id=node_id, now=self.now, lease_s=LEASE_S))
        self.claims.append((node_id, self.standing.fence))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), broken=st.booleans())
    def report_any_claim(self, data: st.DataObject, broken: bool) -> None:
        _, fence = data.draw(st.sampled_from(self.claims))
        live = holds(self.standing, fence=fence)
        told = engine_down() if broken else {"outcome": "completed", "failure": None}
        try:
            after = report(self.standing, fence=fence, outcome=told["outcome"], failure=told["failure"])
        except LeaseLost:
            assert not live
            assert fence not in self.accepted or self.standing.reported_fence != fence
        else:
            assert live or fence in self.accepted
            self.accepted.add(fence)
            self.follow(after)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def renew_any_claim(self, data: st.DataObject) -> None:
        node_id, fence = data.draw(st.sampled_from(self.claims))
        after = renew(self.standing, node_id=node_id, fence=fence, stage="run", now=self.now, lease_s=LEASE_S)
        assert (after is not None) == holds(self.standing, fence=fence)
        self.follow(after)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def release_any_claim(self, data: st.DataObject) -> None:
        node_id, fence = data.draw(st.sampled_from(self.claims))
        attempt = self.standing.attempt
        try:
            self.follow(release(self.standing, node_id=node_id, fence=fence))
        except LeaseLost:
            return
        assert self.standing.attempt == attempt

    @rule(seconds=st.sampled_from([0.0, 1.0, 29.0, 31.0, -40.0, 1e6]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        self.follow(expire(self.standing, now=self.now))

    @rule()
    def cancel(self) -> None:
        self.follow(cancel(self.standing))

    @invariant()
    def hold(self) -> None:
        if not hasattr(self, "standing"):
            return
        here = self.standing
        assert self.num_ends == (here.state == "ended")
        assert here.attempt <= here.max_attempts
        assert (here.outcome is not None) == (here.state == "ended")
        assert (here.expires_at is not None) == (here.state == "leased")
        assert sum(holds(here, fence=fence) for _, fence in self.claims) == (here.state == "leased")
        assert len({fence for _, fence in self.claims}) == len(self.claims)


class StoreSchedules(RuleBasedStateMachine):
    """Tasks of a real SQLite store, closed and opened again at random."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.target = self.new_database()
        self.now = 1000.0
        self.store = self.opened()
        self.claims: list[tuple[str, Lease]] = []
        self.kept: Counter[str] = Counter()
        self.submitted: list[str] = []

    def new_database(self) -> str:
        return str(Path(self.folder.name) / "gangline.db")

    def opened(self) -> TaskStore:
        return TaskStore(self.target, clock=lambda: self.now, lease_s=LEASE_S)

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(
        num_samples=st.integers(1, 3),
        max_attempts=st.integers(1, 3),
        submitter=st.sampled_from(["a", "b", None]),
        priority=st.integers(0, 1),
    )
    def submit(self, num_samples: int, max_attempts: int, submitter: str | None, priority: int) -> None:
        task_id = f"t{len(self.submitted)}"
        task = request(
            task_id,
            num_samples=num_samples,
            max_attempts=max_attempts,
            submitter=submitter,
            priority=priority,
            callback_url="http://trainer.test/",
        )
        assert [self.store.submit([task])[0].created for _ in range(2)] == [True, False]
        self.submitted.append(task_id)

    @rule(node_id=NODES, max_sessions=st.integers(1, 4))
    def lease(self, node_id: str, max_sessions: int) -> None:
        leases = self.store.lease(node_id, "http://node.test", max_sessions)
        assert len({claim.session_id for claim in leases}) == len(leases) <= max_sessions
        priorities = [claim.task["priority"] for claim in leases]
        assert priorities == sorted(priorities, reverse=True)
        status = self.store.status()
        assert len(leases) == max_sessions or status.sessions.get("queued", 0) == status.num_waiting
        self.claims.extend((node_id, claim) for claim in leases)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), broken=st.booleans())
    def report_any_claim(self, data: st.DataObject, broken: bool) -> None:
        node_id, claim = data.draw(st.sampled_from(self.claims))
        told = result(claim, node_id, **(engine_down() if broken else {}))
        key = f"{claim.session_id}/{claim.fence}"
        try:
            self.store.report(told, lambda: self.kept.update([key]))
        except LeaseLost:
            return
        assert self.kept[key] == 1

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        node_id, claim = data.draw(st.sampled_from(self.claims))
        reply = self.store.heartbeat(beat([claim], node_id))
        assert len(reply.renewed) + len(reply.lost) <= 1

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        node_id, claim = data.draw(st.sampled_from(self.claims))
        try:
            self.store.release(node_id, claim.session_id, claim.fence)
        except LeaseLost:
            return

    @rule(seconds=st.sampled_from([0.0, 29.0, 31.0, -40.0]))
    def pass_time_and_sweep(self, seconds: float) -> None:
        self.now += seconds
        self.store.sweep()

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.store.cancel_task(data.draw(st.sampled_from(self.submitted)))

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.opened()

    @invariant()
    def each_ends_once_and_is_told_once(self) -> None:
        events = self.store.events(limit=100_000)
        assert [event.seq for event in events] == sorted({event.seq for event in events})
        ends = Counter(event.session_id for event in events if event.kind == "session.ended")
        task_ends = Counter(event.task_id for event in events if event.kind == "task.ended")
        callbacks = self.store.status().callbacks.get("pending", 0)
        for task in (self.store.task(task_id) for task_id in self.submitted):
            for session in task.sessions:
                assert ends[session.session_id] == (session.state == "ended")
            num_open = sum(session.state != "ended" for session in task.sessions)
            assert task.num_open == num_open
            assert task_ends[task.task_id] == (num_open == 0) == task.ended
        assert callbacks == sum(task_ends.values())


DecisionSchedules.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
StoreSchedules.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

TestDecisionSchedules = DecisionSchedules.TestCase
TestStoreSchedules = StoreSchedules.TestCase


def test_the_same_schedules_hold_over_postgresql(postgres: Cluster):
    class PostgresSchedules(StoreSchedules):
        def new_database(self) -> str:
            return postgres.new_database()

    run_state_machine_as_test(
        PostgresSchedules,
        settings=settings(
            max_examples=8, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
