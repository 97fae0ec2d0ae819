"""The pool of backends over real engines that are added, removed, killed and started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from gangline.domain.conversation import Message, ModelCall, Text, message_text
from gangline.domain.errors import (
    Conflict,
    EngineIncapable,
    EngineMalformed,
    EngineRefused,
    EngineUnavailable,
    NotFound,
)
from gangline.models.engine_server.app import serving
from gangline.models.engines.contract import EngineRequest, ReplyAccumulator
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.node.backends.pool import BackendPool
from support.node.backends import KillableEngine

HELLO = EngineRequest(call=ModelCall(dialect="d", model="m", messages=(Message("user", (Text("hello"),)),)))


@asynccontextmanager
async def _pool(
    *scripts: dict[str, Any], add: bool = True, **options: Any
) -> AsyncGenerator[tuple[BackendPool, list[KillableEngine]], None]:
    """A pool over one engine per script, each of which answers who it is. No health check unless `check` is called."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(KillableEngine({"default": {"text": f"I am {i}"}} | script))
            for i, script in enumerate(scripts)
        ]
        pool = BackendPool(**({"probe_interval_s": 3600.0, "clock": lambda: 7.0} | options))
        stack.push_async_callback(pool.close)
        if add:
            for engine in engines:
                await pool.add(engine.url)
        yield pool, engines


async def _says(engine: Any) -> str:
    return message_text((await engine.chat(HELLO)).choices[0].message)


async def _until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_sessions_go_to_the_least_assigned_and_stay_there() -> None:
    async with _pool({}, {}, {}) as (pool, _):
        sessions = [pool.engine_for(f"s{i}", f"t{i}") for i in range(6)]
        first = [await _says(session) for session in sessions]
        assert first == [f"I am {i}" for i in (0, 1, 2, 0, 1, 2)]
        assert [await _says(session) for session in reversed(sessions)] == first[::-1]
        assert [view.num_sessions for view in pool.views()] == [2, 2, 2]
        pool.release("s1")
        pool.release("s4")
        pool.release("s4")
        assert [await _says(pool.engine_for(f"n{i}", "t")) for i in range(3)] == ["I am 1", "I am 1", "I am 0"]


async def test_a_view_tells_what_an_operator_asks() -> None:
    async with _pool({"model": "m1"}, add=False) as (pool, engines):
        view = await pool.add(engines[0].url + "/v1", kind="vllm", label="host-a")
        assert (view.backend_id, view.url, view.engine, view.label) == ("b1", engines[0].url, "vllm", "host-a")
        assert (view.state, view.model, view.error, view.since) == ("healthy", "m1", None, 7.0)
        assert await pool.add(engines[0].url) == view  # again: as it is
        assert pool.views() == [view]


async def test_backends_of_the_same_machine_come_first_by_label_or_by_address() -> None:
    async with _pool({}, {}, {}, add=False, node="here") as (pool, engines):
        for engine, label in zip(engines, ("there", "here", None), strict=True):
            await pool.add(engine.url, label=label)
        assert [view.is_near for view in pool.views()] == [False, True, True]
        assert [await _says(pool.engine_for(f"s{i}", "t")) for i in range(4)] == ["I am 1", "I am 2"] * 2
        await engines[1].kill()
        await engines[2].kill()
        assert await _says(pool.engine_for("s0", "t")) == "I am 0"


async def test_sessions_of_one_task_share_a_backend_within_the_slack() -> None:
    async with _pool({}, {}, affinity_slack=3) as (pool, _):
        assert [await _says(pool.engine_for(f"a{i}", "a")) for i in range(5)] == [
            "I am 0",
            "I am 0",
            "I am 0",
            "I am 1",
            "I am 1",
        ]
        assert await _says(pool.engine_for("b", "b")) == "I am 1"


async def test_a_dead_backend_is_replaced_within_the_call_and_the_reply_says_so_once() -> None:
    async with _pool({}, {}) as (pool, engines):
        session = pool.engine_for("s", "t")
        assert await _says(session) == "I am 0"
        await engines[0].kill()
        reply = await session.chat(HELLO)
        assert message_text(reply.choices[0].message) == "I am 1"
        (move,) = reply.metadata["backend_replaced"]
        assert (move["from"], move["to"]) == (engines[0].url, engines[1].url)
        assert "did not answer" in move["why"]
        assert (await session.chat(HELLO)).metadata == {}
        assert [(view.state, view.num_sessions) for view in pool.views()] == [("unhealthy", 0), ("healthy", 1)]


