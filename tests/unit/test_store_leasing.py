"""The decisions about leases, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from gangline.domain.errors import Failure, LeaseLost
from gangline.store.sql import leasing
from gangline.store.sql.leasing import Standing
from gangline.store.sql.outbox import next_try_at

BROKEN = Failure(boundary="engine", code="engine_unavailable", message="down", retryable=True)


def leased(**changes: Any) -> Standing:
    queued = Standing(max_attempts=2, **changes)
    return leasing.lease(queued, node_id="n1", now=100.0, lease_s=30.0)


def test_a_lease_raises_the_fence_and_keeps_the_attempt():
    held = leased(fence=4, attempt=2)
    assert (held.state, held.fence, held.attempt, held.node_id, held.expires_at) == ("leased", 5, 2, "n1", 130.0)


def test_an_ended_session_is_never_leased_again():
    ended = leasing.cancel(leased())
    assert ended is not None
    with pytest.raises(ValueError, match="from ended to leased"):
        leasing.lease(ended, node_id="n2", now=0.0, lease_s=1.0)


def test_a_renewal_counts_from_the_heartbeat_and_dates_the_stage_once():
    first = leasing.renew(leased(), node_id="n1", fence=1, stage="run", now=110.0, lease_s=30.0)
    assert first is not None
    second = leasing.renew(first, node_id="n1", fence=1, stage="run", now=120.0, lease_s=30.0)
    assert second is not None
    assert (second.stage, second.stage_at, second.expires_at) == ("run", 110.0, 150.0)


@pytest.mark.parametrize(("node_id", "fence"), [("n2", 1), ("n1", 0), ("n1", 2)])
def test_only_the_holder_of_the_live_fence_renews(node_id: str, fence: int):
    assert leasing.renew(leased(), node_id=node_id, fence=fence, stage="run", now=0.0, lease_s=1.0) is None


def test_a_lease_lives_until_its_last_moment():
    assert leasing.expire(leased(), now=129.9) is None
    assert leasing.expire(leased(), now=130.0) is not None


def test_an_expired_lease_costs_an_attempt_and_the_last_one_ends_the_session():
    again = leasing.expire(leased(), now=200.0)
    assert again is not None
    assert (again.state, again.attempt, again.expires_at, again.stage) == ("queued", 2, None, None)
    over = leasing.expire(leasing.lease(again, node_id="n1", now=200.0, lease_s=30.0), now=300.0)
    assert over is not None
    assert over.failure is not None
    assert (over.state, over.outcome, over.attempt) == ("ended", "infra_error", 2)
    assert (over.failure.boundary, over.failure.code) == ("node", "lease_expired")


def test_giving_back_costs_no_attempt():
    back = leasing.release(leased(), node_id="n1", fence=1)
    assert (back.state, back.attempt, back.fence) == ("queued", 1, 1)
    with pytest.raises(LeaseLost):
        leasing.release(back, node_id="n1", fence=1)


def test_giving_back_a_session_whose_agent_has_started_costs_an_attempt_and_the_last_one_ends_it():
    back = leasing.release(leased(), node_id="n1", fence=1, has_run=True)
    assert back.failure is not None
    assert (back.state, back.attempt, back.failure.code) == ("queued", 2, "given_back")
    held = leasing.lease(back, node_id="n1", now=0.0, lease_s=1.0)
    over = leasing.release(held, node_id="n1", fence=2, has_run=True)
    assert over.failure is not None
    assert (over.state, over.outcome, over.failure.code) == ("ended", "infra_error", "given_back")


def test_a_node_that_loses_its_sessions_is_believed_once():
    standing, num_leases = Standing(max_attempts=3), 0
    while standing.state == "queued":
        standing = leasing.unheard(leasing.lease(standing, node_id="n1", now=0.0, lease_s=1.0))
        num_leases += 1
    assert standing.failure is not None
    assert (standing.outcome, standing.failure.code) == ("infra_error", "lease_unheard")
    assert num_leases == 4


def test_a_retryable_infrastructure_fault_goes_round_again_and_then_ends():
    again = leasing.report(leased(), fence=1, outcome="infra_error", failure=BROKEN)
    assert (again.state, again.attempt, again.failure) == ("queued", 2, BROKEN)
    last = leasing.lease(again, node_id="n2", now=0.0, lease_s=1.0)
    over = leasing.report(last, fence=2, outcome="infra_error", failure=BROKEN)
    assert (over.state, over.outcome, over.failure) == ("ended", "infra_error", BROKEN)


def test_the_agents_own_failure_is_not_tried_again():
    crash = Failure(boundary="harness", code="harness_error", message="exit 1", retryable=True)
    over = leasing.report(leased(), fence=1, outcome="agent_error", failure=crash)
    assert (over.state, over.outcome) == ("ended", "agent_error")


def test_a_stale_fence_is_refused_and_says_where_the_session_is():
    with pytest.raises(LeaseLost, match="leased with fence 1"):
        leasing.report(leased(), fence=0, outcome="completed", failure=None)
    cancelled = leasing.cancel(leased())
    assert cancelled is not None
    with pytest.raises(LeaseLost, match="ended"):
        leasing.report(cancelled, fence=1, outcome="completed", failure=None)


def test_a_report_sent_twice_changes_nothing_the_second_time():
    once = leasing.report(leased(), fence=1, outcome="infra_error", failure=BROKEN)
    assert leasing.report(once, fence=1, outcome="infra_error", failure=BROKEN) is once


def test_a_session_that_was_never_leased_accepts_no_report():
    with pytest.raises(LeaseLost):
        leasing.report(Standing(max_attempts=1), fence=0, outcome="completed", failure=None)


def test_a_cancelled_session_is_cancelled_once():
    ended = leasing.cancel(Standing(max_attempts=1))
    assert ended is not None
    assert ended.outcome == "cancelled"
    assert leasing.cancel(ended) is None


def test_callback_pauses_double_up_to_their_bound_and_stop_at_the_expiry():
    def pause(num_tries: int, now: float = 0.0) -> float | None:
        return next_try_at(num_tries, now=now, expires_at=1000.0, base_s=1.0, max_s=60.0)

    assert [pause(tries) for tries in (1, 2, 3, 7, 5000)] == [1.0, 2.0, 4.0, 60.0, 60.0]
    assert pause(7, now=990.0) == 1000.0
    assert pause(7, now=1000.0) is None
