"""A teacher's log-probs of given ids: by the embedded engine, over vLLM's and SGLang's routes; and what is refused."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from gangline.domain.errors import ContextOverflow, EngineMalformed, EngineUnavailable, InvalidGroup, InvalidRequest
from gangline.domain.tokens import token_ids
from gangline.models.engine_server.app import create_app, serving
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.models.language.tokenizer import load_tokenizer
from gangline.serving.embedded.model import LanguageModel, load_model
from gangline.serving.embedded.sampler import EmbeddedSampler
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.train.collecting.groups import Group
from gangline.train.run.teacher import TeacherSettings, opened_teacher
from support.engines.byte_model import write_byte_model
from support.engines.models import reference_model
from support.engines.sglang_engine import FakeSglang
from support.training.samples import session, trace

IDS = token_ids(np.random.default_rng(0).integers(0, 250, 700))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("teacher"))


@asynccontextmanager
async def served(folder: Path, *, max_context: int | None = None) -> AsyncGenerator[str]:
    model = LanguageModel(load_model(folder))
    sampler = EmbeddedSampler(model, load_tokenizer(folder), model_name="teacher", max_context=max_context, threads=1)
    try:
        async with serving(create_app(sampler)) as url:
            yield url
    finally:
        await sampler.close()


def by_transformers(folder: Path, ids: Any) -> Any:
    """[T - 1]"""
    row = torch.tensor(ids.tolist())
    with torch.inference_mode():
        logits = reference_model(folder)(row[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, row[1:, None])[:, 0].numpy()


@pytest.mark.parametrize("num_ids", [1, 2, 3, 513, 700])
async def test_the_embedded_engine_scores_ids_as_transformers_does(folder: Path, num_ids: int) -> None:
    async with served(folder) as url:
        engine = VllmEngine(url)
        scores = await engine.score(IDS[:num_ids])
        await engine.close()
    assert np.isnan(scores[0])
    assert scores[1:] == pytest.approx(by_transformers(folder, IDS[:num_ids]), abs=1e-4)


async def test_scoring_does_not_disturb_who_samples(folder: Path) -> None:
    body = {"prompt": IDS[:20].tolist(), "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    async with served(folder) as url, aiohttp.ClientSession() as http:

        async def sampled(**also: Any) -> dict[str, Any]:
            async with http.post(f"{url}/v1/completions", json=body | also) as reply:
                return (await reply.json())["choices"][0]

        before, scored, after = await sampled(), await sampled(prompt_logprobs=0), await sampled()
    assert before["token_ids"] == scored["token_ids"] == after["token_ids"]
    assert "prompt_logprobs" not in before
    assert [None if one is None else list(one) for one in scored["prompt_logprobs"]][:2] == [None, [str(IDS[1])]]


async def test_ids_beyond_the_context_are_an_overflow(folder: Path) -> None:
    async with served(folder, max_context=64) as url:
        engine = VllmEngine(url)
        with pytest.raises(ContextOverflow):
            await engine.score(IDS[:64])
        assert len(await engine.score(IDS[:63])) == 63
        await engine.close()


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 5}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 0, "stream": True}, "leave out stream"),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 0}, "no weights"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0}, "completions"),
    ],
    ids=["other ids too", "a stream", "no weights", "the chat route"],
)
async def test_prompt_logprobs_that_are_not_there_are_refused(path: str, body: dict[str, Any], says: str) -> None:
    sampler = ScriptedSampler(Script(), TinyTokenizer())
    async with (
        serving(create_app(sampler)) as url,
        aiohttp.ClientSession() as http,
        http.post(url + path, json=body) as reply,
    ):
        assert reply.status == 400
        assert says in (await reply.json())["error"]["message"]


async def test_sglang_is_recognised_and_scores_by_its_own_route() -> None:
    sglang = FakeSglang()
    one = trace()
    async with (
        serving(sglang.app()) as url,
        opened_teacher(TeacherSettings(url=url), sglang.tokenizer, patience_s=0) as teacher,
    ):
        found = await teacher.logprobs([Group("task-1", (session("s0", 1.0, one),))])
    (scores,) = found.values()
    ids = [*one.prompt_ids.tolist(), *one.response_ids.tolist()]
    assert scores.tolist() == pytest.approx([-0.01 * token for token in ids[len(one.prompt_ids) :]])
    assert sglang.bodies[-1]["input_ids"] == ids
    assert (sglang.bodies[-1]["return_logprob"], sglang.bodies[-1]["logprob_start_len"]) == (True, 0)


async def test_log_probs_of_other_ids_are_malformed() -> None:
    sglang = FakeSglang(odd_ids=[1, 2])
    async with (
        serving(sglang.app()) as url,
        opened_teacher(TeacherSettings(url=url), sglang.tokenizer, patience_s=0) as teacher,
    ):
        with pytest.raises(EngineMalformed, match="of other ids"):
            await teacher.logprobs([Group("task-1", (session("s0", 1.0),))])


async def test_a_teacher_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    other = load_tokenizer(write_byte_model(tmp_path, backwards=True))
    async with served(folder) as url:
        async with opened_teacher(TeacherSettings(url=url), load_tokenizer(folder), patience_s=0):
            pass
        with pytest.raises(InvalidRequest, match="another vocabulary than the model: ids 0 to 258"):
            async with opened_teacher(TeacherSettings(url=url), other, patience_s=0):
                pass


async def test_rows_beyond_the_context_are_left_out_and_a_step_of_only_such_rows_is_an_error(folder: Path) -> None:
    short, long = trace(), trace(turns=[[7] * 70])
    async with served(folder, max_context=64) as url:
        settings = TeacherSettings(url=url, rows_at_once=1)
        async with opened_teacher(settings, load_tokenizer(folder), patience_s=0) as teacher:
            found = await teacher.logprobs([Group("task-1", (session("s0", 1.0, short), session("s1", 1.0, long)))])
            assert np.isfinite(found["s0/0"]).all()
            assert np.isnan(found["s1/0"]).all()
            with pytest.raises(InvalidGroup, match="none of a step's 1 rows"):
                await teacher.logprobs([Group("task-1", (session("s1", 1.0, long),))])


async def test_a_teacher_that_is_gone_ends_the_step_after_the_patience(folder: Path) -> None:
    async with served(folder) as url:
        opened = opened_teacher(TeacherSettings(url=url), load_tokenizer(folder), patience_s=0)
        teacher = await opened.__aenter__()
    with pytest.raises(EngineUnavailable):
        await teacher.logprobs([Group("task-1", (session("s0", 1.0),))])
    await opened.__aexit__(None, None, None)
