"""Numbers that need no socket: stages, failures, lag."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from gangline.cli.terminal.views import low_disk, node_state
from gangline.domain.errors import Failure
from gangline.domain.node_views import BreakerView, DiskState
from gangline.domain.session import SessionResult, StageTiming
from gangline.domain.usage import SessionUsage, Usage
from gangline.domain.views import NodeView
from gangline.machine.telemetry.exposition import LoopLag
from gangline.node.backends.gate import Gate
from gangline.node.health.metrics import NodeMetrics, NodeNow
from gangline.sandbox.images.pulling import PullCounts
from gangline.sandbox.images.supply import ImagesNow

NOW = NodeNow(stages={"init": 1}, sizes={}, num_external=0, backends=(), gate=Gate())


def result(**fields: Any) -> SessionResult:
    return SessionResult(session_id="t.0", task_id="t", node_id="n", attempt=1, fence=1, **fields)


def node(metrics: dict[str, float]) -> NodeView:
    return NodeView(
        node_id="n",
        url="",
        capacity=1,
        draining=False,
        num_sessions=0,
        metrics=metrics,
        first_seen_at=0,
        last_seen_at=0,
        age_s=0.0,
    )


def test_a_low_disk_is_in_the_heartbeat_and_in_the_nodes_state() -> None:
    disk = DiskState(free_bytes=1 << 30, reserve_bytes=2 << 30, free_files=9, reserve_files=0, is_low=True)
    troubles = msgspec.structs.replace(NOW, disk=disk).troubles()
    assert low_disk(troubles) == "takes no session: disk low (1 GiB free, reserve 2 GiB)"
    few = msgspec.structs.replace(disk, free_bytes=4 << 30, reserve_files=10)
    assert "9 files free, reserve 10" in low_disk(msgspec.structs.replace(NOW, disk=few).troubles())
    enough = msgspec.structs.replace(disk, free_bytes=4 << 30, is_low=False)
    assert low_disk(msgspec.structs.replace(NOW, disk=enough).troubles()) == ""
    assert node_state(node(troubles)).startswith("takes no session")


def test_pulls_are_counted_and_the_nodes_state_says_who_waits_for_what() -> None:
    counts = PullCounts(num_pulled=3, num_failed=1, num_bytes=700, seconds=2.5)
    waiting = {"docker.io/library/debian:12": 2, "ghcr.io/a/b:1": 1}
    images = ImagesNow(waiting=waiting, counts=counts, num_removed=4, cache_bytes=600)
    now = msgspec.structs.replace(NOW, images=images)
    text = NodeMetrics().exposition(now).decode()
    for line in (
        'gangline_image_pulls_total{result="pulled"} 3.0',
        'gangline_image_pulls_total{result="failed"} 1.0',
        "gangline_image_pull_seconds_total 2.5",
        "gangline_image_pulled_bytes_total 700.0",
        "gangline_images_removed_total 4.0",
        "gangline_image_cache_bytes 600.0",
        "gangline_image_waiting_sessions 3.0",
    ):
        assert line in text.splitlines()
    assert node_state(node(now.troubles())) == (
        "up, pulls docker.io/library/debian:12 (waiting: 2), pulls ghcr.io/a/b:1 (waiting: 1)"
    )


def test_an_attempt_is_counted_with_its_stages_and_its_failure() -> None:
    metrics = NodeMetrics()
    failure = Failure(boundary="runtime", code="runtime_failed", message="", retryable=True)
    timings = (StageTiming("init", 10.0, 12.0), StageTiming("run", 12.0, 52.0))
    metrics.attempt_ended(result(outcome="infra_error", failure=failure, timings=timings))
    text = metrics.exposition(NOW).decode()
    assert 'gangline_attempts_total{outcome="infra_error"} 1.0' in text
    assert 'gangline_failures_total{boundary="runtime",code="runtime_failed"} 1.0' in text
    assert 'gangline_stage_seconds_sum{stage="run"} 40.0' in text
    assert 'gangline_sessions{stage="init"} 1.0' in text


def test_a_clock_that_went_back_spoils_no_histogram() -> None:
    metrics = NodeMetrics()
    metrics.attempt_ended(result(outcome="completed", timings=(StageTiming("run", 9.0, 1.0),)))
    assert 'gangline_stage_seconds_sum{stage="run"} 0.0' in metrics.exposition(NOW).decode()


def test_resources_of_sandboxes_are_counted_by_part_where_they_are_known() -> None:
    metrics = NodeMetrics()
    agent = Usage(disk_bytes=None, cpu_s=1.5, peak_memory_bytes=20 << 20, proxy_sent_bytes=7, list_received_bytes=9)
    usage = SessionUsage(agent=agent, grading=Usage(disk_bytes=None, cpu_s=0.5))
    metrics.attempt_ended(result(outcome="completed", usage=usage))
    metrics.attempt_ended(result(outcome="completed"))
    text = metrics.exposition(NOW).decode()
    assert 'gangline_sandbox_cpu_seconds_total{part="agent"} 1.5' in text
    assert 'gangline_sandbox_cpu_seconds_total{part="grading"} 0.5' in text
    assert 'gangline_sandbox_network_bytes_total{direction="sent",part="agent",way="proxy"} 7.0' in text
    assert 'gangline_sandbox_network_bytes_total{direction="received",part="agent",way="list"} 9.0' in text
    assert 'gangline_sandbox_peak_memory_bytes_bucket{le="1.6777216e+07",part="agent"} 0.0' in text
    assert 'gangline_sandbox_peak_memory_bytes_count{part="agent"} 1.0' in text
    assert 'gangline_sandbox_peak_memory_bytes_count{part="grading"}' not in text


def test_what_hangs_and_what_rests_is_shown() -> None:
    broken = BreakerView(state="open", boundary="engine", num_faults=8)
    text = NodeMetrics().exposition(msgspec.structs.replace(NOW, num_stuck=2, breaker=broken)).decode()
    assert "gangline_stuck_sessions 2.0" in text
    assert "gangline_breaker_open 1.0" in text


def test_the_worst_lag_is_of_the_time_since_the_last_scrape() -> None:
    registry = CollectorRegistry()
    lag = LoopLag(registry)
    lag.saw(0.5)
    lag.saw(0.1)
    assert registry.get_sample_value("gangline_loop_lag_worst_seconds") == 0.5
    assert registry.get_sample_value("gangline_loop_lag_worst_seconds") == 0.0
    assert registry.get_sample_value("gangline_loop_lag_seconds_count") == 2
