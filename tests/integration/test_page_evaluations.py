"""Evaluations over HTTP: stored as they are sent, also over a restart, and compared as `gangline compare` does."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.errors import InvalidRequest, NotFound
from gangline.server.run import serving
from gangline.tasks.evals.comparison import EvaluationComparison, compare_reports
from gangline.tasks.evals.report import Report, Slice
from gangline.wire.client.server import ServerClient
from support.evals.reports import report_of_rewards
from support.service.running import any_plugin

BEFORE = report_of_rewards("before", {"a": (1.0, 1.0), "b": (1.0, 0.0), "c": (0.0, None)})
AFTER = report_of_rewards("after", {"a": (0.0, 0.0), "b": (1.0, 1.0)}, num_left=1)


@asynccontextmanager
async def control_of(data_dir: Path) -> AsyncGenerator[ServerClient]:
    async with (
        serving(data_dir=data_dir, control_token="token", check_task=any_plugin) as running,
        ServerClient(running.url, "token") as client,
    ):
        yield client


async def get(control: ServerClient, path: str, **params: str) -> Any:
    return json.loads(await control.request("GET", path, params=params))


async def send(control: ServerClient, report: Report) -> None:
    await control.request("POST", "/v1/evaluations", body=msgspec.json.encode(report))


async def test_an_evaluation_is_there_as_it_was_sent_also_after_a_restart(tmp_path: Path) -> None:
    async with control_of(tmp_path) as control:
        assert await get(control, "/v1/evaluations") == {"evaluations": []}
        await send(control, BEFORE)
        await send(control, AFTER)
    async with control_of(tmp_path) as control:
        listed = sorted((await get(control, "/v1/evaluations"))["evaluations"], key=itemgetter("name"))
        assert [(one["name"], one["num_left"]) for one in listed] == [("after", 1), ("before", 0)]
        assert msgspec.convert(listed[1]["whole"], Slice, strict=False) == BEFORE.whole
        found = await control.request("GET", f"/v1/evaluations/{BEFORE.evaluation_id}")
        assert msgspec.json.decode(found, type=Report) == BEFORE


async def test_two_are_compared_as_on_the_terminal(tmp_path: Path) -> None:
    async with control_of(tmp_path) as control:
        await send(control, BEFORE)
        await send(control, AFTER)
        path = f"/v1/evaluations/{AFTER.evaluation_id}/compared"
        found = await control.request("GET", path, params={"with": BEFORE.evaluation_id})
    comparison = msgspec.json.decode(found, type=EvaluationComparison)
    assert comparison == compare_reports(BEFORE, AFTER)
    assert [(change.task, change.gain) for change in comparison.tasks] == [("a", -1.0), ("b", 0.5)]


async def test_what_is_no_evaluation_is_said(tmp_path: Path) -> None:
    async with control_of(tmp_path) as control:
        await send(control, BEFORE)
        await send(control, report_of_rewards("apart", {"z": (1.0, 1.0)}))
        one = f"/v1/evaluations/{BEFORE.evaluation_id}"
        for path, params, error in (
            ("/v1/evaluations/none", {}, NotFound),
            ("/v1/evaluations/..%2Fx", {}, InvalidRequest),
            (f"{one}/compared", {}, InvalidRequest),
            (f"{one}/compared", {"with": "none"}, NotFound),
            (f"{one}/compared", {"with": "../x"}, InvalidRequest),
            (f"{one}/compared", {"with": "apart-0123456789ab"}, InvalidRequest),
        ):
            with pytest.raises(error):
                await get(control, path, **params)
        for body in (b"{}", b"[]", b'{"evaluation_id": "x"}', msgspec.json.encode({"name": 1})):
            with pytest.raises(InvalidRequest):
                await control.request("POST", "/v1/evaluations", body=body)
