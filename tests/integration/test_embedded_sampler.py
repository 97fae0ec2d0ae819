"""The decode thread and its hand-over: cancelling, pausing, new weights, closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gangline.domain.errors import Conflict, ContextOverflow, EngineUnavailable, InvalidRequest
from gangline.models.engine_server.sampler import PauseMode, SampledToken, SampleRequest
from gangline.serving.embedded.model import LanguageModel, load_model
from gangline.serving.embedded.sampler import EmbeddedSampler
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.engines.models import greedy, reference_model, write_tiny_model

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[int]:
    """The greedy continuation of PROMPT."""
    return greedy(reference_model(folder), PROMPT, 60)


def create(folder: Path, *, max_batch: int = 8, max_context: int | None = None, seed: int = 0) -> EmbeddedSampler:
    return EmbeddedSampler(
        LanguageModel(load_model(folder)),
        TinyTokenizer(),
        model_name="tiny",
        max_batch=max_batch,
        max_context=max_context,
        seed=seed,
        threads=1,
    )


@pytest_asyncio.fixture
async def sampler(folder: Path) -> AsyncIterator[EmbeddedSampler]:
    sampler = create(folder)
    yield sampler
    await sampler.close()


def ask(number: int = 60, *, prompt_ids: list[int] = PROMPT, temperature: float = 0.0, seed: int | None = None):
    return SampleRequest(prompt_ids=prompt_ids, max_tokens=number, temperature=temperature, seed=seed)


async def take(tokens: AsyncIterator[SampledToken], number: int | None = None) -> list[SampledToken]:
    """The next `number` tokens, or all that are left."""
    taken: list[SampledToken] = []
    while number is None or len(taken) < number:
        try:
            taken.append(await anext(tokens))
        except StopAsyncIteration:
            break
    return taken


def ids_of(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


async def test_only_the_last_token_has_a_finish_reason(sampler: EmbeddedSampler, wanted: list[int]):
    tokens = await take(sampler.sample(ask(60)))
    assert ids_of(tokens) == wanted
    assert [token.finish_reason for token in tokens] == [None] * 59 + ["length"]


async def test_requests_without_a_seed_differ_and_repeat_with_the_engines(folder: Path):
    runs: list[list[list[int]]] = []
    for _ in range(2):
        sampler = create(folder, seed=4)
        runs.append([ids_of(await take(sampler.sample(ask(12, temperature=1.0)))) for _ in range(2)])
        await sampler.close()
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


async def test_a_request_with_a_seed_repeats(sampler: EmbeddedSampler):
    calls = [take(sampler.sample(ask(12, temperature=1.0, seed=seed))) for seed in (3, 3, 4)]
    first, second, other = [ids_of(tokens) for tokens in await asyncio.gather(*calls)]
    assert first == second
    assert first != other


async def test_closing_the_iterator_frees_its_place_in_the_batch(folder: Path, wanted: list[int]):
    sampler = create(folder, max_batch=1)
    abandoned = sampler.sample(ask(900))
    await take(abandoned, 2)
    await abandoned.aclose()
    assert ids_of(await take(sampler.sample(ask(10)))) == wanted[:10]
    await sampler.close()


async def test_cancelling_the_reader_frees_its_place_in_the_batch(folder: Path, wanted: list[int]):
    sampler = create(folder, max_batch=1)
    started = asyncio.Event()

    async def read() -> None:
        async for _ in sampler.sample(ask(900)):
            started.set()

    reader = asyncio.create_task(read())
    await started.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert ids_of(await take(sampler.sample(ask(10)))) == wanted[:10]
    await sampler.close()


async def test_pause_keep_freezes_a_sequence_and_resume_goes_on(sampler: EmbeddedSampler, wanted: list[int]):
    running = sampler.sample(ask(60))
    tokens = await take(running, 2)
    await sampler.pause("keep")
    late = asyncio.create_task(take(sampler.sample(ask(5))))
    # Commands are answered in order: after this one, `late` has long been sent and would have begun.
    await asyncio.sleep(0)
    await sampler.set_version(1)
    assert not late.done()
    await sampler.set_version(2)
    await sampler.resume()
    tokens += await take(running)
    assert ids_of(tokens) == wanted
    versions = [token.version for token in tokens]
    assert versions == sorted(versions)
    assert set(versions) == {0, 2}
    assert [token.version for token in await late] == [2] * 5


async def test_pause_wait_returns_when_the_last_sequence_has_ended(sampler: EmbeddedSampler, wanted: list[int]):
    running = sampler.sample(ask(60))
    tokens = await take(running, 1)
    await sampler.pause("wait")
    assert sampler.num_running == 0
    assert ids_of(tokens + await take(running)) == wanted
    late = asyncio.create_task(take(sampler.sample(ask(5))))
    await asyncio.sleep(0)
    await sampler.set_version(1)
    assert not late.done()
    await sampler.resume()
    assert [token.version for token in await late] == [1] * 5


async def test_pause_abort_ends_a_sequence_without_a_finish_reason(sampler: EmbeddedSampler, wanted: list[int]):
    running = sampler.sample(ask(900))
    tokens = await take(running, 3)
    await sampler.pause("abort")
    assert sampler.num_running == 0
    tokens += await take(running)
    assert ids_of(tokens)[:60] == wanted[: len(tokens)]
    assert {token.finish_reason for token in tokens} == {None}
    await sampler.resume()
    assert ids_of(await take(sampler.sample(ask(5)))) == wanted[:5]


async def test_resume_releases_who_waits_for_the_batch_to_drain(folder: Path):
    sampler = create(folder)
    running = sampler.sample(ask(900))
    await take(running, 1)
    waiting = asyncio.create_task(sampler.pause("wait"))
    await asyncio.sleep(0)
    await sampler.resume()
    await waiting
    await running.aclose()
    await sampler.close()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_weights_are_replaced_under_every_kind_of_pause(
    sampler: EmbeddedSampler, folder: Path, tmp_path: Path, mode: PauseMode
):
    other = write_tiny_model(tmp_path, seed=1)
    await sampler.pause(mode)
    await sampler.load_weights(other)
    await sampler.set_version(1)
    await sampler.resume()
    assert ids_of(await take(sampler.sample(ask(8)))) == greedy(reference_model(other), PROMPT, 8)
    assert sampler.weight_version == 1


async def test_weights_are_not_replaced_under_running_sequences(sampler: EmbeddedSampler, folder: Path):
    with pytest.raises(Conflict):
        await sampler.load_weights(folder)


@pytest.mark.parametrize("prompt_ids", [[], [-1], [5, 97]])
async def test_a_prompt_that_the_model_cannot_read_is_refused(sampler: EmbeddedSampler, prompt_ids: list[int]):
    with pytest.raises(InvalidRequest):
        await take(sampler.sample(ask(prompt_ids=prompt_ids)))


async def test_a_prompt_that_fills_the_context_is_refused(folder: Path):
    sampler = create(folder, max_context=5)
    with pytest.raises(ContextOverflow):
        await take(sampler.sample(ask()))
    assert len(await take(sampler.sample(ask(prompt_ids=PROMPT[:4])))) == 1
    await sampler.close()


async def test_closing_the_engine_fails_those_who_wait(folder: Path):
    sampler = create(folder)
    running = sampler.sample(ask(900))
    await take(running, 1)
    await sampler.pause("keep")
    await sampler.close()
    await sampler.close()
    with pytest.raises(EngineUnavailable):
        await take(running)
    with pytest.raises(EngineUnavailable):
        await take(sampler.sample(ask()))
    with pytest.raises(EngineUnavailable):
        await sampler.resume()


async def test_a_failing_model_fails_the_requests_and_not_the_engine(
    folder: Path, wanted: list[int], monkeypatch: pytest.MonkeyPatch
):
    model = LanguageModel(load_model(folder))
    sampler = EmbeddedSampler(model, TinyTokenizer(), model_name="tiny", threads=1)

    def out_of_memory(chunks: object) -> None:
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", out_of_memory)
        with pytest.raises(EngineUnavailable, match="not enough memory"):
            await take(sampler.sample(ask()))
    assert ids_of(await take(sampler.sample(ask(5)))) == wanted[:5]
    await sampler.close()
