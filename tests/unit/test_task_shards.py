"""Shards of a task file: each task in just one of them, whoever asks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gangline.cli.main import build_app
from gangline.cli.tasks.files import read_tasks
from gangline.cli.tasks.shards import of_shard
from gangline.cli.tasks.submit import _in_turn  # pyright: ignore[reportPrivateUsage]
from gangline.domain.errors import InvalidRequest
from gangline.domain.views import Submitted
from gangline.tasks.commands.evals.evaluate import _name_of, _spec  # pyright: ignore[reportPrivateUsage]


@given(st.integers(1, 40).flatmap(lambda tasks: st.tuples(st.just(tasks), st.integers(1, tasks))))
def test_shards_share_out_all_tasks_evenly_and_each_once(sizes: tuple[int, int]) -> None:
    num_tasks, num_shards = sizes
    parts = [of_shard(range(num_tasks), f"{first}/{num_shards}") for first in range(1, num_shards + 1)]
    assert sorted(task for part in parts for task in part) == list(range(num_tasks))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(part == sorted(part) for part in parts)


@pytest.mark.parametrize(
    "shard", ["", "1", "0/4", "5/4", "1/0", "-1/4", "1/4/2", "1.0/4", " 1/4", "1/4\n", "a/b", "1/-4", "٣/٤", "01/4"]
)
def test_what_is_no_shard_is_refused(shard: str) -> None:
    with pytest.raises(InvalidRequest, match="--shard must be I/N"):
        of_shard([1, 2, 3, 4, 5], shard)


def test_an_empty_shard_is_refused_and_says_how_many_there_can_be() -> None:
    with pytest.raises(InvalidRequest, match="--shard 4/4 has no task: there are 3, so take 3 shards at most"):
        of_shard("abc", "4/4")


def tasks_at(path: Path, number: int, **fields: Any) -> Path:
    agent = {"harness": "shell", "settings": {"command": "true"}}
    tasks = [{"instruction": f"task {at}", "agent": agent, **fields} for at in range(number)]
    path.write_text(json.dumps(tasks))
    return path


def test_submit_takes_its_shard_of_the_file(tmp_path: Path) -> None:
    path = tasks_at(tmp_path / "tasks.json", 5)
    done = CliRunner().invoke(build_app(), ["submit", str(path), "--shard", "2/2", "--dry-run"])
    assert [task["instruction"] for task in json.loads(done.stdout)] == ["task 1", "task 3"], done.output


def test_an_evaluations_shards_keep_the_names_of_the_whole_file_and_do_not_share_a_folder(tmp_path: Path) -> None:
    path = str(tasks_at(tmp_path / "some.json", 5))
    whole, second = (_spec(path, read_tasks(path), 1, ("shell",), None, shard) for shard in (None, "2/3"))
    assert second.names == (whole.names[1], whole.names[4])
    assert [_name_of(path, None, None, shard) for shard in (None, "2/3")] == ["some", "some-2-of-3"]


class Service:
    """Tasks that end when they are told to."""

    def __init__(self) -> None:
        self.ends: dict[str, asyncio.Event] = {}

    async def submit(self, task: str) -> Submitted:
        self.ends[task] = asyncio.Event()
        return Submitted(task_id=task, created=True, session_ids=())

    async def wait(self, task_id: str) -> None:
        await self.ends[task_id].wait()


@pytest.mark.asyncio
async def test_each_task_is_submitted_when_one_before_it_has_ended_and_never_more_at_a_time() -> None:
    service: Any = Service()
    for task in "ab":
        await service.submit(task)
    turns = _in_turn(service, ["a", "b"], list("cde"))  # type: ignore[list-item]
    coming = asyncio.ensure_future(anext(turns))
    await asyncio.sleep(0)
    assert list(service.ends) == ["a", "b"]
    service.ends["b"].set()
    assert (await coming).task_id == "c"
    service.ends["a"].set()
    service.ends["c"].set()
    assert (await anext(turns)).task_id == "d"
    assert (await anext(turns)).task_id == "e"
    with pytest.raises(StopAsyncIteration):
        await anext(turns)
    assert list(service.ends) == list("abcde")


def test_a_limit_of_tasks_in_flight_needs_somebody_who_waits(tmp_path: Path) -> None:
    path = tasks_at(tmp_path / "tasks.json", 2)
    done = CliRunner().invoke(build_app(), ["submit", str(path), "--in-flight", "1", "--dry-run"])
    assert isinstance(done.exception, InvalidRequest), done.output
    assert "add --wait" in str(done.exception)