async def test_a_stream_moves_only_while_nothing_of_it_is_out() -> None:
    slow = {"default": {"text": "one two three", "token_delay_s": 3600}}
    async with _pool(slow, {}) as (pool, engines):
        session = pool.engine_for("s", "t")
        stream = session.stream(HELLO)
        await anext(stream)
        await engines[0].kill()
        with pytest.raises(EngineUnavailable):
            async for _ in stream:
                pass
        folded = ReplyAccumulator()
        async for delta in session.stream(HELLO):
            folded.feed(delta)
        assert message_text(folded.reply().choices[0].message) == "I am 1"
        assert folded.reply().metadata["backend_replaced"][0]["to"] == engines[1].url


async def test_a_call_that_fails_on_a_live_backend_fails_alone() -> None:
    faulty = {"rules": [{"pattern": "hello", "text": "x", "faults": {"status": 500, "times": None}}]}
    async with _pool(faulty, {}) as (pool, _):
        session = pool.engine_for("s", "t")
        with pytest.raises(EngineUnavailable, match="500"):
            await session.chat(HELLO)
        assert [view.state for view in pool.views()] == ["healthy", "healthy"]
        with pytest.raises(EngineRefused):
            await session.render(())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_malformed_answer_of_a_live_backend_fails_alone_and_of_a_dying_one_moves_the_call(stream: bool) -> None:
    garbage = {"rules": [{"pattern": "hello", "text": "x", "faults": {"garbage": True, "times": None}}]}
    async with _pool(garbage, {}) as (pool, engines):
        session = pool.engine_for("s", "t")
        with pytest.raises(EngineMalformed):
            await (anext(session.stream(HELLO)) if stream else session.chat(HELLO))
        assert [view.state for view in pool.views()] == ["healthy", "healthy"]
        backend = next(iter(pool._backends.values()))  # its health route fails from now on

        async def is_down(timeout_s: float) -> None:
            raise EngineUnavailable("the health check was answered 500")

        backend.engine.check_health = is_down
        answer = await (anext(session.stream(HELLO)) if stream else session.chat(HELLO))
        assert answer.metadata["backend_replaced"][0]["to"] == engines[1].url


async def test_health_checks_take_out_a_backend_after_some_failures_and_back_in_when_it_recovers() -> None:
    async with _pool({}, {}, max_failures=2) as (pool, engines):
        await engines[0].kill()
        await pool.check()
        assert (pool.views()[0].state, pool.views()[0].num_failures) == ("healthy", 1)
        await pool.check()
        assert pool.views()[0].state == "unhealthy"
        assert await _says(pool.engine_for("s", "t")) == "I am 1"
        await engines[0].start()
        await pool.check()
        assert (pool.views()[0].state, pool.views()[0].error) == ("healthy", None)
        assert await _says(pool.engine_for("s2", "t")) == "I am 0"


async def test_the_pool_checks_by_itself() -> None:
    async with _pool({}, {}, probe_interval_s=0.01, max_failures=1) as (pool, engines):
        await engines[0].kill()
        await _until(lambda: pool.views()[0].state == "unhealthy")
        await engines[0].start()
        await _until(lambda: pool.views()[0].state == "healthy")


async def test_a_backend_that_comes_back_as_another_model_stays_out() -> None:
    async with _pool({"model": "m"}, {"model": "m"}, max_failures=1) as (pool, engines):
        await engines[0].kill()
        await pool.check()
        engines[0].script |= {"model": "other"}
        await engines[0].start()
        await pool.check()
        assert pool.views()[0].state == "unhealthy"
        assert "it serves: other" in (pool.views()[0].error or "")


async def test_another_model_or_kind_of_log_probs_is_refused_until_the_others_are_cleared() -> None:
    odd = {"default": {"text": "I am 1", "logprob": 0.0}}
    async with _pool({"model": "m"}, {"model": "other"}, {"model": "m"} | odd, add=False) as (pool, engines):
        await pool.add(engines[0].url)
        with pytest.raises(Conflict, match=r"another model \(other\) .* has it \(m\)"):
            await pool.add(engines[1].url)
        with pytest.raises(Conflict, match="another kind of log-probs"):
            await pool.add(engines[2].url)
        assert len(pool.views()) == 1
        await pool.clear()
        assert (await pool.add(engines[1].url)).model == "other"


async def test_an_engine_without_ids_is_not_taken_in() -> None:
    async with _pool({"default": {"text": "x", "faults": {"no_token_ids": True}}}, add=False) as (pool, engines):
        with pytest.raises(EngineIncapable, match="no token ids"):
            await pool.add(engines[0].url)
        assert pool.views() == []


