"""Groups for NeMo RL's replay buffer: judged by the kit, by what its trainer makes of them, and step by step."""

from __future__ import annotations

import asyncio
import pickle
import queue
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from gangline.domain.errors import InvalidGroup, ServerUnavailable
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.testing.trainer_conformance import Check, ReadRow, Subject, checks, run_check
from gangline.train.collecting.collector import informative
from gangline.train.collecting.groups import Group, ValiditySettings
from gangline.train.trainers import nemo_rl as adapter
from gangline.train.trainers.nemo_rl import NemoActor, NemoCollector, NemoSettings
from gangline.wire.client.node import NodeClient
from gangline.wire.client.server import ServerClient
from support.node.node import TOKEN, running_node
from support.training.nemo_rl_loop import ReplayBuffer, compared, masks, prompt
from support.training.nemo_rl_service import Gate, Rollouts
from support.training.samples import session, trace
from support.training.service import BROKEN, GOOD


def convert(groups: Sequence[Group], num_samples: int) -> list[dict[str, Any]]:
    return [adapter.to_batch(one, num_samples) for one in groups]


def read(batches: list[dict[str, Any]]) -> list[ReadRow]:
    """By the masks that its trainer makes itself."""
    found = list[ReadRow]()
    for number, batch in enumerate(batches):
        assert {len(batch[name]) for name in batch} == {len(batch["message_log"])}
        assert batch["loss_multiplier"].tolist() == [1.0] * len(batch["message_log"])
        for row, log in enumerate(batch["message_log"]):
            given = torch.cat([message["token_loss_mask"] for message in log])
            assert torch.cat(masks(log)).tolist() == given.tolist()
            length = int(batch["length"][row])
            ids = torch.cat([message["token_ids"] for message in log]).tolist()
            assert prompt(log, length) == ids[:length]
            zeros = [torch.zeros(len(message["token_ids"])) for message in log]
            logprobs = [message.get("generation_logprobs", zero) for message, zero in zip(log, zeros, strict=True)]
            about = batch["extra_env_info"][row]
            versions = np.full(len(ids) - length, -1)
            for version, start, end in about["version_spans"]:
                versions[start:end] = version
            found.append(
                ReadRow(
                    task_id=str(number),
                    session_id=about["session_id"],
                    prompt_ids=ids[:length],
                    response_ids=ids[length:],
                    loss_mask=given.tolist()[length:],
                    logprobs=torch.cat(logprobs).tolist()[length:],
                    versions=versions.tolist(),
                    reward=batch["total_reward"][row].item(),
                )
            )
    return found


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
def test_the_adapter_keeps_the_contract(check: Check) -> None:
    run_check(check, Subject(convert=convert, read=read, contract=adapter.CONTRACT, one_trace_per_session=True))


def test_sessions_are_compared_with_each_other() -> None:
    """Also where tool output follows: as its own prompt each session would be compared with itself."""
    first = session("s0", 1.0, trace(turns=[(10, 2), (11, 2)]))
    second = session("s1", 0.0, trace(turns=[(12, 2), (13, 2)], between=(9, 9, 9)))
    assert compared(adapter.to_batch(Group("task-1", (first, second)), 2)) == [0.5, -0.5]


def test_prompts_that_differ_are_refused_for_they_would_teach_nothing() -> None:
    other = session("s1", 0.0, trace(prompt_ids=np.array([1, 4, 6], np.int32)))
    with pytest.raises(InvalidGroup, match="the prompts of task-1 differ"):
        adapter.to_batch(Group("task-1", (session("s0", 1.0), other)), 2)


def test_traces_that_go_on_from_each_other_are_one_row() -> None:
    first = trace(turns=[(10, 11, 2)], versions=[3])
    known = np.concatenate([first.prompt_ids, first.response_ids])
    then = trace(turns=[(12, 2)], versions=[4], prompt_ids=np.array([*known, 7, 1], np.int32))
    other = session("s1", 0.0, trace(turns=[(13, 2)]))
    batch = adapter.to_batch(Group("task-1", (session("s0", 1.0, first, then), other)), 2)
    (row, _) = read([batch])
    assert (row.prompt_ids, row.response_ids) == ([1, 4, 5], [10, 11, 2, 7, 1, 12, 2])
    assert (row.loss_mask, row.versions) == ([1, 1, 1, 0, 0, 1, 1], [3, 3, 3, -1, -1, 4, 4])
    assert row.logprobs == [-0.5, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5]
    assert compared(batch) == [0.5, -0.5]


