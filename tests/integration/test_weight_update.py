"""New weights for a service: in order, told truly, and with everything open again whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import EngineIncapable, EngineUnavailable, InvalidRequest, WeightsNotLoaded
from gangline.models.engine_server.app import create_app, serving
from gangline.serving.embedded.model import LanguageModel, load_model
from gangline.serving.embedded.sampler import EmbeddedSampler
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.train.weights.update import ServiceWeights
from support.engines.models import greedy, reference_model, write_tiny_model
from support.engines.sglang_engine import FakeSglang, sglang_server
from support.node.backends import KillableEngine
from support.node.node import RunningNode, running_node
from support.node.weights import (
    HeldLoad,
    Nodes,
    agent,
    break_at_weights,
    refuse_weights,
    sampler_of,
    save,
    versions_sampled,
    weights_of,
)

MODES = pytest.mark.parametrize("mode", ["drain", "keep"])


@dataclass
class Service:
    nodes: list[RunningNode]
    engines: list[KillableEngine]
    weights: ServiceWeights

    async def gates(self) -> list[tuple[bool, int | None]]:
        states = [await node.client.gate() for node in self.nodes]
        return [(state.is_paused, state.version) for state in states]

    def versions(self) -> list[int]:
        return [sampler_of(engine).weight_version for engine in self.engines]

    async def is_all_open(self) -> bool:
        """Every node answers a call."""
        return all([await versions_sampled(node) for node in self.nodes])


@asynccontextmanager
async def service(
    folder: Path, *engines_of_nodes: tuple[int, ...], script: dict[str, Any] | None = None, **options: Any
) -> AsyncGenerator[Service]:
    """engines_of_nodes: numbers of the engines that each node has."""
    async with AsyncExitStack() as stack:
        number = 1 + max(max(engines) for engines in engines_of_nodes)
        engines = [await stack.enter_async_context(KillableEngine(script)) for _ in range(number)]
        nodes = [
            await stack.enter_async_context(
                running_node(folder / f"node{index}", *(engines[i].url for i in chosen), node_id=f"n{index}")
            )
            for index, chosen in enumerate(engines_of_nodes)
        ]
        yield Service(nodes, engines, weights_of(folder, *nodes, **options))


@MODES
async def test_all_engines_and_nodes_get_the_weights_and_a_shared_engine_gets_them_once(
    tmp_path: Path, mode: str
) -> None:
    async with service(tmp_path, (0, 1), (1,), mode=mode) as running:
        loads: list[str] = []
        for engine in running.engines:

            async def load(path: Path) -> None:
                loads.append(path.name)

            sampler_of(engine).load_weights = load
        profile = await running.weights.push(save, 3)
        assert (profile.version, profile.num_engines, profile.num_nodes, profile.num_bytes) == (3, 2, 2, 7)
        assert loads == ["v3", "v3"]
        assert running.versions() == [3, 3]
        assert await running.gates() == [(False, 3), (False, 3)]
        phases = (profile.transfer_s, profile.pause_s, profile.drain_s, profile.load_s, profile.resume_s)
        assert sum(phases) == pytest.approx(profile.total_s)
        told = {name: seconds for name, seconds in profile.phases.items() if name != "drain"}
        for node in running.nodes:
            (seen,) = await node.client.updates()
            assert (seen.version, seen.mode, seen.reported) == (3, mode, told)
        assert await versions_sampled(running.nodes[0]) == [3]
        assert await running.weights.latest_version() == 3


async def test_weights_are_written_while_the_service_samples(tmp_path: Path) -> None:
    async with service(tmp_path, (0,)) as running:
        loop = asyncio.get_running_loop()

        def slow(folder: Path) -> None:
            asyncio.run_coroutine_threadsafe(running.is_all_open(), loop).result()
            save(folder)

        await running.weights.push(slow, 1)
        assert running.versions() == [1]


async def test_what_the_trainer_cannot_write_never_reaches_the_service(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        raise OSError("the disk is full")

    async with service(tmp_path, (0,)) as running:
        with pytest.raises(OSError, match="full"):
            await running.weights.push(broken, 1)
        assert await running.gates() == [(False, None)]


@MODES
async def test_a_half_done_update_says_so_and_is_repaired_by_pushing_again(tmp_path: Path, mode: str) -> None:
    async with service(tmp_path, (0, 1), mode=mode) as running:
        await running.weights.push(save, 1)
        refuse_weights(running.engines[1])
        with pytest.raises(
            WeightsNotLoaded, match=r"mixed: only \S+ has the new ones.*Push it again.*shapes"
        ) as failed:
            await running.weights.push(save, 2)
        assert running.engines[1].url in failed.value.message
        assert running.versions() == [2, 1]
        known = {view.url: view.weights_known for view in await running.nodes[0].client.backends()}
        assert known == {running.engines[0].url: True, running.engines[1].url: False}
        assert await running.is_all_open()
        del sampler_of(running.engines[1]).load_weights
        await running.weights.push(save, 2)
        assert running.versions() == [2, 2]
        assert await running.weights.lost(2) == []
        known = {view.url: view.weights_known for view in await running.nodes[0].client.backends()}
        assert set(known.values()) == {True}


async def test_an_engine_that_breaks_while_it_loads_samples_tokens_of_unknown_version(tmp_path: Path) -> None:
    async with service(tmp_path, (0,)) as running:
        await running.weights.push(save, 1)
        break_at_weights(running.engines[0])
        with pytest.raises(WeightsNotLoaded, match=r"nobody knows the weights of http.*out of memory"):
            await running.weights.push(save, 2)
        assert await running.gates() == [(False, 1)]
        assert await versions_sampled(running.nodes[0]) == [-1]
        assert [engine.version for engine in await running.weights.lost(1)] == [None]


async def test_nothing_is_loaded_when_one_engine_cannot_be_held(tmp_path: Path) -> None:
    async with service(tmp_path, (0, 1)) as running:
        await running.weights.push(save, 1)
        await running.engines[1].kill()
        with pytest.raises(WeightsNotLoaded, match=r"all engines keep the weights that they had.*Push it again"):
            await running.weights.push(save, 2)
        assert sampler_of(running.engines[0]).weight_version == 1
        assert await running.gates() == [(False, 1)]
        assert await running.is_all_open()


async def test_a_version_that_would_go_back_is_refused_before_anything_is_closed(tmp_path: Path) -> None:
    async with service(tmp_path, (0,)) as running:
        await running.weights.push(save, 5)
        with pytest.raises(InvalidRequest, match="would go back"):
            await running.weights.push(save, 4)
        assert await running.gates() == [(False, 5)]


async def test_a_drain_that_takes_too_long_leaves_the_old_weights(tmp_path: Path) -> None:
    slow = {"default": {"text": "word " * 200, "token_delay_s": 3600}}
    async with service(tmp_path, (0,), script=slow, patience_s=0.2) as running:
        opened = await running.nodes[0].client.open_session()
        async with agent(opened) as client:
            call = await client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": "go"}], stream=True
            )
            await anext(aiter(call))
            with pytest.raises(WeightsNotLoaded, match=r"did not end within 0\.2 s"):
                await running.weights.push(save, 1)
            await call.close()
        assert running.versions() == [0]
        assert await running.gates() == [(False, None)]


async def test_the_lease_is_renewed_while_loading_takes_longer(tmp_path: Path) -> None:
    async with service(tmp_path, (0,), lease_s=3.0) as running:
        load = HeldLoad(running.engines[0])
        pushing = asyncio.create_task(running.weights.push(save, 1))
        await load.began.wait()
        left_s = (await running.nodes[0].client.gate()).lease_left_s
        async with asyncio.timeout(30):
            while (now_s := (await running.nodes[0].client.gate()).lease_left_s) <= left_s:
                left_s = now_s
                await asyncio.sleep(0.05)
        load.goes_on.set()
        await pushing
        assert (await running.nodes[0].client.gate()).num_expired_leases == 0


@MODES
async def test_a_push_that_is_cancelled_lets_everything_go(tmp_path: Path, mode: str) -> None:
    async with service(tmp_path, (0,), mode=mode) as running:
        await running.weights.push(save, 1)
        load = HeldLoad(running.engines[0])
        pushing = asyncio.create_task(running.weights.push(save, 2))
        await load.began.wait()
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing
        assert await running.gates() == [(False, 1)]
        assert await versions_sampled(running.nodes[0]) == [-1]


async def test_only_the_last_folders_stay(tmp_path: Path) -> None:
    async with service(tmp_path, (0,), keep_last=2) as running:
        for version in range(4):
            await running.weights.push(save, version)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["v2", "v3"]


async def test_an_engine_that_was_started_again_is_found_and_given_its_weights_back(tmp_path: Path) -> None:
    async with service(tmp_path, (0, 1), (1,)) as running:
        await running.weights.push(save, 3)
        assert await running.weights.lost(3) == []
        await running.engines[1].kill()
        await running.engines[1].start()
        assert [(one.url, one.version) for one in await running.weights.lost(3)] == [(running.engines[1].url, 0)]

        def never(folder: Path) -> None:
            raise AssertionError("the weights are there")

        profile = await running.weights.ensure(3, never)
        assert profile is not None
        assert (profile.num_engines, profile.num_nodes, profile.transfer_s < profile.total_s) == (1, 2, True)
        assert running.versions() == [3, 3]
        assert await running.weights.ensure(3, never) is None


async def test_a_trainer_in_its_next_life_writes_the_weights_again(tmp_path: Path) -> None:
    async with service(tmp_path, (0,)) as running:
        await running.weights.push(save, 3)
        await running.engines[0].kill()
        await running.engines[0].start()
        again = weights_of(tmp_path, *running.nodes)
        assert await again.ensure(3, save) is not None
        assert running.versions() == [3]


async def test_a_node_that_does_not_know_the_version_is_told(tmp_path: Path) -> None:
    async with service(tmp_path, (0,), (0,)) as running:
        alone = weights_of(tmp_path, running.nodes[0])
        await alone.push(save, 2)
        assert await running.gates() == [(False, 2), (False, None)]
        profile = await running.weights.ensure(2, save)
        assert profile is not None
        assert (profile.num_engines, profile.num_nodes) == (0, 1)
        assert await running.gates() == [(False, 2), (False, 2)]


async def test_a_node_that_was_not_heard_for_long_is_left_out(tmp_path: Path) -> None:
    async with service(tmp_path, (0,), (0,)) as running:
        roster = Nodes(*running.nodes)
        roster.ages_s = [0.0, 61.0]
        weights = ServiceWeights(roster, tmp_path / "weights", token="control-token")
        assert (await weights.push(save, 1)).num_nodes == 1
        roster.ages_s = [61.0, 61.0]
        with pytest.raises(EngineUnavailable, match="no engine to give weights to"):
            await weights.push(save, 2)


async def test_sglang_gets_weights_and_version_in_one_call(tmp_path: Path) -> None:
    fake = FakeSglang(weight_version="default")
    async with sglang_server(fake) as url, running_node(tmp_path / "node", url) as node:
        weights = weights_of(tmp_path, node)
        assert [one.version for one in await weights.lost(4)] == [None]
        await weights.push(save, 4)
        folder = str(tmp_path / "weights" / "v4")
        assert fake.controlled == [
            ("/pause_generation", {"mode": "retract"}),
            ("/update_weights_from_disk", {"model_path": folder, "weight_version": "4", "flush_cache": True}),
            ("/continue_generation", {}),
        ]
        assert await versions_sampled(node, "sg-model") == [4]
        fake.can_load = False
        with pytest.raises(WeightsNotLoaded, match=r"keep the weights that they had.*shapes differ"):
            await weights.push(save, 5)
        assert await versions_sampled(node, "sg-model") == [4]


async def test_calls_in_flight_cannot_be_kept_by_an_engine_with_one_version_for_a_reply(tmp_path: Path) -> None:
    fake = FakeSglang()
    async with sglang_server(fake) as url, running_node(tmp_path / "node", url) as node:
        with pytest.raises(EngineIncapable, match="use mode `drain`"):
            await weights_of(tmp_path, node, mode="keep").push(save, 4)
        assert fake.controlled == []


@asynccontextmanager
async def embedded_engine(model: Path, port: int = 0) -> AsyncGenerator[str]:
    sampler = EmbeddedSampler(LanguageModel(load_model(model)), TinyTokenizer(), model_name="tiny", threads=1)
    async with serving(create_app(sampler), port=port) as url:
        yield url
    await sampler.close()


def tiny_model(folder: Path, seed: int) -> Path:
    return write_tiny_model(folder, seed=seed, vocab_size=640)


async def sampled(node: RunningNode) -> tuple[list[int], list[int], list[int]]:
    """Prompt, greedy ids and their versions of one call."""
    opened = await node.client.open_session()
    async with agent(opened) as client:
        messages: Any = [{"role": "user", "content": "hello"}]
        await client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0.0)
    result = await node.client.finalize(opened.session_id)
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    return trace.prompt_ids.tolist(), trace.response_ids.tolist(), trace.response_versions.tolist()


@MODES
async def test_real_engines_sample_from_the_weights_that_were_pushed_and_say_what_they_have_after_a_restart(
    tmp_path: Path, mode: str
) -> None:
    old, new = tiny_model(tmp_path / "old", 0), tiny_model(tmp_path / "new", 1)
    async with AsyncExitStack() as stack:
        living = await stack.enter_async_context(embedded_engine(old))
        dying = AsyncExitStack()
        url = await dying.enter_async_context(embedded_engine(old))
        nodes = [
            await stack.enter_async_context(running_node(tmp_path / f"node{index}", engine, node_id=f"n{index}"))
            for index, engine in enumerate((living, url))
        ]
        weights = weights_of(tmp_path, *nodes, mode=mode)
        await weights.push(lambda folder: reference_model(new).save_pretrained(folder), 7)
        for node in nodes:
            prompt, ids, versions = await sampled(node)
            assert ids == greedy(reference_model(new), prompt, len(ids))
            assert versions == [7] * len(ids)
        await dying.aclose()
        await stack.enter_async_context(embedded_engine(old, int(url.rpartition(":")[2])))
        prompt, ids, versions = await sampled(nodes[1])
        assert ids == greedy(reference_model(old), prompt, len(ids))
        assert versions == [0] * len(ids)
        assert [(one.url, one.version) for one in await weights.lost(7)] == [(url, 0)]
        await weights.ensure(7, save)
        prompt, ids, versions = await sampled(nodes[1])
        assert ids == greedy(reference_model(new), prompt, len(ids))
        assert versions == [7] * len(ids)
