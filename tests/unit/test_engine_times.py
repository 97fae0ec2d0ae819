"""What an engine's page of metrics says of its calls, in the form that each engine writes."""

from __future__ import annotations

import pytest

from gangline.models.engines.times import times_of_page

VLLM = b"""# HELP vllm:request_queue_time_seconds Histogram of time spent in WAITING phase for request.
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="Qwen/Qwen3-4B"} 4.0
vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf",model_name="Qwen/Qwen3-4B"} 4.0
vllm:request_queue_time_seconds_count{engine="0",model_name="Qwen/Qwen3-4B"} 4.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="Qwen/Qwen3-4B"} 2.0
vllm:request_queue_time_seconds_created{engine="0",model_name="Qwen/Qwen3-4B"} 1.764e+09
vllm:request_queue_time_seconds_count{engine="1",model_name="Qwen/Qwen3-4B"} 6.0
vllm:request_queue_time_seconds_sum{engine="1",model_name="Qwen/Qwen3-4B"} 1.2e+01
vllm:request_inference_time_seconds_count{engine="0",model_name="Qwen/Qwen3-4B"} 4.0
vllm:request_inference_time_seconds_sum{engine="0",model_name="Qwen/Qwen3-4B"} 99.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="a {strange} \\"name\\""} 4.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="a {strange} \\"name\\""} 0.25
vllm:request_decode_time_seconds_count{engine="0",model_name="Qwen/Qwen3-4B"} 4.0
vllm:request_decode_time_seconds_sum{engine="0",model_name="Qwen/Qwen3-4B"} 8.0
"""

SGLANG = b"""sglang:queue_time_seconds_sum{engine_type="unified",model_name="m",tp_rank="0"} 0.5
sglang:queue_time_seconds_count{engine_type="unified",model_name="m",tp_rank="0"} 10.0
sglang:per_stage_req_latency_seconds_sum{model_name="m",stage="prefill_waiting",tp_rank="0"} 50.0
sglang:per_stage_req_latency_seconds_count{model_name="m",stage="prefill_waiting",tp_rank="0"} 10.0
sglang:per_stage_req_latency_seconds_sum{model_name="m",stage="prefill_forward",tp_rank="0"} 2.0
sglang:per_stage_req_latency_seconds_count{model_name="m",stage="prefill_forward",tp_rank="0"} 10.0
sglang:e2e_request_latency_seconds_sum{model_name="m"} 70.0
sglang:e2e_request_latency_seconds_count{model_name="m"} 10.0
"""


def means(page: bytes) -> dict[str, tuple[float, int]]:
    return {phase: (time.mean_s, time.num_calls) for phase, time in times_of_page(page).items()}


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_vllms_page_has_all_three_over_all_of_its_engines(end: bytes) -> None:
    found = means(VLLM.replace(b"\n", end))
    assert found == {"queue": (1.4, 10), "prefill": (0.0625, 4), "decode": (2.0, 4)}


def test_sglangs_page_has_queue_and_prefill() -> None:
    assert means(SGLANG) == {"queue": (0.05, 10), "prefill": (0.2, 10)}


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\xff\xfe",
        b"<html>404</html>",
        b"# HELP vllm:request_queue_time_seconds_sum x 1\n",
        b"vllm:request_queue_time_seconds_sum 0.0\nvllm:request_queue_time_seconds_count 0.0\n",
        b"vllm:request_queue_time_seconds_sum 1.0\n",
        b"vllm:request_queue_time_seconds_sum NaN\nvllm:request_queue_time_seconds_count 2\n",
        b"vllm:request_queue_time_seconds_sum +Inf\nvllm:request_queue_time_seconds_count 2\n",
        b"vllm:request_queue_time_seconds_sum 1\nvllm:request_queue_time_seconds_count NaN\n",
        b"vllm:request_queue_time_seconds_sum 1\nvllm:request_queue_time_seconds_count many\n",
        b"x_vllm:request_queue_time_seconds_sum 1\nx_vllm:request_queue_time_seconds_count 1\n",
        b"vllm:request_queue_time_seconds_sum\nvllm:request_queue_time_seconds_count\n",
    ],
)
def test_a_page_without_calls_says_nothing(page: bytes) -> None:
    assert means(page) == {}


def test_a_time_stamp_behind_the_value_is_no_value() -> None:
    page = b"x_sum 3 1764500000000\nx_count 2 1764500000000\n".replace(b"x", b"vllm:request_decode_time_seconds")
    assert means(page) == {"decode": (1.5, 2)}


def test_of_sglangs_stages_only_the_one_that_is_prefilling_counts() -> None:
    page = b'x_sum{stage="decode_forward"} 9\nx_sum 9\nx_sum{stage="prefill_forward"} 3\n'
    page += b'x_count{stage="prefill_forward"} 2\n'
    assert means(page.replace(b"x", b"sglang:per_stage_req_latency_seconds")) == {"prefill": (1.5, 2)}