def test_traces_that_do_not_fit_into_one_row_are_refused() -> None:
    apart = session("s0", 1.0, trace(), trace(turns=[(12, 2)]))
    with pytest.raises(InvalidGroup, match=r"several traces, and \S+ does not continue from the one before it"):
        adapter.to_batch(Group("task-1", (apart, session("s1", 0.0))), 2)
    told = session("s0", 1.0, trace(reward=0.5), trace(turns=[(12, 2)], reward=1.0))
    with pytest.raises(InvalidGroup, match="their own rewards"):
        adapter.to_batch(Group("task-1", (told, session("s1", 0.0))), 2)


async def test_groups_of_a_restored_buffer_count() -> None:
    """Step 3 has one of its two groups from the checkpoint, and step 4 both."""
    buffer = ReplayBuffer(100)
    for version, target in ((2, 3), (3, 4), (3, 4)):
        await buffer.add({"batch": {"extra_env_info": [{"task_id": f"old{target}"}]}}, version, target)
    async with running(start_version=3, buffer=buffer) as run:
        run.gate.version = 3
        await run.submitted(1)
        run.service.end("t0")
        assert await run.step(3) == ["old3", "t0"]
        assert await run.step(4) == ["old4", "old4"]
        assert len(run.service.submitted) == 1
        await run.refit(4)
        await run.submitted(3)
        for task_id in run.service.open:
            run.service.end(task_id)
        assert await run.step(5) == ["t1", "t2"]


def test_a_session_that_was_cut_short_is_truncated() -> None:
    cut = session("s0", 0.0, outcome="turn_limit")
    long = session("s1", 0.0, trace(finish_reason="length"))
    batch = adapter.to_batch(Group("task-1", (cut, long, session("s2", 1.0))), 3)
    assert batch["truncated"].tolist() == [True, True, False]


def test_groups_may_not_shrink() -> None:
    with pytest.raises(ValidationError, match="groups of one size"):
        NemoSettings(num_samples=2, groups_per_step=1, validity=ValiditySettings(on_invalid="shrink"))


