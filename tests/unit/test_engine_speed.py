"""How fast an engine answers, as a node measures it and as the engine's own page has it."""

from __future__ import annotations

from contextlib import suppress

import pytest

from gangline.domain.node_views import speed_of
from gangline.models.engines.times import EngineLoad, load_of_page
from gangline.node.backends.speed import SpeedMeter


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_streamed_call_has_a_time_to_its_first_token_and_each_call_one_to_its_end() -> None:
    clock = Clock()
    meter = SpeedMeter(clock)
    with meter.call(is_streamed=True) as timed:
        clock.now += 2.0
        timed.sampled(1)
        clock.now += 6.0
        timed.sampled(23)
    with meter.call(is_streamed=False) as timed:
        clock.now += 4.0
        timed.sampled(36)
    found = meter.view()
    assert (found.first_token_s, found.reply_s, found.waits_s) == (2.0, 6.0, 0.0)
    assert found.tokens_per_s == 60 / 12
    clock.now += 61.0
    assert (meter.view().first_token_s, meter.view().reply_s, meter.view().tokens_per_s) == (None, None, 0.0)


def test_a_call_that_waits_for_its_first_token_is_seen_before_it_has_one_and_not_after_it_failed() -> None:
    clock = Clock()
    meter = SpeedMeter(clock)
    with suppress(OSError), meter.call(is_streamed=True):
        clock.now += 30.0
        assert meter.view().waits_s == 30.0
        raise OSError
    found = meter.view()
    assert (found.waits_s, found.first_token_s, found.reply_s) == (0.0, None, None)


def test_the_engines_page_counts_where_no_call_is_streamed() -> None:
    clock = Clock()
    meter = SpeedMeter(clock)
    meter.read(EngineLoad(7, first_s=10.0, num_first=10))
    assert (meter.view().first_token_s, meter.view().num_queued) == (None, 7)
    meter.read(EngineLoad(0, first_s=26.0, num_first=12))
    assert (meter.view().first_token_s, meter.view().num_queued) == (8.0, 0)
    with meter.call(is_streamed=True) as timed:
        clock.now += 0.5
        timed.sampled(1)
    assert meter.view().first_token_s == 0.5
    meter.read(EngineLoad(0, first_s=1.0, num_first=1))  # the engine was started again
    clock.now += 100.0
    assert meter.view().first_token_s is None


PAGE = b"""# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 1.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 2.5
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 5.0
"""
SGLANG = b"""sglang:num_queue_reqs{model_name="m"} 2.0
sglang:time_to_first_token_seconds_sum{model_name="m"} 1.5
sglang:time_to_first_token_seconds_count{model_name="m"} 3.0
"""


@pytest.mark.parametrize(
    ("page", "load"),
    [
        (PAGE, EngineLoad(7, 2.5, 5)),
        (SGLANG, EngineLoad(2, 1.5, 3)),
        (b"other 1\n", EngineLoad(None, 0.0, 0)),
        (b"vllm:num_requests_waiting NaN\nvllm:time_to_first_token_seconds_sum{", EngineLoad(None, 0.0, 0)),
    ],
)
def test_a_page_is_summed_over_replicas(page: bytes, load: EngineLoad) -> None:
    assert load_of_page(page) == load


@pytest.mark.parametrize("engine", [{}, {"speed": None}, {"speed": "fast"}, {"speed": {"first_token_s": "x"}}])
def test_another_implementation_of_nodes_may_say_nothing_of_speed(engine: dict[str, object]) -> None:
    assert speed_of(engine) is None
