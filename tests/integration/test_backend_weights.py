"""Engines that lost their weights, or are held by a dead trainer: what they sample is not passed off as the gate's
policy version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from gangline.domain.conversation import Message, ModelCall, Text
from gangline.models.engines.contract import Engine, EngineRequest, ReplyAccumulator
from gangline.node.backends.pool import BackendPool
from support.node.backends import KillableEngine

HELLO = EngineRequest(call=ModelCall(dialect="d", model="m", messages=(Message("user", (Text("hello"),)),)))


@asynccontextmanager
async def pool_of(number: int) -> AsyncGenerator[tuple[BackendPool, list[KillableEngine]]]:
    """One check that fails makes a backend unhealthy, and checks are made by the test."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(KillableEngine()) for _ in range(number)]
        pool = BackendPool(probe_interval_s=3600.0, max_failures=1)
        stack.push_async_callback(pool.close)
        for engine in engines:
            await pool.add(engine.url)
        yield pool, engines


async def knows_weights(engine: Engine, *, stream: bool = False) -> bool:
    if not stream:
        return (await engine.chat(HELLO)).choices[0].weights_known
    gathered = ReplyAccumulator()
    async for delta in engine.stream(HELLO):
        gathered.feed(delta)
    return gathered.reply().choices[0].weights_known


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_came_back_has_unknown_weights_until_a_version_is_set(stream: bool) -> None:
    async with pool_of(1) as (pool, (engine,)):
        session = pool.engine_for("s", "t")
        pool.version_set()
        assert await knows_weights(session, stream=stream)
        await engine.kill()
        await pool.check()
        await engine.start()
        await pool.check()
        assert [(view.state, view.weights_known) for view in pool.views()] == [("healthy", False)]
        assert not await knows_weights(session, stream=stream)
        pool.version_set()
        assert await knows_weights(session, stream=stream)


async def test_an_engine_that_is_down_when_a_version_is_set_does_not_have_it_later() -> None:
    async with pool_of(2) as (pool, (_, down)):
        await down.kill()
        await pool.check()
        pool.version_set()
        await down.start()
        await pool.check()
        assert [view.weights_known for view in pool.views()] == [True, False]


async def test_an_engine_that_is_added_later_has_unknown_weights() -> None:
    async with pool_of(1) as (pool, _), KillableEngine() as later:
        assert (await pool.add(later.url)).weights_known
        pool.version_set()
        async with KillableEngine() as last:
            assert not (await pool.add(last.url)).weights_known


async def test_a_version_may_except_engines() -> None:
    async with pool_of(2) as (pool, (_, other)):
        pool.version_set(unknown=[other.url + "/v1"])
        assert [view.weights_known for view in pool.views()] == [True, False]


async def test_an_engine_that_a_dead_trainer_held_goes_on_with_unknown_weights() -> None:
    async with pool_of(1) as (pool, (engine,)):
        pool.version_set()
        assert engine.sampler is not None
        await engine.sampler.pause("keep")
        asking = asyncio.create_task(knows_weights(pool.engine_for("s", "t")))
        pool.lease_expired()
        assert not await asyncio.wait_for(asking, 30)
