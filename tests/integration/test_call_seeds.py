"""`capture.seed`: every call of every session samples by its own seed, and by the same one again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from gangline.domain.session import SessionResult
from gangline.domain.task import SamplingPolicy
from gangline.models.engine_server.app import create_app, serving
from gangline.node.sessions.attempt import Attempt
from gangline.serving.embedded.model import LanguageModel, load_model
from gangline.serving.embedded.sampler import EmbeddedSampler
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.engines.held import HeldCall, HeldEngine
from support.engines.models import write_tiny_model
from support.node.attempt import lease_of, node_parts
from support.node.node import running_node
from support.node.proxy import Proxied, proxied_engine
from support.sdk.talking_agent import tasks

SEEDS = [313647521, 762811872, 475087419]
"""Of the first calls of a session whose seed is 7."""


async def complete(running: Proxied, **fields: Any) -> str | None:
    messages: Any = [{"role": "user", "content": "hello"}]
    async with running.client() as client:
        create: Any = client.chat.completions.create
        reply = await create(model="scripted", messages=messages, **fields)
        return reply.choices[0].message.content


def seed_of(call: HeldCall) -> int | None:
    return call.request.call.sampling.seed


async def answered(running: Proxied, engine: HeldEngine, number: int, **fields: Any) -> int | None:
    """The seed that the engine was sent with the `number`-th call, from 1."""
    asked = asyncio.create_task(complete(running, **fields))
    call = await engine.asked(number)
    call.finish("a")
    await asked
    return seed_of(call)


async def test_calls_have_seeds_of_their_own_and_the_same_ones_in_every_session_of_that_seed() -> None:
    for _ in range(2):
        engine = HeldEngine()
        async with proxied_engine(engine, seed=7) as running:
            assert [await answered(running, engine, number) for number in (1, 2, 3)] == SEEDS


async def test_what_the_harness_asks_for_is_replaced_and_kept() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine, seed=7) as running:
        assert await answered(running, engine, 1, seed=3) == SEEDS[0]
        (completion,) = running.journal.completions
        assert completion.certificate.sampling.seed == SEEDS[0]
        assert completion.metadata["sampling_wished"]["seed"] == 3


async def test_without_a_seed_the_harness_has_its_own() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine) as running:
        assert await answered(running, engine, 1) is None
        assert await answered(running, engine, 2, seed=3) == 3


async def test_a_rule_of_the_operator_has_the_last_word() -> None:
    engine = HeldEngine()
    policy = SamplingPolicy.model_validate({"seed": {"override": 9}})
    async with proxied_engine(engine, seed=7, sampling=policy) as running:
        assert await answered(running, engine, 1) == 9


async def test_the_call_after_one_that_failed_samples_by_its_seed_and_by_no_other_calls() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine, seed=7) as running:
        failing = asyncio.create_task(complete(running))
        first = await engine.asked(1)
        beside = asyncio.create_task(complete(running))
        second = await engine.asked(2)
        first.fail()
        with pytest.raises(openai.APIStatusError):
            await failing
        assert await answered(running, engine, 3) == SEEDS[0]
        assert await answered(running, engine, 4) == SEEDS[2]
        second.finish("b")
        assert await beside == "b"
        assert [seed_of(first), seed_of(second)] == SEEDS[:2]


async def test_a_session_that_goes_on_from_its_journal_goes_on_with_its_seeds() -> None:
    engine, again = HeldEngine(), HeldEngine()
    async with proxied_engine(engine, seed=7) as running:
        await answered(running, engine, 1)
        before = running.journal.completions
    async with proxied_engine(again, seed=7, completions=before) as running:
        assert await answered(running, again, 1) == SEEDS[1]


@asynccontextmanager
async def tiny_engine(folder: Path) -> AsyncGenerator[str]:
    model = write_tiny_model(folder, vocab_size=640)
    sampler = EmbeddedSampler(LanguageModel(load_model(model)), TinyTokenizer(), model_name="tiny", threads=1)
    async with serving(create_app(sampler)) as url:
        yield url
    await sampler.close()


def sampled(result: SessionResult) -> tuple[tuple[int, ...], ...]:
    """What was sampled in each call."""
    assert result.outcome == "completed", result.failure
    return tuple(tuple(one.sampled_ids.tolist()) for one in result.completions)


async def group(folder: Path, engine_url: str, capture: dict[str, Any]) -> list[tuple[tuple[int, ...], ...]]:
    """What each of three sessions of a task samples."""
    (task,) = islice(tasks(), 1)
    fields = {name: task[name] for name in ("runtime", "agent", "timeout_seconds")}
    async with node_parts(folder, engine_url=engine_url) as parts:
        leases = [
            msgspec.structs.replace(lease_of(f"s{index}", capture=capture, **fields), sample_index=index)
            for index in range(3)
        ]
        return [sampled(one) for one in await asyncio.gather(*(Attempt(lease, parts).live() for lease in leases))]


async def test_the_same_task_samples_the_same_tokens_and_its_sessions_do_not(tmp_path: Path) -> None:
    async with asyncio.timeout(120), tiny_engine(tmp_path / "model") as url:
        first, second, other = [
            await group(tmp_path / name, url, {"seed": seed}) for name, seed in (("a", 1), ("b", 1), ("c", 2))
        ]
    assert first == second
    assert len({*first, *other}) == 6


async def test_sessions_that_callers_open_sample_by_their_seed_in_chats_and_in_tokens(tmp_path: Path) -> None:
    async with tiny_engine(tmp_path / "model") as url, running_node(tmp_path / "node", url) as node:

        async def said(seed: int) -> tuple[tuple[int, ...], ...]:
            opened = await node.client.open_session(capture={"seed": seed})
            ids = TinyTokenizer().encode("once upon a time")
            for _ in range(2):
                body = {"prompt_ids": ids, "sampling_params": {"max_tokens": 6}}
                await node.ask("POST", f"/s/{opened.session_id}/generate", body, opened.api_key)
            async with openai.AsyncOpenAI(
                base_url=opened.base_urls["openai"], api_key=opened.api_key, max_retries=0
            ) as client:
                messages: Any = [{"role": "user", "content": "hello"}]
                await client.chat.completions.create(model="tiny", messages=messages, max_tokens=6)
            return sampled(await node.client.finalize(opened.session_id, completions=True))

        first, second, other = [await said(seed) for seed in (1, 1, 2)]
    assert first == second
    assert len({*first, *other}) == 6
