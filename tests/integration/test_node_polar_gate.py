"""A trainer of Polar's holds a node's model calls around a weight update, as its collector asks a gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib import error, request

import numpy as np
import openai
import pytest

from gangline.serving.scripted.server import scripted_server
from support.node.node import TOKEN, running_node


def control(url: str, method: str = "POST", token: str | None = TOKEN, body: Any = None) -> tuple[int, Any]:
    """As the collector asks: urllib, an empty body of no declared type; or a body of JSON."""
    data = b"" if body is None else json.dumps(body).encode()
    asked = request.Request(url, data=data if method == "POST" else None, method=method)
    if body is not None:
        asked.add_header("Content-Type", "application/json")
    if token is not None:
        asked.add_header("Authorization", f"Bearer {token}")
    try:
        with request.urlopen(asked, timeout=10) as response:
            return response.status, json.loads(response.read())
    except error.HTTPError as refused:
        with refused:
            return refused.code, json.loads(refused.read())


async def test_a_pause_drains_a_status_tells_and_a_resume_opens(tmp_path: Path) -> None:
    async with scripted_server({}) as engine_url, running_node(tmp_path, engine_url) as node:
        root = f"{node.client.url}/admin/inference"
        open_state = {"paused": False, "inflight": 0, "base_url": engine_url, "engine": "vllm"}
        assert await asyncio.to_thread(control, f"{root}/status", "GET") == (200, open_state)
        closed = (200, open_state | {"paused": True})
        assert await asyncio.to_thread(control, f"{root}/pause?timeout_seconds=300") == closed
        assert await asyncio.to_thread(control, f"{root}/pause") == closed, "the collector may ask twice"
        assert (await node.client.gate()).is_drained
        assert await asyncio.to_thread(control, f"{root}/status", "GET") == closed
        assert await asyncio.to_thread(control, f"{root}/resume") == (200, open_state)
        assert await asyncio.to_thread(control, f"{root}/resume") == (200, open_state)


async def test_a_drain_that_takes_too_long_is_504_and_new_calls_stay_held(tmp_path: Path) -> None:
    async with scripted_server({}) as engine_url, running_node(tmp_path, engine_url) as node:
        root = f"{node.client.url}/admin/inference"
        opened = await node.client.open_session()
        key, url = opened.api_key, opened.base_urls["openai"]
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            async with node.http.post(f"{engine_url}/pause", params={"mode": "keep"}):
                messages: Any = [{"role": "user", "content": "hi"}]
                held = asyncio.create_task(client.chat.completions.create(model="scripted", messages=messages))
            while (await node.client.gate()).num_in_flight == 0:
                await asyncio.sleep(0)
            status, problem = await asyncio.to_thread(control, f"{root}/pause?timeout_seconds=0.01")
            assert (status, problem["code"]) == (504, "drain_timeout")
            told = (await asyncio.to_thread(control, f"{root}/status", "GET"))[1]
            assert (told["paused"], told["inflight"]) == (True, 1)
            async with node.http.post(f"{engine_url}/resume"):
                await held
            assert (await asyncio.to_thread(control, f"{root}/pause"))[1]["inflight"] == 0


@pytest.mark.parametrize("timeout_s", ["-1", "nan", "inf", "soon", ""])
async def test_a_timeout_that_is_no_time_leaves_the_gate_open(tmp_path: Path, timeout_s: str) -> None:
    async with scripted_server({}) as engine_url, running_node(tmp_path, engine_url) as node:
        url = f"{node.client.url}/admin/inference/pause?timeout_seconds={timeout_s}"
        assert (await asyncio.to_thread(control, url))[0] == 400
        assert not (await node.client.gate()).is_paused


@pytest.mark.parametrize(("method", "action"), [("GET", "status"), ("POST", "pause"), ("POST", "resume")])
async def test_strangers_are_refused(tmp_path: Path, method: str, action: str) -> None:
    async with scripted_server({}) as engine_url, running_node(tmp_path, engine_url) as node:
        url = f"{node.client.url}/admin/inference/{action}"
        assert (await asyncio.to_thread(control, url, method, None))[0] == 401
        assert (await asyncio.to_thread(control, url, method, "wrong"))[0] == 401
        assert not (await node.client.gate()).is_paused


async def test_a_refit_between_polars_pause_and_resume_is_seen_by_phase_and_takes_the_trainers_own(
    tmp_path: Path,
) -> None:
    async with scripted_server({}) as engine_url, running_node(tmp_path, engine_url) as node:
        root, gate = f"{node.client.url}/admin/inference", f"{node.client.url}/v1/gate"
        status, problem = await asyncio.to_thread(control, f"{gate}/phases", body={"phases": {"offload": 1}})
        assert (status, problem["code"]) == (409, "conflict")
        for action in ("pause", "resume"):
            assert (await asyncio.to_thread(control, f"{root}/{action}"))[0] == 200
        phases = {"offload_before_refit": 227.3, "NCCL broadcast": 1.7, "drain": 0.1}
        assert (await asyncio.to_thread(control, f"{gate}/phases", body={"phases": phases}))[0] == 200
        status, (seen,) = await asyncio.to_thread(control, f"{gate}/updates", "GET")
        assert (status, seen["mode"], seen["version"]) == (200, "drain", None)
        assert seen["reported"] == {"offload_before_refit": 227.3, "NCCL broadcast": 1.7}
        assert 0 <= seen["drain_s"] + seen["held_s"] < 60
        assert [one.reported for one in await node.client.updates()] == [seen["reported"]]
        timed: Any = {"offload_before_refit": np.float32(0.5), "NCCL broadcast": np.float64(2)}
        await node.client.report_phases(timed)
        assert (await node.client.updates())[0].reported == {"offload_before_refit": 0.5, "NCCL broadcast": 2.0}


@pytest.mark.parametrize(
    "phases",
    [
        None,
        {},
        {"offload": -1},
        {"offload": float("nan")},
        {"offload": float("inf")},
        {"offload": "long"},
        {"offload": None},
        {"": 1},
        {" x": 1},
        {"a\n": 1},
        {"[red]": 1},
        {"x" * 65: 1},
        {"a\nb": 1},
        {"é": 1},
        {str(number): 1 for number in range(33)},
        [["offload", 1]],
    ],
)
async def test_phases_that_are_none_are_refused(tmp_path: Path, phases: Any) -> None:
    async with scripted_server({}) as engine_url, running_node(tmp_path, engine_url) as node:
        await node.client.pause("keep", 60)
        asked = await asyncio.to_thread(control, f"{node.client.url}/v1/gate/phases", body={"phases": phases})
        assert asked[0] == 400
        await node.client.resume()
        assert (await node.client.updates())[0].reported == {}
