"""Training runs over HTTP: curves, steps with the groups behind them, comparisons; also while a run is written."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.errors import InvalidRequest, NotFound
from gangline.server.run import serving
from gangline.train.runs.log import RunLog
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode, any_plugin, request
from support.training.fakes import step_record
from support.training.recorded_runs import TASKS, write_learning_run, write_run

TOKEN = "control-token"


@pytest.fixture
async def control(tmp_path: Path) -> AsyncIterator[ServerClient]:
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        yield client


async def get(control: ServerClient, path: str, **params: str) -> Any:
    return json.loads(await control.request("GET", path, params=params))


async def test_a_run_is_listed_and_its_curves_follow_its_folder(control: ServerClient, tmp_path: Path) -> None:
    assert await get(control, "/v1/runs") == {"runs": []}
    folder = write_run(tmp_path, "mine")
    (run,) = (await get(control, "/v1/runs"))["runs"]
    assert (run["name"], run["state"], run["num_done"], run["num_steps"]) == ("mine", "stopped", 1, 2)
    curves = await get(control, "/v1/runs/mine")
    assert (curves["steps"], curves["every"], curves["curves"]["learner/loss"]) == ([1], 1, [0.1])
    assert [one["step"] for one in curves["evaluations"]] == [0]
    log = RunLog(folder, last_step=1)
    log.write(msgspec.structs.replace(step_record(), step=2, learner={"entropy": 0.5}))
    curves = await get(control, "/v1/runs/mine")
    assert curves["curves"]["learner/loss"] == [0.1, None]
    assert curves["curves"]["learner/entropy"] == [None, 0.5]
    assert (await get(control, "/v1/runs"))["runs"][0]["num_done"] == 2


async def test_a_long_run_is_thinned_and_keeps_its_last_step(control: ServerClient, tmp_path: Path) -> None:
    write_learning_run(tmp_path, "long", 25)
    curves = await get(control, "/v1/runs/long", points="10")
    assert (curves["every"], curves["steps"]) == (3, [1, 4, 7, 10, 13, 16, 19, 22, 25])
    assert len(curves["curves"]["rollout/reward_mean"]) == 9


async def test_a_step_leads_to_its_groups_and_their_sessions(control: ServerClient, tmp_path: Path) -> None:
    await control.submit(request("known", num_samples=2))
    await FakeNode(control).finish(await FakeNode(control).lease())
    write_learning_run(tmp_path, "mine", 2, groups=("known", "gone"))
    step = await get(control, "/v1/runs/mine/steps/2")
    assert step["record"]["step"] == 2
    known, gone = step["groups"]
    assert (known["is_known"], known["mean_reward"], known["rewards"]) == (True, 1.0, [1.0, 1.0])
    assert known["sessions"] == ["known.0", "known.1"]
    assert (gone["is_known"], gone["sessions"]) == (False, [])


async def test_two_runs_are_compared(control: ServerClient, tmp_path: Path) -> None:
    write_run(tmp_path, "base", [0.0] * TASKS)
    write_run(tmp_path, "fast", [1.0] * TASKS, learner={"learning_rate": 1e-5})
    found = await get(control, "/v1/runs/base/compared", **{"with": "fast"})
    assert [arm["runs"] for arm in found["arms"]] == [["base"], ["fast"]]
    assert found["arms"][1]["difference"]["mean"] == 1.0
    assert "learner.learning_rate" in found["arms"][1]["settings"]


async def test_what_is_no_run_is_said(control: ServerClient, tmp_path: Path) -> None:
    write_run(tmp_path, "mine")
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "lineage.json").write_text("{")
    assert [run["name"] for run in (await get(control, "/v1/runs"))["runs"]] == ["mine"]
    for path, error in (
        ("/v1/runs/none", NotFound),
        ("/v1/runs/mine/steps/9", NotFound),
        ("/v1/runs/mine/steps/-1", InvalidRequest),
        ("/v1/runs/mine/compared", InvalidRequest),
        ("/v1/runs/broken", InvalidRequest),
        ("/v1/runs/..%2Fmine", InvalidRequest),
    ):
        with pytest.raises(error):
            await get(control, path)
