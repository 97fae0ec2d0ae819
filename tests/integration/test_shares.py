"""Shares of the fleet between tenants and their quotas, on both databases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest

from gangline.domain.errors import QuotaExceeded
from gangline.domain.placement import Offer
from gangline.domain.session import Lease
from gangline.domain.tenancy import TenantView, UsageRow
from gangline.store.sql.tasks import TaskStore
from support.service.running import NODE_URL, beat, request, result
from support.store.completions import completion

NOON = 86_400.0 * 20_000 + 43_200


class Clock:
    now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(any_database: str, clock: Clock) -> Iterator[TaskStore]:
    with TaskStore(any_database, clock=clock, lease_s=1e6) as store:
        yield store


def submit(store: TaskStore, tenant: str, num: int, name: str = "t") -> None:
    store.submit([request(f"{tenant}-{name}", num_samples=num)], tenant)


def tenant_of(lease: Lease) -> str:
    return lease.task_id.partition("-")[0]


def ran(store: TaskStore, clock: Clock, steps: int, lasts: dict[str, float], slots: int = 4) -> Counter[str]:
    """Slot-seconds that each tenant got on a node with so many slots, second by second."""
    running: list[tuple[float, Lease]] = []
    got = Counter[str]()
    for _ in range(steps):
        for end, lease in [one for one in running if one[0] <= clock.now]:
            store.report(result(lease), lambda: None)
            running.remove((end, lease))
        for lease in store.lease("n1", NODE_URL, slots - len(running)) if len(running) < slots else []:
            running.append((clock.now + lasts[tenant_of(lease)], lease))
        got.update(tenant_of(lease) for _, lease in running)
        clock.now += 1
    for _, lease in running:
        store.report(result(lease), lambda: None)
    return got


def view(store: TaskStore, tenant: str) -> TenantView:
    (found,) = store.tenants(tenant)
    return found


@pytest.mark.parametrize(("weight", "lasts"), [(1.0, {"a": 2.0, "b": 2.0}), (1.0, {"a": 1.0, "b": 7.0}),
                                               (3.0, {"a": 2.0, "b": 3.0})])  # fmt: skip
def test_slot_seconds_go_by_weight_whatever_the_load_and_the_length(
    store: TaskStore, clock: Clock, weight: float, lasts: dict[str, float]
):
    submit(store, "a", 400)
    submit(store, "b", 200)
    store.set_tenant("b", {"weight": weight})
    clock.now += 2
    got = ran(store, clock, 80, lasts)
    assert got["b"] / got.total() == pytest.approx(weight / (1 + weight), abs=0.08)


def test_who_was_idle_has_saved_nothing_up_and_who_ran_alone_owes_nothing(store: TaskStore, clock: Clock):
    submit(store, "a", 300)
    ran(store, clock, 40, {"a": 1.0})
    submit(store, "b", 300)
    clock.now += 2
    got = ran(store, clock, 40, {"a": 1.0, "b": 1.0})
    assert got["a"] == pytest.approx(got["b"], abs=8)


@pytest.mark.parametrize("held_by", ["quota", "needs"])
def test_who_waited_for_a_quota_or_a_node_has_saved_nothing_up(store: TaskStore, clock: Clock, held_by: str):
    if held_by == "quota":
        store.set_tenant("a", {"max_running": 0})
        submit(store, "a", 300)
    else:
        store.heartbeat(msgspec.structs.replace(beat([]), offer=Offer(runtimes=("process", "sandbox"))))
        store.submit([request("a-odd", runtime={"backend": "podman"})], "a")
    submit(store, "b", 300)
    clock.now += 2
    ran(store, clock, 40, {"b": 1.0})
    submit(store, "c", 300)
    if held_by == "quota":
        store.set_tenant("a", {"max_running": None})
    else:
        submit(store, "a", 300)
    clock.now += 2
    got = ran(store, clock, 40, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert {name: got[name] for name in "abc"} == pytest.approx(dict.fromkeys("abc", 160 / 3), abs=8)


def test_one_claim_is_shared_out_and_a_short_queue_leaves_its_rest(store: TaskStore, clock: Clock):
    submit(store, "a", 20)
    submit(store, "b", 2)
    submit(store, "c", 20)
    clock.now += 2
    taken = Counter(map(tenant_of, store.lease("n1", NODE_URL, 10)))
    assert taken == {"a": 4, "b": 2, "c": 4}


def test_sessions_at_once_are_limited_and_told_why(store: TaskStore, clock: Clock):
    submit(store, "a", 5)
    store.set_tenant("a", {"max_running": 2})
    leases = store.lease("n1", NODE_URL, 9)
    assert len(leases) == 2
    waiting = [one.unplaced for one in store.task("a-t").sessions if one.state == "queued"]
    assert waiting == ["tenant 'a' has used its quota max_running: 2 of 2; it frees as its sessions leave"] * 3
    store.report(result(leases[0]), lambda: None)
    assert len(store.lease("n1", NODE_URL, 9)) == 1


def test_queued_sessions_are_limited_and_a_repeated_submission_is_not(store: TaskStore):
    store.set_tenant("a", {"max_queued": 5})
    submit(store, "a", 5)
    submit(store, "a", 5)
    with pytest.raises(QuotaExceeded, match="max_queued: 5 of 5") as refused:
        submit(store, "a", 1, "more")
    assert (refused.value.details["quota"], refused.value.details["frees_at"]) == ("max_queued", None)
    submit(store, "b", 50)


@pytest.mark.parametrize("quota", ["max_slot_s_per_day", "max_tokens_per_day"])
def test_a_days_quota_holds_until_midnight(store: TaskStore, clock: Clock, quota: str):
    submit(store, "a", 3)
    store.set_tenant("a", {quota: 0 if "tokens" in quota else 10})
    if "tokens" not in quota:
        (lease,) = store.lease("n1", NODE_URL, 1)
        clock.now += 60
        store.report(result(lease), lambda: None)
        assert view(store, "a").slot_s_today == 60
    else:
        store.set_tenant("a", {"max_tokens_per_day": None})
        (lease,) = store.lease("n1", NODE_URL, 1)
        store.report(result(lease), lambda: None)
        store.set_tenant("a", {"max_tokens_per_day": 0})
    assert store.lease("n1", NODE_URL, 1) == []
    with pytest.raises(QuotaExceeded, match="midnight") as refused:
        submit(store, "a", 1, "more")
    assert refused.value.details["frees_at"] == NOON + 43_200
    clock.now = NOON + 43_201
    assert len(store.lease("n1", NODE_URL, 1)) == 1
    assert view(store, "a").slot_s_today == 0


def test_every_lease_that_ends_is_counted_once(store: TaskStore, clock: Clock):
    submit(store, "a", 2)
    first, second = store.lease("n1", NODE_URL, 2)
    clock.now += 5
    store.release("n1", first.session_id, first.fence)
    clock.now += 5
    store.report(result(second), lambda: None)
    store.report(result(second), lambda: None)
    counted = view(store, "a")
    assert (counted.num_leases, counted.slot_s, counted.num_running, counted.num_queued) == (2, 15, 0, 1)


def test_use_is_summed_up_by_what_is_asked_over_a_period(store: TaskStore, clock: Clock):
    call = completion(1)
    tokens = len(call.sampled_ids)
    for tenant, task_id, lasts_s in (("a", "r1-000001", 10.0), ("a", "r2-000001", 30.0), ("b", "r1-000002", 5.0)):
        store.submit([request(task_id)], tenant)
        for lease in store.lease("n1", NODE_URL, 2):  # both at once, and one ends after the other
            clock.now += lasts_s
            store.report(result(lease, completions=(call,)), lambda: None)
    store.submit([request("open")], "a")
    end = clock.now
    by_tenant = [UsageRow("a", 4, 10 + 20 + 30 + 60, 4 * tokens), UsageRow("b", 2, 5 + 10, 2 * tokens)]
    assert store.usage("tenant", 0.0, end + 1) == by_tenant
    assert store.usage("tenant", 0.0, end + 1, "b") == by_tenant[1:]
    assert [(one.name, one.num_sessions) for one in store.usage("run", 0.0, end + 1)] == [("r2", 2), ("r1", 4)]
    assert [one.name for one in store.usage("submitter", 0.0, end + 1)] == [""]
    assert store.usage("tenant", end - 5.0, end + 1) == [UsageRow("b", 2, 15.0, 2 * tokens)], "from then on"
    assert store.usage("tenant", end - 5.0, end) == [UsageRow("b", 1, 5.0, tokens)], "before then"
    assert store.usage("tenant", end + 1, end + 2) == []