class Run:
    """A collector that runs, and what it meets."""

    def __init__(self, *, max_size: int = 100, num_tasks: int = 1000, **changes: Any) -> None:
        self.gate = Gate()
        self.service = Rollouts(self.gate)
        self.buffer = changes.pop("buffer", None) or ReplayBuffer(max_size)
        admit = changes.pop("admit", None)
        fields: dict[str, Any] = {"num_samples": 2, "groups_per_step": 2, "num_in_flight": 100, "lease_s": 60.0}
        self.collector = NemoCollector(
            self.service,
            [self.gate],
            self.buffer,
            NemoSettings(**fields | changes),
            lambda batch: [{"task_id": name, "instruction": "add"} for name in batch],
            admit=admit,
        )
        self.batches = [[f"t{number}", f"t{number + 1}"] for number in range(0, num_tasks, 2)]
        self.collecting: asyncio.Task[None] = asyncio.create_task(self.collector.start_collection(self.batches))

    async def submitted(self, number: int) -> None:
        await self.while_collecting(self.service.until_submitted(number))

    async def step(self, version: int, *, num_groups: int = 2) -> list[str]:
        """The tasks that this step trains on."""
        groups = await self.while_collecting(self.buffer.step(num_groups, version, 1))
        return [one["batch"]["extra_env_info"][0]["task_id"] for one in groups]

    async def while_collecting(self, awaited: Coroutine[Any, Any, Any]) -> Any:
        """Raises: what ended collecting."""
        work = asyncio.create_task(awaited)
        await asyncio.wait([work, self.collecting], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await self.collecting
        return await work

    async def refit(self, version: int) -> None:
        """As NeMo RL's trainer does it."""
        await self.collector.prepare_for_refit()
        self.collector.set_weight_version(version)
        await self.collector.resume_after_refit()


@asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[Run]:
    run = Run(**changes)
    try:
        yield run
    finally:
        run.collecting.cancel()
        await asyncio.gather(run.collecting, return_exceptions=True)


async def test_each_step_gets_its_groups_and_no_task_is_started_that_none_needs() -> None:
    async with running() as run:
        await run.submitted(4)  # for steps 0 and 1
        for task_id in run.service.open:
            run.service.end(task_id)
        assert await run.step(0) == ["t0", "t1"]
        assert await run.step(1) == ["t2", "t3"]
        assert len(run.service.submitted) == 4
        await run.refit(1)
        await run.submitted(6)
        for task_id in run.service.open:
            run.service.end(task_id)
        assert await run.step(2) == ["t4", "t5"]
        assert len(run.service.submitted) == 6


async def test_more_tasks_start_while_a_slow_one_is_waited_for() -> None:
    async with running() as run:
        await run.submitted(4)
        for task_id in ("t0", "t1", "t2"):
            run.service.end(task_id)
        await run.step(0)
        await run.refit(1)
        await run.submitted(6)
        assert run.service.open == ["t3", "t4", "t5"]


async def test_a_group_too_old_for_the_next_step_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as run:
        await run.submitted(4)
        for task_id in ("t0", "t1", "t2"):
            run.service.end(task_id)
        await run.step(0)
        run.service.traces["t3"] = trace(versions=[0])
        await run.refit(1)
        await run.submitted(6)
        for task_id in ("t4", "t5"):
            run.service.end(task_id)
        assert await run.step(1) == ["t2", "t4"]
        run.service.end("t3")  # sampled by version 0, for step 2 now
        await run.submitted(7)
        run.service.end("t6")
        assert await run.step(2) == ["t5", "t6"]
        assert run.collector.num_too_old == 1
        assert "nemo_rl.too_old task_id=t3 age=2 target=2" in caplog.text


async def test_the_oldest_token_says_how_old_a_group_is() -> None:
    async with running(groups_per_step=1) as run:
        await run.submitted(2)
        old_and_new = trace(turns=[(10, 2), (11, 2)], versions=[0, 1])
        run.service.traces["t0"] = old_and_new
        await run.refit(1)
        run.service.end("t0")
        await run.while_collecting(run.buffer.until_held(1))
        assert [(version, target) for _, version, target in run.buffer.held] == [(0, 0)]


async def test_a_group_that_is_not_whole_ends_collecting_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as run:
        await run.submitted(4)
        run.service.end("t0", (1.0, None))
        with pytest.raises(InvalidGroup, match=r"1 of 2 sessions of t0 are valid .*it has no reward"):
            await run.collecting
        assert run.buffer.held == []
        assert sorted(run.service.cancelled) == ["t1", "t2", "t3"]
        assert "nemo_rl.stopped groups=0" in caplog.text


async def test_groups_that_hardly_differ_are_warned_of_or_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as run:
        await run.submitted(4)
        run.service.end("t0", (0.5, 0.500001))
        run.service.end("t1")
        assert await run.step(0) == ["t0", "t1"]
        assert "group.one_reward task_id=t0" in caplog.text
    async with running(admit=informative) as run:
        await run.submitted(4)
        run.service.end("t0", (1.0, 1.0))
        await run.submitted(5)
        for task_id in ("t1", "t4"):
            run.service.end(task_id)
        assert await run.step(0) == ["t1", "t4"]


async def test_around_a_refit_gates_are_closed_and_get_the_version() -> None:
    async with running(start_version=3) as run:
        await run.submitted(1)
        assert run.gate.said == ["version 3", "resume"]
        run.gate.said.clear()
        await run.refit(4)
        assert run.gate.said == ["pause drain 60", "version 4", "resume"]
        assert run.collector.get_weight_version() == 4
        run.gate.answers = False
        with pytest.raises(ServerUnavailable):
            await run.collector.prepare_for_refit()
        assert run.gate.said[-1] == "resume"


async def test_a_full_buffer_is_waited_for() -> None:
    async with running(max_size=1, groups_per_step=1) as run:
        await run.submitted(2)
        for task_id in ("t0", "t1"):
            run.service.end(task_id)
        assert await run.step(0, num_groups=1) == ["t0"]
        assert await run.step(1, num_groups=1) == ["t1"]


async def test_a_paused_collector_starts_nothing_and_hands_over_what_ends() -> None:
    async with running(groups_per_step=1) as run:
        await run.submitted(2)
        run.collector.pause()
        for task_id in ("t0", "t1"):
            run.service.end(task_id)
        await run.step(0, num_groups=1)
        await run.refit(1)
        await run.step(1, num_groups=1)
        assert len(run.service.submitted) == 2
        run.collector.resume()
        await run.submitted(3)


async def test_it_ends_with_its_tasks() -> None:
    async with running(num_tasks=2, groups_per_step=1) as run:
        await run.submitted(2)
        for task_id in ("t0", "t1"):
            run.service.end(task_id)
        await run.refit(1)
        await run.collecting
        assert len(run.buffer.held) == run.collector.num_pushed == 2


async def test_the_gate_of_a_real_node_is_closed_around_a_refit(tmp_path: Path) -> None:
    """Its clients are entered when collecting starts, so that an actor elsewhere can be given them."""
    script = {"default": {"text": "as you wish"}}
    async with (
        scripted_server(script) as engine_url,
        running_node(tmp_path, engine_url) as node,
        serving(data_dir=tmp_path / "server", control_token=None) as server,
    ):
        clients = (ServerClient(server.url), NodeClient(node.client.url, TOKEN))
        service, gate = pickle.loads(pickle.dumps(clients))
        settings = NemoSettings(num_samples=2, groups_per_step=1, start_version=3)
        collector = NemoCollector(service, [gate], ReplayBuffer(9), settings, lambda one: [one])
        await collector.start_collection([])
        assert (await node.client.gate()).version == 3
        await collector.prepare_for_refit()
        assert (await node.client.gate()).is_paused
        collector.set_weight_version(4)
        await collector.resume_after_refit()
        state = await node.client.gate()
        assert (state.is_paused, state.version) == (False, 4)
        await collector.stop()


def test_an_actor_keeps_the_order_of_calls_and_tells_what_ended_it() -> None:
    gate, pushed = Gate(), queue.SimpleQueue[tuple[int, int]]()
    service = Rollouts(gate, t0=GOOD, t1=GOOD, t2=GOOD, t3=BROKEN)

    class Buffer(ReplayBuffer):
        async def add(self, trajectory: dict[str, Any], weight_version: int, target_weight_version: int) -> str:
            pushed.put((weight_version, target_weight_version))
            return "success"

    actor = actor_of(service, [gate], Buffer(9), next_task_index=5)
    assert actor.get_status() == status(running=False)
    assert actor.get_dataloader_state() == {}
    actor.start_collection(Loader(f"t{number}" for number in range(4)))
    assert actor.get_status()["running"]
    with pytest.raises(RuntimeError, match="started before"):
        actor.start_collection([])
    assert [pushed.get(timeout=60) for _ in range(2)] == [(0, 0), (0, 1)]

    def refit(version: int) -> None:
        actor.prepare_for_refit()
        actor.set_weight_version(version)
        actor.resume_after_refit()

    refit(1)
    assert gate.said[-3:] == ["pause drain 1800", "version 1", "resume"]
    assert pushed.get(timeout=60) == (1, 2)

    def refit_for_ever() -> None:
        while True:
            refit(2)

    with pytest.raises(InvalidGroup, match="1 of 2 sessions of t3"):
        refit_for_ever()
    with pytest.raises(InvalidGroup, match="1 of 2 sessions of t3"):
        actor.check_health()
    told = actor.get_status()
    assert told == status(running=False, errored=True) | {"error": told["error"]}
    assert told["error"].startswith("InvalidGroup: 1 of 2 sessions of t3")
    assert (actor.get_weight_version(), actor.get_dataloader_state()) == (2, {"num_yielded": 4})
    assert actor.get_rollouts_state() == {"next_ng_task_index": 8}
    assert actor.get_efficiency_metrics()["gangline/gates_closed"] > 0
    assert actor.drain_payload_metrics() == {}
    actor.stop()


def status(**changes: Any) -> dict[str, Any]:
    told = {"running": True, "data_exhausted": False, "errored": False, "error": None, "inflight_workers": 0}
    return told | changes


def actor_of(service: Any, gates: Sequence[Any], buffer: ReplayBuffer, **options: Any) -> NemoActor:
    settings = NemoSettings(num_samples=2, groups_per_step=1)
    one = lambda name: [{"task_id": name, "instruction": "add"}]  # noqa: E731
    return NemoActor(lambda: NemoCollector(service, gates, buffer, settings, one), **options)


class Loader:
    """A data loader that knows how far it is."""

    def __init__(self, items: Iterable[str]) -> None:
        self.items = list(items)
        self.num_yielded = 0

    def __iter__(self) -> Iterator[str]:
        for item in self.items:
            self.num_yielded += 1
            yield item

    def state_dict(self) -> dict[str, int]:
        return {"num_yielded": self.num_yielded}


def test_an_actor_tells_that_its_data_is_exhausted() -> None:
    actor = actor_of(Rollouts(Gate(), t0=GOOD), [], ReplayBuffer(9))
    actor.start_collection(Loader(["t0"]))
    actor.set_weight_version(1)
    while actor.get_status()["running"]:
        time.sleep(0.001)  # in another thread, that tells nobody
    assert actor.get_status() == status(running=False, data_exhausted=True)
    actor.check_health()
    actor.stop()


def test_an_actor_that_is_stopped_cancels_what_is_in_flight() -> None:
    service = Rollouts(Gate())
    actor = actor_of(service, [], ReplayBuffer(9))
    actor.pause()
    actor.start_collection(["t0", "t1", "t2"])
    actor.resume()
    while len(service.submitted) < 2:
        time.sleep(0.001)  # in another thread, that tells nobody
    actor.stop()
    assert sorted(service.cancelled) == ["t0", "t1"]