async def test_draining_lets_the_call_in_flight_finish_and_moves_the_session() -> None:
    async with _pool({}, {}) as (pool, engines):
        session = pool.engine_for("s", "t")
        assert await _says(session) == "I am 0"
        assert engines[0].sampler is not None
        await engines[0].sampler.pause("keep")
        in_flight = asyncio.create_task(session.chat(HELLO))
        await _until(lambda: pool.views()[0].num_calls == 1)
        removing = asyncio.create_task(pool.remove("b1"))
        await _until(lambda: pool.views()[0].state == "draining")
        moved = await session.chat(HELLO)
        assert message_text(moved.choices[0].message) == "I am 1"
        assert moved.metadata["backend_replaced"][0]["why"] == "removed"
        assert not removing.done()
        await engines[0].sampler.resume()
        assert message_text((await in_flight).choices[0].message) == "I am 0"
        await removing
        assert [view.backend_id for view in pool.views()] == ["b2"]


async def test_removing_at_once_makes_the_call_in_flight_fail_over() -> None:
    async with _pool({}, {}) as (pool, engines):
        session = pool.engine_for("s", "t")
        await session.capabilities()
        assert engines[0].sampler is not None
        await engines[0].sampler.pause("keep")
        in_flight = asyncio.create_task(session.chat(HELLO))
        await _until(lambda: pool.views()[0].num_calls == 1)
        await pool.remove("b1", drain=False)
        assert message_text((await in_flight).choices[0].message) == "I am 1"
        await engines[0].sampler.resume()


async def test_an_unknown_backend_cannot_be_removed() -> None:
    async with _pool({}) as (pool, _):
        with pytest.raises(NotFound, match="Known: b1"):
            await pool.remove("b9")


async def test_a_call_waits_for_a_backend_that_is_added_or_recovers() -> None:
    async with _pool({}, add=False, max_failures=1) as (pool, engines):
        waiting = asyncio.create_task(_says(pool.engine_for("s", "t")))
        await asyncio.sleep(0)
        await pool.add(engines[0].url)
        assert await waiting == "I am 0"
        await engines[0].kill()
        waiting = asyncio.create_task(_says(pool.engine_for("s", "t")))
        await _until(lambda: pool.views()[0].state == "unhealthy")
        await engines[0].start()
        await pool.check()
        assert await waiting == "I am 0"


async def test_without_a_healthy_backend_the_error_names_those_there_are() -> None:
    async with _pool({}, wait_s=0.05) as (pool, engines):
        await engines[0].kill()
        with pytest.raises(EngineUnavailable, match=rf"no backend was healthy.*{engines[0].url} is unhealthy"):
            await _says(pool.engine_for("s", "t"))
        await pool.clear()
        with pytest.raises(EngineUnavailable, match="has no backend"):
            await _says(pool.engine_for("s", "t"))


async def test_a_closed_pool_lets_no_one_wait() -> None:
    async with _pool(add=False) as (pool, _):
        waiting = asyncio.create_task(_says(pool.engine_for("s", "t")))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(EngineUnavailable, match="stopping"):
            await waiting


async def test_a_session_that_is_over_takes_no_place() -> None:
    async with _pool({}) as (pool, _):
        session = pool.engine_for("s", "t")
        await session.capabilities()
        pool.release("s")
        with pytest.raises(EngineUnavailable, match="over"):
            await session.chat(HELLO)
        assert pool.views()[0].num_sessions == 0


async def test_an_engine_that_accepts_and_never_answers_is_not_healthy() -> None:
    async def never(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    silent = web.Application()
    silent.router.add_get("/{path:.*}", never)
    async with serving(silent) as url, _pool(add=False, probe_timeout_s=0.05) as (pool, _):
        engine = VllmEngine(url)
        with pytest.raises(EngineUnavailable, match="did not answer a health check"):
            await engine.check_health(0.05)
        await engine.close()
        with pytest.raises(EngineUnavailable, match="did not answer a probe"):
            await pool.add(url, kind="vllm")
        assert pool.views() == []


async def test_two_hundred_sessions_are_spread_evenly_and_a_death_spreads_its_share() -> None:
    async with _pool({}, {}, {}, {}) as (pool, engines):
        sessions = [pool.engine_for(f"s{i}", f"t{i % 10}") for i in range(200)]
        for session in sessions:
            await session.capabilities()
        assert [view.num_sessions for view in pool.views()] == [50] * 4
        await engines[2].kill()
        await asyncio.gather(*(session.chat(HELLO) for session in sessions))
        assert sorted(view.num_sessions for view in pool.views()) == [0, 66, 67, 67]
