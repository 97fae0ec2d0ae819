"""Clients of ProRL Agent's published source: each sends what that source sends.

Source: github.com/NVIDIA-NeMo/ProRL-Agent-Server, `scripts/` and `openhands/nvidia/` at 40c1d8a.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gangline.domain.conversation import Message, Text, ToolResult
from gangline.domain.session import Lease, StageTiming
from gangline.domain.tokens import logprobs, token_ids
from gangline.domain.trajectory import Trace, Trajectory, TurnSpan
from gangline.server.run import serving
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode

TOKEN = "control-secret"
SAMPLING = {
    "model": "hosted_vllm/Qwen/Qwen3-8B", "api_key": "mykey", "modify_params": False, "log_completions": False,
    "native_tool_calling": True, "temperature": 0.6, "top_p": 0.9, "max_iterations": 35, "max_output_tokens": 4096,
}  # fmt: skip
INSTANCE: dict[str, Any] = {
    "instance_id": "getmoto__moto-4950",
    "repo": "getmoto/moto",
    "problem_statement": "`describe` leaves out tags",
    "test_patch": "--- a/tests/test_tags.py\n+++ b/tests/test_tags.py\n",
    "FAIL_TO_PASS": ["tests/test_tags.py::test_tags"],
    "PASS_TO_PASS": [],
    "data_kind": "swebench",
    "docker_image": None,
    "trajectory_id": 0,
}
"""A row of SWE-Gym, prepared by `prepare_data.py`: columns of other data sets are None."""


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ServerClient]:
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        yield client


@pytest.fixture
def host(client: ServerClient) -> str:
    """As `--host` and `--port` would be given: the URL made of them is the client's only place for a token."""
    return f"http://openhands:{TOKEN}@{client.url.removeprefix('http://')}"


async def post(url: str, payload: Any = None) -> Any:
    """`run_swe.py` `_post`."""
    async with aiohttp.ClientSession(raise_for_status=True) as http, http.post(url, json=payload) as reply:
        return await reply.json()


def two_turns(lease: Lease) -> Trajectory:
    said = (
        Message("assistant", (Text("a"),)),
        Message("tool", (ToolResult("c1", (Text("t"),)), ToolResult("c2", (Text("u"),)))),
        Message("assistant", (Text("b"),)),
    )
    trace = Trace(
        trace_id=f"{lease.session_id}.0",
        session_id=lease.session_id,
        prompt_ids=token_ids([1, 2]),
        response_ids=token_ids([3, 4, 5, 6, 7]),
        loss_mask=token_ids([1, 0, 0, 1, 1]).astype("int8"),
        response_logprobs=logprobs([-0.5, 0.0, 0.0, -0.25, -0.125]),
        response_versions=token_ids([0, -1, -1, 0, 0]),
        spans=(TurnSpan("c1", 0, 1), TurnSpan("c2", 3, 5)),
        prompt_messages=(Message("system", (Text("s"),)), Message("user", (Text("do it"),))),
        response_messages=said,
        finish_reason="stop",
        certificates=(),
    )
    return Trajectory(
        session_id=lease.session_id, task_id=lease.task_id, builder="b", traces=(trace,), num_completions=2
    )


async def test_a_bulk_evaluation_runs_as_written(host: str, client: ServerClient):
    """`run_swe.py` `evaluate`: engines, start, a job without a data source, stop. `test_server_token.py` reads ids."""
    await post(f"{host}/add_llm_server", {"address": "http://127.0.0.1:8000/v1"})
    await post(f"{host}/start")
    async with aiohttp.ClientSession() as http, http.get(f"{host}/status") as reply:
        assert reply.status == 200
    job = asyncio.create_task(post(f"{host}/process", {"instance": INSTANCE, "sampling_params": SAMPLING}))
    node = FakeNode(client)
    (lease,) = await node.lease(wait_s=10)
    assert lease.task["evaluator"]["strategy"] == "swe_bench"
    assert lease.task["agent"]["max_turns"] == 35
    assert lease.task["capture"]["sampling"]["max_tokens"]["override"] == 4096
    timings = (StageTiming("ready", 1.0, 4.0), StageTiming("run", 10.0, 12.5))
    await node.finish([lease], trajectory=two_turns(lease), reward=1.0, timings=timings)
    answer = await job
    assert (answer["instance_id"], answer["trajectory_id"]) == ("getmoto__moto-4950", 0)
    assert (answer["resolved"], answer["critical_error"], answer["filter"]) == (True, None, False)
    ids = [message["token_ids"] for message in answer["messages"]]
    assert ids == [[], [1, 2], [3], [], [4, 5], [6, 7]]
    assert [len(message["content"]) for message in answer["messages"]] == [1, 5, 1, 1, 1, 1]
    timing = {"init_time": 0.0, "run_time": 2.5, "eval_time": 0.0, "others_time": 3.0, "counted_elapsed": 2.5}
    assert answer["timing"] | timing | {"timeout_triggered": False} == answer["timing"]
    await post(f"{host}/stop")


SOURCES = {
    "deepscaler": "math",
    "deepcoder-preview": "code",
    "taco": "code",
    "swebench": "swe_bench",
}


async def test_each_data_source_of_the_server_is_known(host: str, client: ServerClient):
    """`openhands/nvidia/__init__.py` and `registry.py`: names of handlers, and those that are mapped to one."""
    prompt = [{"role": "user", "content": "2 + 2?"}]
    cases = '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'
    rows = {
        "math": {"prompt": prompt, "reward_model": {"ground_truth": "4"}},
        "code": {"prompt": prompt, "reward_model": {"ground_truth": cases}},
        "swe_bench": INSTANCE,
    }
    strategies = {"code": "cases"}
    node = FakeNode(client)
    for source, kind in SOURCES.items():
        instance = {**rows[kind], "data_source": source}
        job = asyncio.create_task(post(f"{host}/process", {"instance": instance, "sampling_params": {}}))
        (lease,) = await node.lease(wait_s=10)
        assert lease.task["evaluator"]["strategy"] == strategies.get(kind, kind)
        await node.finish([lease], reward=0.0)
        assert (await job)["resolved"] is False
