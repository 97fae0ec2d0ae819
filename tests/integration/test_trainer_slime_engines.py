"""slime's engines at the nodes of a real service, and nobody at them while slime trains.

The order of its loops is written here after `train.py` and `train_async.py` at 624b824; `tests/trainers/test_slime.py`
runs them themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gangline.domain.errors import (
    Conflict,
    EngineIncapable,
    EngineUnavailable,
    InvalidRequest,
    NodeError,
    WeightsNotLoaded,
)
from gangline.train.trainers.slime import SlimeRollout, SupplySettings
from gangline.train.trainers.slime.router import router_of
from gangline.train.trainers.slime.supply import EngineSupply
from support.engines.sglang_engine import sglang_server
from support.engines.trained_sglang import SglangRouter, TrainedSglang
from support.node.node import TOKEN
from support.slime.service import SUPPLY, EngineService, Prompts, slime_arguments, task_of
from support.slime.types import Sample


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_KEY", TOKEN)


@asynccontextmanager
async def rollout_of(
    running: EngineService, folder: Path, tasks: Callable[[Any], dict[str, Any]] = task_of
) -> AsyncGenerator[SlimeRollout]:
    options: dict[str, Any] = {"token_env": "TRAINER_KEY", "sample_type": Sample, "supply": SUPPLY}
    rollout = SlimeRollout(running.client.url, tasks, folder / "inbox", **options)
    try:
        yield rollout
    finally:
        await asyncio.to_thread(rollout.stop)


class Loop:
    """What slime does between rollout calls, at all engines."""

    def __init__(self, running: EngineService) -> None:
        self.running = running
        self.version = 0

    async def post(self, path: str, **body: Any) -> None:
        async with aiohttp.ClientSession() as http:
            for url in self.running.engines:
                async with http.post(url + path, json=body) as answer:
                    assert answer.status == 200

    async def update_weights(self) -> None:
        self.version += 1
        await self.post("/pause_generation")
        await self.post("/update_weights_from_tensor", weight_version=str(self.version))
        await self.post("/continue_generation")


def versions(batch: Any) -> list[list[str]]:
    return [sample.weight_versions for group in batch for session in group for sample in session]


@pytest.mark.parametrize("colocate", [False, True])
async def test_the_synchronous_loop_finds_its_engines_idle_and_rows_say_its_versions(
    tmp_path: Path, colocate: bool
) -> None:
    async with EngineService.running(tmp_path, TrainedSglang(), TrainedSglang()) as running:
        args = slime_arguments(colocate=colocate, **running.address)
        prompts, loop = Prompts(Sample), Loop(running)
        await loop.update_weights()
        async with rollout_of(running, tmp_path) as rollout:
            for rollout_id in range(3):
                batch = await asyncio.to_thread(rollout, args, rollout_id, prompts)
                assert versions(batch) == [[str(rollout_id + 1)] * 2] * 4  # two turns each
                if colocate:
                    await loop.post("/release_memory_occupation")
                assert (await running.node.client.gate()).is_drained
                if colocate:
                    await loop.post("/resume_memory_occupation")
                await loop.update_weights()
            assert {view.url for view in await running.node.client.backends()} == set(running.engines)
        assert running.disturbed == []
        assert not (await running.node.client.gate()).is_paused


async def test_sessions_that_are_carried_over_wait_at_the_gate_and_say_both_versions(tmp_path: Path) -> None:
    async with EngineService.running(tmp_path, TrainedSglang(reply_s=0.1)) as running:
        args = slime_arguments(rollout_batch_size=1, global_batch_size=2, partial_rollout=True, use_tis=True)
        vars(args).update(running.address, over_sampling_batch_size=3)
        prompts, loop = Prompts(Sample), Loop(running)
        found = list[list[str]]()

        def every_second_is_long(sample: Sample) -> dict[str, Any]:
            assert sample.index is not None
            return task_of(sample, turns=1 + 4 * (sample.index % 2))

        async with rollout_of(running, tmp_path, every_second_is_long) as rollout:
            while not any(len(set(mixed)) > 1 for mixed in found):
                await loop.update_weights()
                found += versions(await asyncio.to_thread(rollout, args, loop.version, prompts))
        assert running.disturbed == []
        assert all(mixed == sorted(mixed) for mixed in found)


async def test_what_is_unfinished_is_cancelled_where_slime_carries_nothing_over(tmp_path: Path) -> None:
    async with EngineService.running(tmp_path, TrainedSglang(reply_s=0.2)) as running:
        args = slime_arguments(rollout_batch_size=1, global_batch_size=2, over_sampling_batch_size=3, **running.address)
        loop = Loop(running)
        await loop.update_weights()
        async with rollout_of(running, tmp_path) as rollout:
            batch = await asyncio.to_thread(rollout, args, 0, Prompts(Sample))
            assert versions(batch) == [["1", "1"]] * 2
            await loop.update_weights()
            assert (await running.client.status()).tasks.get("running", 0) == 0
        assert running.disturbed == []


async def test_engines_that_change_are_given_to_nodes_within_a_call_and_between(tmp_path: Path) -> None:
    async with EngineService.running(tmp_path, TrainedSglang()) as running, sglang_server(TrainedSglang()) as other:
        supply = supply_of(running)
        (first,) = running.engines
        async with supply, supply.opened():
            assert await engines_at(running) == {first}
            running.router.urls.append(other)
            while await engines_at(running) != {first, other}:
                await asyncio.sleep(0.01)
            running.router.urls.remove(first)
            while await engines_at(running) != {other}:
                await asyncio.sleep(0.01)
        async with supply_of(running) as again, again.opened():
            assert await engines_at(running) == {other}


def supply_of(running: EngineService, **changes: Any) -> EngineSupply:
    settings = SupplySettings(poll_s=0.05, **changes)
    return EngineSupply(running.client, router_of(slime_arguments(**running.address)), TOKEN, settings)


async def engines_at(running: EngineService) -> set[str]:
    return {view.url for view in await running.node.client.backends()}


async def test_a_node_that_opens_between_calls_is_closed_again(tmp_path: Path) -> None:
    async with EngineService.running(tmp_path, TrainedSglang()) as running:
        async with supply_of(running) as supply:
            async with supply.opened():
                assert not (await running.node.client.gate()).is_paused
            await running.node.client.resume()  # as one that was started again
            while not (await running.node.client.gate()).is_paused:
                await asyncio.sleep(0.01)
        assert not (await running.node.client.gate()).is_paused


async def test_a_closed_gate_outlives_its_lease_as_long_as_the_trainer_lives(tmp_path: Path) -> None:
    service = EngineService.running(tmp_path, TrainedSglang())
    async with service as running, supply_of(running, lease_s=3.0) as supply:
        async with supply.opened():
            pass
        await asyncio.sleep(4)  # nothing tells that a lease did not run out
        state = await running.node.client.gate()
        assert (state.is_paused, state.num_expired_leases) == (True, 0)


async def test_an_engine_that_is_not_the_trainers_is_refused(tmp_path: Path) -> None:
    async with EngineService.running(tmp_path, TrainedSglang()) as running, sglang_server(TrainedSglang()) as other:
        await running.node.client.add_backend(other, kind="sglang")
        async with supply_of(running) as supply:
            with pytest.raises(Conflict, match=r"not the trainer's.*gangline backend remove b1"):
                async with supply.opened():
                    pass


async def test_a_trainer_that_counts_from_the_beginning_again_is_refused(tmp_path: Path) -> None:
    async with EngineService.running(tmp_path, TrainedSglang(weight_version="1")) as running:
        await running.node.client.set_version(7)
        async with supply_of(running) as supply:
            with pytest.raises(InvalidRequest, match=r"had policy version 7.*say 1.*update_weight_start_version: 7"):
                async with supply.opened():
                    pass


async def test_engines_with_different_weights_are_refused(tmp_path: Path) -> None:
    engines = TrainedSglang(weight_version="1"), TrainedSglang(weight_version="2")
    async with EngineService.running(tmp_path, *engines) as running, supply_of(running) as supply:
        with pytest.raises(WeightsNotLoaded, match=r"has 1.*has 2|has 2.*has 1"):
            async with supply.opened():
                pass


async def test_an_engine_that_died_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with EngineService.running(tmp_path, TrainedSglang()) as running:
        running.router.urls.append("http://127.0.0.1:9")
        async with supply_of(running) as supply, supply.opened():
            assert await engines_at(running) == set(running.engines)
        assert "engines.silent url=http://127.0.0.1:9" in caplog.text
        running.router.urls = ["http://127.0.0.1:9"]
        async with supply_of(running) as supply:
            with pytest.raises(EngineUnavailable, match="none of the trainer's engines answers"):
                async with supply.opened():
                    pass


async def test_calls_that_do_not_end_are_told_before_slime_breaks_them(tmp_path: Path) -> None:
    engine = TrainedSglang()
    async with EngineService.running(tmp_path, engine) as running, supply_of(running, patience_s=0.2) as supply:

        async def one_call() -> None:
            opened = await running.node.client.open_session()
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {opened.api_key}"}) as http:
                body = {"model": opened.model, "messages": [{"role": "user", "content": "hi"}]}
                await http.post(opened.base_url + "/chat/completions", json=body)

        async def call_that_stays() -> None:
            async with supply.opened():
                engine.reply_s, before = 1000.0, engine.num_chats
                calls.append(asyncio.create_task(one_call()))
                while engine.num_chats == before:
                    await asyncio.sleep(0.01)

        calls = list[asyncio.Task[None]]()
        with pytest.raises(NodeError, match=r"still in flight 0\.2 s after the rollout"):
            await call_that_stays()
        calls[0].cancel()


async def test_routers_that_cannot_be_used_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"args\.sglang_router_ip"):
        router_of(slime_arguments())
    routers = {"actor": ("127.0.0.1", 1), "ref": ("127.0.0.1", 2)}
    args = slime_arguments(sglang_model_routers=routers, sglang_router_ip="127.0.0.1", sglang_router_port=1)
    with pytest.raises(InvalidRequest, match=r"several models \(actor, ref\)"):
        router_of(args)
    with pytest.raises(InvalidRequest, match="no model 'critic'"):
        router_of(args, "critic")
    assert router_of(args, "ref").url == "http://127.0.0.1:2"
    async with SglangRouter(["http://127.0.0.1:9"], worker_type="prefill").serving() as address:
        router = router_of(slime_arguments(**address))
        with pytest.raises(EngineIncapable, match="only does prefill"):
            await router.engines()
        await router.close()
    async with SglangRouter([]).serving() as address:
        router = router_of(slime_arguments(**address))
        with pytest.raises(EngineUnavailable, match="lists no engine"):
            await router.engines()
        await router.close()


async def test_miless_own_router_lists_urls() -> None:
    async with SglangRouter(["http://127.0.0.1:9/"]).serving() as address:
        router = router_of(slime_arguments(use_miles_router=True, **address))
        assert await router.engines() == ["http://127.0.0.1:9"]
        await router.close()
