"""The same store over SQLite and PostgreSQL: turns and priorities, rests after faults, pages, and what is forgotten."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from gangline.domain.errors import Conflict, InvalidRequest, LeaseLost, NodeIdTaken, NotFound, StoreError
from gangline.domain.session import Heartbeat, Lease
from gangline.domain.task import TaskRequest
from gangline.domain.tokens import logprobs, token_ids
from gangline.domain.trajectory import Trace, Trajectory
from gangline.store.sql import schema
from gangline.store.sql.outbox import Outbox
from gangline.store.sql.reader import TaskReader
from gangline.store.sql.retention import Keep
from gangline.store.sql.tasks import TaskStore
from support.page.sessions import working_session
from support.service.running import NODE_URL, beat, engine_down, request, result
from support.store.postgres import Cluster, running_cluster

Opened = Callable[..., TaskStore]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(any_database: str, clock: Clock):
    with TaskStore(any_database, clock=clock, lease_s=30.0, callback_expiry_s=60.0) as opened:
        yield opened


def kept() -> None:
    return None


def of(submitter: str | None, name: str, num_samples: int, priority: int = 0) -> TaskRequest:
    return request(name, num_samples=num_samples, submitter=submitter, priority=priority)


def leased(store: TaskStore, count: int) -> list[str]:
    return [lease.session_id for lease in store.lease("n1", NODE_URL, count)]


def end_task(store: TaskStore, name: str, num_bytes: int = 0, **changes: object) -> None:
    store.submit([request(name, num_samples=1, **changes)])
    (lease,) = store.lease("n1", NODE_URL, 1)
    store.report(result(lease), kept, num_bytes)


def test_a_task_lives_and_ends_on_every_database(store: TaskStore, clock: Clock):
    store.submit([request(callback_url="http://trainer.test/", callback_secret="KEY", callback_expiry_seconds=5)])
    first, second = store.lease("n1", NODE_URL, 8)
    assert store.heartbeat(beat([first, second])).renewed == ("t.0", "t.1")
    store.release("n1", "t.1", second.fence)
    clock.now += 31.0
    assert (store.sweep(), store.session("t.0").attempt) == (1, 2)
    for lease in store.lease("n2", NODE_URL, 8):
        assert store.report(result(lease, "n2"), kept).state == "ended"
    task = store.task("t")
    assert (task.status, task.rewards, task.num_open) == ("ended", (1.0, 1.0), 0)
    (callback,) = Outbox(store.database).due(clock.now, 10)
    assert (callback.key, callback.secret, callback.expires_at) == ("t:ended", "KEY", clock.now + 5)
    assert [event.seq for event in store.events()] == list(range(1, len(store.events()) + 1))
    status = store.status()
    assert (status.tasks, status.sessions, [node.node_id for node in status.nodes]) == (
        {"ended": 1},
        {"ended": 2},
        ["n1", "n2"],
    )


def usable(lease: Lease, trained: int = 1) -> dict[str, Any]:
    trace = Trace(
        trace_id=f"{lease.session_id}.0",
        session_id=lease.session_id,
        prompt_ids=token_ids([1]),
        response_ids=token_ids([2]),
        loss_mask=token_ids([trained]).astype("int8"),
        response_logprobs=logprobs([-0.5]),
        response_versions=token_ids([0]),
        spans=(),
        prompt_messages=(),
        response_messages=(),
        finish_reason="stop",
        certificates=(),
    )
    whole = Trajectory(
        session_id=lease.session_id, task_id=lease.task_id, builder="b", traces=(trace,), num_completions=1
    )
    return {"trajectory": whole}


def test_a_task_with_enough_usable_sessions_cancels_the_others(store: TaskStore):
    store.submit([request(num_samples=8, enough_sessions=2, callback_url="http://trainer.test/")])
    leases = store.lease("n1", NODE_URL, 6)
    store.report(result(leases[0]), kept)  # without tokens
    store.report(result(leases[1], **usable(leases[1], trained=0)), kept)
    store.report(result(leases[2], **usable(leases[2]), outcome="agent_timeout", reward=0.0), kept)
    store.report(result(leases[3], **usable(leases[3]), outcome="turn_limit"), kept)
    assert (store.task("t").status, store.task("t").num_open) == ("running", 4)
    assert store.report(result(leases[4], **usable(leases[4])), kept).state == "ended"
    task = store.task("t")
    assert (task.status, task.num_open) == ("ended", 0)
    assert [one.outcome for one in task.sessions] == [
        *("completed", "completed", "agent_timeout", "turn_limit", "completed"), *["cancelled"] * 3,
    ]  # fmt: skip
    assert store.heartbeat(beat([leases[5]])).renewed == ()
    with pytest.raises(LeaseLost):
        store.report(result(leases[5], **usable(leases[5])), kept)
    assert len(Outbox(store.database).due(store.task("t").ended_at or 0.0, 10)) == 1


def test_a_task_that_measures_waits_for_all_of_its_sessions(store: TaskStore):
    store.submit([request(num_samples=2, enough_sessions=1, held_out=True)])
    first, second = store.lease("n1", NODE_URL, 2)
    store.report(result(first, **usable(first)), kept)
    assert store.task("t").num_open == 1
    store.report(result(second, **usable(second)), kept)
    assert [one.outcome for one in store.task("t").sessions] == ["completed"] * 2


def test_sessions_that_are_enough_may_be_reported_at_once(any_database: str):
    """Each waits for the task's row, and none for another one's session."""
    with ExitStack() as opened:
        stores = [opened.enter_context(TaskStore(any_database)) for _ in range(8)]
        stores[0].submit([request(f"t{number}", num_samples=8, enough_sessions=3) for number in range(5)])
        for number in range(5):
            leases = stores[0].lease("n1", NODE_URL, 8, task_ids=[f"t{number}"])
            assert len(leases) == 8

            def reported(store: TaskStore, lease: Lease) -> bool:
                try:
                    return store.report(result(lease, **usable(lease)), kept).accepted
                except LeaseLost:
                    return False

            with ThreadPoolExecutor(8) as threads:
                accepted = list(threads.map(reported, stores, leases))
            outcomes = [one.outcome for one in stores[0].task(f"t{number}").sessions]
            assert outcomes == ["completed" if one else "cancelled" for one in accepted]
            assert sum(accepted) >= 3
            assert stores[0].task(f"t{number}").status == "ended"


def test_a_list_of_tasks_shows_outcomes_and_mean_rewards(store: TaskStore):
    store.submit([request("some", num_samples=3), request("none", num_samples=1)])
    for reward in (1.0, 0.0):
        (lease,) = store.lease("n1", NODE_URL, 1)
        assert lease.session_id.startswith("some")
        store.report(msgspec.structs.replace(result(lease), reward=reward), kept, 0)
    store.cancel_task("none")
    none, some = store.tasks().tasks
    assert (some.outcomes, some.mean_reward) == ({"completed": 2}, 0.5)
    assert (none.outcomes, none.mean_reward) == ({"cancelled": 1}, None)
    whole = store.task("some")
    assert (whole.outcomes, whole.mean_reward) == (some.outcomes, some.mean_reward)


def test_a_batch_is_accepted_once_however_often_it_is_sent(store: TaskStore):
    batch = [request(f"t{index}", num_samples=2) for index in range(1200)]
    assert all(answer.created for answer in store.submit(batch))
    assert not any(answer.created for answer in store.submit(batch))
    again = store.submit([batch[0], request("new"), request("new")])
    assert [answer.created for answer in again] == [False, True, False]
    with pytest.raises(Conflict):
        store.submit([request("newer"), request("new", instruction="other")])
    with pytest.raises(NotFound):
        store.task("newer")
    assert store.status().sessions == {"queued": 2402}


def test_submitters_are_served_in_turn_whoever_came_first(store: TaskStore):
    store.submit([of("a", "a1", 6)])
    assert leased(store, 2) == ["a1.0", "a1.1"]
    store.submit([of("b", "b1", 2), of(None, "c1", 1)])
    assert leased(store, 6) == ["a1.2", "b1.0", "c1.0", "a1.3", "b1.1", "a1.4"]


def test_who_was_idle_has_saved_nothing_up_and_who_cancelled_owes_nothing(store: TaskStore):
    store.submit([of("a", "a1", 3)])
    assert len(leased(store, 3)) == 3
    store.submit([of("b", "b1", 3), of("a", "a2", 3)])
    assert leased(store, 4) == ["b1.0", "a2.0", "b1.1", "a2.1"]
    store.submit([of("a", "a3", 500)])
    store.cancel_task("a3")
    store.submit([of("a", "a4", 1)])
    assert leased(store, 9) == ["b1.2", "a2.2", "a4.0"]


def test_a_higher_priority_goes_before_all_others_and_shares_its_own_turns(store: TaskStore):
    store.submit([of("a", "a1", 2), of("a", "high", 2, priority=5), of("b", "b1", 1), of("b", "low", 1, priority=-1)])
    store.submit([of("b", "high2", 1, priority=5)])
    assert leased(store, 9) == ["high.0", "high2.0", "high.1", "a1.0", "b1.0", "a1.1", "low.0"]


def test_a_session_rests_longer_after_each_fault_of_ours(store: TaskStore, clock: Clock):
    store.submit([request(num_samples=1, max_attempts=4), request("other", num_samples=1)])
    (lease,) = store.lease("n1", NODE_URL, 1)
    for pause_s in (1.0, 4.0, 16.0):
        store.report(result(lease, **engine_down()), kept)
        assert store.session("t.0").ready_at == clock.now + pause_s
        assert store.status().num_waiting == 1
        clock.now += pause_s - 0.5
        assert "t.0" not in leased(store, 9)
        clock.now += 0.5
        assert store.admit_ready() == 1
        (lease,) = store.lease("n1", NODE_URL, 9)
        assert (lease.session_id, store.session("t.0").ready_at) == ("t.0", None)
    assert store.report(result(lease, **engine_down()), kept).state == "ended"


def test_a_resting_session_can_be_cancelled(store: TaskStore, clock: Clock):
    store.submit([request(num_samples=1)])
    (lease,) = store.lease("n1", NODE_URL, 1)
    store.report(result(lease, **engine_down()), kept)
    assert store.cancel_session("t.0").outcome == "cancelled"
    clock.now += 100.0
    assert (store.admit_ready(), leased(store, 9)) == (0, [])


def test_pages_of_sessions_show_each_once_and_only_those_asked_for(store: TaskStore):
    store.submit([of("a", "a1", 3), of("b", "b1", 2)])
    (lease,) = store.lease("n1", NODE_URL, 1)
    store.report(result(lease), kept)
    first = store.sessions(limit=3)
    rest = store.sessions(limit=3, before=first.next)
    assert [s.session_id for s in (*first.sessions, *rest.sessions)] == ["b1.1", "b1.0", "a1.2", "a1.1", "a1.0"]
    assert rest.next is None

    def found(**wanted: str) -> list[str]:
        return [session.session_id for session in store.sessions(**wanted).sessions]  # type: ignore[arg-type]

    assert found(state="ended") == found(outcome="completed") == found(node_id="n1") == ["a1.0"]
    assert found(submitter="b", state="queued") == found(task_id="b1") == ["b1.1", "b1.0"]
    assert found(task_id="a1", state="ended") == ["a1.0"]
    with pytest.raises(NotFound, match="no task 'c1'"):
        found(task_id="c1")
    assert [task.task_id for task in store.tasks(submitter="a").tasks] == ["a1"]


def test_a_list_of_tasks_says_what_ran_and_what_it_took(store: TaskStore, clock: Clock):
    names = ["mine", "demo-ab12cd-000007", "demo-ab12cd-evaluation-000000-v000000-0003"]
    store.submit([request(name, num_samples=2) for name in names])
    leases = store.lease("n1", NODE_URL, 2)
    clock.now += 5.0
    said = working_session("mine.0", reward=1.0)
    store.report(result(leases[0], completions=said.completions), kept)
    (task,) = store.tasks(run="").tasks
    num_sampled = sum(len(call.sampled_ids) for call in said.completions)
    assert (task.harness, task.model, task.num_sampled_tokens) == ("shell", said.completions[-1].model, num_sampled)
    assert (task.mean_session_s, task.mean_reward) == (5.0, 1.0)
    assert store.session("mine.0").num_sampled_tokens == num_sampled
    assert store.session("mine.1").num_sampled_tokens is None
    assert [one.task_id for one in store.tasks(run="demo-ab12cd").tasks] == [names[1]]
    assert [one.task_id for one in store.tasks(run="demo-ab12cd-evaluation").tasks] == [names[2]]
    assert [one.run for one in store.tasks().tasks] == ["demo-ab12cd-evaluation", "demo-ab12cd", ""]
    cancelled = store.cancel_task("mine")
    assert (cancelled.mean_session_s, cancelled.num_sampled_tokens) == (5.0, num_sampled)


def test_what_ended_long_ago_is_forgotten_with_all_that_belongs_to_it(store: TaskStore, clock: Clock):
    end_task(store, "old")
    clock.now += 100.0
    end_task(store, "young")
    store.submit([request("open")])
    keep = Keep(for_s=50.0)
    assert store.forgettable(keep, 10) == ["old"]
    assert store.forget(["old", "open", "unknown"]) == 1
    assert store.forgettable(keep, 10) == []
    with pytest.raises(NotFound):
        store.task("old")
    assert {event.task_id for event in store.events()} == {None, "young", "open"}
    assert store.forget_events(clock.now) == 1  # node.joined
    assert {event.task_id for event in store.events()} == {"young", "open"}
    last = store.last_event()
    store.submit([request("next")])
    assert store.events(after=last)[0].seq == last + 1


@pytest.mark.parametrize("holds", [False, True])
def test_a_node_that_leaves_is_listed_no_longer_unless_it_holds_a_session(store: TaskStore, holds: bool):
    store.submit([request(num_samples=1)])
    leases = store.lease("n1", NODE_URL, 1) if holds else []
    store.heartbeat(beat([], "n2"))
    last = msgspec.structs.replace(beat(leases), draining=True, leaving=True)
    assert store.heartbeat(last).renewed == tuple(lease.session_id for lease in leases)
    assert [node.node_id for node in store.status().nodes] == (["n1", "n2"] if holds else ["n2"])
    told = [(event.kind, event.data["node"]) for event in store.events() if event.kind == "node.left"]
    assert told == ([] if holds else [("node.left", "n1")])
    store.heartbeat(beat(leases))
    assert [node.draining for node in store.status().nodes] == [False, False], "it may come back"


def test_the_oldest_results_go_first_when_there_are_too_many_bytes(store: TaskStore, clock: Clock):
    for name in ("t1", "t2", "t3"):
        end_task(store, name, num_bytes=100)
        clock.now += 1.0
    assert store.status().result_bytes == 300
    assert store.forgettable(Keep(max_bytes=300), 10) == []
    assert store.forgettable(Keep(max_bytes=150), 10) == ["t1", "t2"]
    assert store.forgettable(Keep(), 10) == []


def test_what_is_not_delivered_is_never_forgotten(store: TaskStore, clock: Clock):
    end_task(store, "told", num_bytes=100, callback_url="http://trainer.test/")
    end_task(store, "untold", num_bytes=100, callback_url="http://trainer.test/")
    outbox = Outbox(store.database)
    (callback, _) = outbox.due(clock.now, 10)
    outbox.delivered(callback, now=clock.now)
    clock.now += 1e6
    assert store.forgettable(Keep(for_s=1.0, max_bytes=0), 10) == ["told"]
    assert store.forget(["told", "untold"]) == 1
    assert store.task("untold").ended


def test_a_callback_that_one_server_took_is_left_alone_by_the_others_for_a_while(store: TaskStore, clock: Clock):
    end_task(store, "t", callback_url="http://trainer.test/")
    mine, others = Outbox(store.database), Outbox(store.database)
    (taken,) = mine.take(clock.now, 10, held_s=20.0)
    assert others.take(clock.now + 19.0, 10, held_s=20.0) == []
    assert others.take(clock.now + 20.0, 10, held_s=20.0)[0].key == taken.key
    mine.delivered(taken, now=clock.now)
    others.failed(taken, now=clock.now, next_at=clock.now, error="too late")
    assert mine.all_states() == [("t:ended", "delivered")]


@contextmanager
def heard_by_the_database() -> Generator[list[tuple[str, object]]]:
    """Statements and their parameters."""
    asked: list[tuple[str, object]] = []

    @sa.event.listens_for(sa.Engine, "before_cursor_execute")
    def remember(_conn: object, _cursor: object, statement: str, parameters: object, *_more: object) -> None:
        asked.append((statement, parameters))

    try:
        yield asked
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", remember)


def test_a_heartbeat_that_tells_nothing_new_takes_three_statements(store: TaskStore, clock: Clock):
    store.submit([request(num_samples=8)])
    leases = store.lease("n1", NODE_URL, 8)
    store.heartbeat(beat(leases))
    clock.now += 29.0
    with heard_by_the_database() as asked:
        assert len(store.heartbeat(beat(leases)).renewed) == 8
    clock.now += 29.0
    assert store.sweep() == 0
    assert num_statements(asked) == 3


def test_leases_and_reports_take_few_statements(store: TaskStore, clock: Clock):
    store.submit([request(num_samples=8)])
    store.heartbeat(beat([]))
    leases = store.lease("n1", NODE_URL, 4)
    with heard_by_the_database() as asked:
        leases += store.lease("n1", NODE_URL, 4)
        assert num_statements(asked) == 6  # the node, the queue's head, its sessions, the turn, their task, events
        store.report(result(leases[0]), kept)
        assert num_statements(asked) - 6 == 4  # the session, its task, what its tenant used, the event
    with heard_by_the_database() as asked:
        store.submit([request("many", num_samples=300), request("more", num_samples=300)])
    assert num_statements(asked) < 12


def num_statements(asked: list[tuple[str, object]]) -> int:
    return len([statement for statement, _ in asked if not statement.startswith("BEGIN")])


def test_events_have_the_order_in_which_they_came_about(store: TaskStore):
    store.submit([request(num_samples=40)])
    leases = store.lease("n1", NODE_URL, 40)
    told = [event.session_id for event in store.events() if event.kind == "session.leased"]
    assert told == [lease.session_id for lease in leases]
    assert [event.seq for event in store.events()] == sorted(event.seq for event in store.events())


def test_how_many_sessions_are_enough_is_the_tasks_own_where_an_id_is_used_again(store: TaskStore, clock: Clock):
    for enough, ended in ((1, 3), (None, 1)):
        store.submit([request(num_samples=3, enough_sessions=enough)])
        leases = store.lease("n1", NODE_URL, 3)
        store.report(result(leases[0], **usable(leases[0])), kept)
        assert store.task("t").states.get("ended") == ended
        store.cancel_task("t")
        clock.now += 100.0
        assert store.forget(["t"]) == 1


@pytest.mark.parametrize("wrong", [{"task_id": "other"}, {"attempt": 2}])
def test_a_report_of_another_task_or_attempt_changes_nothing(store: TaskStore, wrong: dict[str, Any]):
    store.submit([request(num_samples=1), request("other", num_samples=1)])
    (lease, _) = store.lease("n1", NODE_URL, 2)
    asked_to_keep: list[None] = []
    with pytest.raises(InvalidRequest, match="was leased for task"):
        store.report(msgspec.structs.replace(result(lease), **wrong), lambda: asked_to_keep.append(None))
    assert (store.session(lease.session_id).state, store.task("other").num_open, asked_to_keep) == ("leased", 1, [])


def test_a_heartbeat_of_many_sessions_renews_those_that_it_names_and_puts_the_others_back(
    store: TaskStore, clock: Clock
):
    store.submit([request(num_samples=1_200)])
    leases = store.lease("n1", NODE_URL, 1_200)
    clock.now += 11.0
    reply = store.heartbeat(beat(leases[:1_100]))
    assert len(reply.renewed) == 1_100
    assert reply.lost == ()
    assert len(store.lease("n2", NODE_URL, 1_200)) == 100
    clock.now += 29.0
    assert len(store.heartbeat(beat(leases[:1_100])).renewed) == 1_100


def test_a_database_that_was_restarted_is_found_again(tmp_path: Path):
    with running_cluster() as cluster, TaskStore(cluster.new_database()) as store:
        store.submit([request(num_samples=2)])
        cluster.stop()
        cluster.start()
        # A connection that was in use a moment ago is not tried first; who fails by that is the last one.
        with suppress(StoreError):
            store.lease("n1", NODE_URL, 1)
        assert len(store.lease("n2", NODE_URL, 1)) == 1
        cluster.stop()
        cluster.start()
        time.sleep(1.1)
        assert store.task("t").num_samples == 2


def test_leasing_looks_into_indexes_however_much_is_queued(store: TaskStore, any_database: str):
    store.submit([of(f"s{index % 7}", f"t{index}", 1000) for index in range(20)])
    with heard_by_the_database() as asked:
        leases = store.lease("n1", NODE_URL, 8)
        store.submit([of("s3", "next", 1)])
        store.heartbeat(beat(leases))
        store.sweep()
    kind = "EXPLAIN " if store.database.shared else "EXPLAIN QUERY PLAN "
    plans: list[str] = []
    with store.database.writing() as conn:
        if store.database.shared:
            conn.exec_driver_sql("ANALYZE")
        for statement, parameters in asked:
            if "FROM sessions" in statement:
                rows = conn.exec_driver_sql(kind + statement, parameters)  # type: ignore[arg-type]
                plans.append(" ".join(str(row) for row in rows))
    for index in ("sessions_in_queue", "sessions_waiting", "sessions_of_submitter", "sessions_by_expiry"):
        assert any(index in plan for plan in plans)
    assert not any(re.search("SCAN sessions(?! USING)|Seq Scan on (?!needs|nodes|tenants)", plan) for plan in plans)


def test_a_reader_sees_what_there_is_and_may_not_write(store: TaskStore, any_database: str):
    store.submit([request(num_samples=1)])
    with TaskReader(any_database) as reader:
        assert reader.task("t").status == "queued"
        store.lease("n1", NODE_URL, 1)
        assert reader.task("t").status == "running"
        with pytest.raises(StoreError, match=r"read-?only"), reader.database.reading() as conn:
            conn.execute(sa.delete(schema.events))


def test_a_newer_database_is_refused_and_left_alone(any_database: str):
    with TaskStore(any_database) as store, store.database.writing() as conn:
        conn.execute(sa.update(schema.meta).values(value="99"))
    with pytest.raises(StoreError, match=r"version 99.*newer"):
        TaskStore(any_database)
    with pytest.raises(StoreError, match="version 99"):
        TaskReader(any_database)


@pytest.mark.parametrize("url", ["mysql://host/db", "postgresql://[::1/db"])
def test_what_is_no_database_of_ours_is_refused_without_telling_passwords(url: str):
    with pytest.raises(InvalidRequest):
        TaskStore(url)


def test_a_postgresql_that_knows_no_encoding_keeps_any_text(postgres: Cluster):
    with TaskStore(postgres.new_database("SQL_ASCII")) as store:
        store.submit([request("t", num_samples=1, instruction="größer als 東京 🐴")])
        (lease,) = store.lease("n1", NODE_URL, 1)
        assert lease.task["instruction"] == "größer als 東京 🐴"


def test_a_postgresql_that_cannot_keep_any_text_is_refused(postgres: Cluster):
    with pytest.raises(InvalidRequest, match="encoding is LATIN1, which cannot keep any text: make one with CREATE"):
        TaskStore(postgres.new_database("LATIN1"))


def test_a_password_is_not_told_when_the_database_does_not_answer(tmp_path: Path):
    with pytest.raises(StoreError) as caught:
        TaskStore(f"postgresql://me:hidden@/db?host={tmp_path}")
    assert "hidden" not in str(caught.value)


V1 = Path(__file__).parents[1] / "data" / "store_v1.sql"


def load_version_1(url: str) -> None:
    """A data folder of version 1: one task done, one half done, one waiting."""
    lines = V1.read_text().splitlines()
    if url.startswith("postgresql"):
        text = "\n".join(line for line in lines if "FOREIGN KEY" not in line and "sqlite_sequence" not in line)
        for old, new in (
            ("INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT", "BIGSERIAL PRIMARY KEY"),
            ('UNIQUE ("key"), ', 'UNIQUE ("key")'),
            ("UNIQUE (session_id), ", "UNIQUE (session_id)"),
            ("BEGIN TRANSACTION;", ""),
            ("COMMIT;", ""),
            ("'http://node.test',0,0,", "'http://node.test',0,false,"),
        ):
            text = text.replace(old, new)
        engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.begin() as conn:
            for statement in text.split(";\n"):
                if statement.strip():
                    conn.exec_driver_sql(statement.replace("%", "%%"))
            for table, key in (("tasks", "position"), ("sessions", "position"), ("events", "seq"), ("outbox", "id")):
                conn.exec_driver_sql(f"SELECT setval('{table}_{key}_seq', 1000)")
        engine.dispose()
        return
    engine = sa.create_engine(f"sqlite:///{url}")
    with engine.connect() as conn:
        conn.connection.executescript("\n".join(lines))  # type: ignore[attr-defined]
    engine.dispose()


def names_of(conn: sa.Connection) -> dict[str, set[str]]:
    look = sa.inspect(conn)
    columns = {f"{name}.{column['name']}" for name in look.get_table_names() for column in look.get_columns(name)}
    indexes = {str(index["name"]) for name in look.get_table_names() for index in look.get_indexes(name)}
    return {"columns": columns, "indexes": {name for name in indexes if "_key" not in name}}


def test_a_folder_of_version_1_goes_on_where_it_stood(any_database: str, clock: Clock):
    load_version_1(any_database)
    with pytest.raises(StoreError, match="brings it up to date"):
        TaskReader(any_database)
    clock.now = 1010.0
    with TaskStore(any_database, clock=clock) as store:
        assert store.task("done").rewards == (1.0,)
        assert [callback.key for callback in Outbox(store.database).due(clock.now, 9)] == ["done:ended"]
        unlimited = {"limits": {"memory_bytes": None, "cpus": None}}  # as the defaults were then
        where = "http://trainer.test/done"
        resubmitted = request("done", num_samples=1, callback_url=where, metadata={"step": 7}, runtime=unlimited)
        again = store.submit([resubmitted.model_copy(update={"max_attempts": 2})])
        assert not again[0].created
        store.submit([request("new", num_samples=1)])
        claimed: list[Lease] = store.lease("n1", NODE_URL, 9)
        assert [lease.session_id for lease in claimed] == ["half.0", "half.2", "waiting.0", "waiting.1", "new.0"]
        with store.database.reading() as conn:
            upgraded = names_of(conn)
    with TaskStore(any_database, clock=clock) as store:
        assert store.session("half.0").attempt == 2
    assert upgraded["columns"] == {f"{t.name}.{c.name}" for t in schema.metadata.tables.values() for c in t.columns} | {
        name for name in upgraded["columns"] if name.startswith("sqlite_")
    }
    assert upgraded["indexes"] == {str(i.name) for t in schema.metadata.tables.values() for i in t.indexes}


def told(identity: str, url: str = NODE_URL, node_id: str = "n1") -> Heartbeat:
    return Heartbeat(node_id=node_id, url=url, sessions={}, capacity=1, identity=identity)


def test_a_node_of_another_folder_takes_an_id_only_when_it_was_silent_for_a_lease_s_time(
    store: TaskStore, clock: Clock
):
    store.submit([request("t", num_samples=2)])
    store.heartbeat(told("first"))
    (lease,) = store.lease("n1", NODE_URL, 1, "first")
    clock.now += 29.0
    for refused in (
        lambda: store.heartbeat(told("second", "http://other.test")),
        lambda: store.lease("n1", "http://other.test", 1, "second"),
        lambda: store.heartbeat(told("", "http://gateway.test")),
    ):
        with pytest.raises(NodeIdTaken, match=r"'n1'.* --id.* free in 1 s"):
            refused()
    (node,) = store.status().nodes
    assert (node.url, store.session(lease.session_id).state) == (NODE_URL, "leased")
    store.heartbeat(told("first", "http://moved.test"))  # a restart: the same folder at another port
    clock.now += 30.0
    store.heartbeat(told("second", "http://other.test"))
    with pytest.raises(NodeIdTaken):
        store.heartbeat(told("first"))
    (node,) = store.status().nodes
    assert node.url == "http://other.test"


def test_the_first_node_after_an_upgrade_sets_the_identity(any_database: str, clock: Clock):
    load_version_1(any_database)
    clock.now = 1001.5
    with TaskStore(any_database, clock=clock) as store:
        store.heartbeat(told("first"))
        with pytest.raises(NodeIdTaken):
            store.heartbeat(told("second"))
