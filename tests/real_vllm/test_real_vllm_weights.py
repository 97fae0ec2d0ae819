"""New weights in a real vLLM, reloaded while a reply is being sampled: every token knows which weights drew it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from gangline.cli.results.audit import load_score
from gangline.domain.node_views import OpenedSession
from gangline.rows.audit import audit
from gangline.rows.logprob_audit import Score, compare_logprobs
from gangline.train.weights.update import ServiceWeights
from support.engines.vllm_engine import MODEL_FOLDER
from support.node.node import RunningNode, running_node
from support.node.weights import weights_of

ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Which word is in a.txt?"}], "stream": True}
NUM_TOKENS = 1200
NUM_TRIES = 6
HOT = 2.0
"""So hot that hardly any end of turn is drawn among 151,936 tokens: the reply lasts."""


def save_as_it_is(folder: Path) -> None:
    shutil.copytree(MODEL_FOLDER, folder, dirs_exist_ok=True)


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """The tiny model with its layers moved a little, as if trained a step further; made before the reply begins."""
    folder = tmp_path / "moved"
    save_as_it_is(folder)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: weight + (0.05 * weight.std() * torch.randn(weight.shape, generator=generator) if "layers" in name else 0)
        for name, weight in load_file(MODEL_FOLDER / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
async def node(tmp_path: Path, vllm_url: str) -> AsyncGenerator[RunningNode]:
    async with running_node(tmp_path / "data", vllm_url) as running:
        yield running


@pytest.fixture
async def weights(tmp_path: Path, node: RunningNode, vllm_url: str) -> AsyncGenerator[ServiceWeights]:
    """The engine is as it was started afterwards, for others."""
    weights = weights_of(tmp_path, node, mode="keep")
    yield weights
    await weights.push(save_as_it_is, 2 * NUM_TRIES + 1)
    async with aiohttp.ClientSession(vllm_url, raise_for_status=True) as engine:
        await (await engine.post("/update_weight_version", json={"new_version": "default"})).read()


async def stream_reply(opened: OpenedSession, *, after_20_tokens: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """What is to happen after 20 tokens happens at the reply's end where vLLM sends fewer pieces than that."""
    num_chunks = 0
    async with openai.AsyncOpenAI(base_url=opened.base_urls["openai"], api_key=opened.api_key) as client:
        async for _ in await client.chat.completions.create(**ASK, max_tokens=NUM_TOKENS, temperature=HOT):
            num_chunks += 1
            if num_chunks == 20:
                await after_20_tokens()
    if num_chunks < 20:
        await after_20_tokens()


async def test_a_reply_that_outlives_its_weights_says_which_tokens_are_whose(
    node: RunningNode, weights: ServiceWeights, tmp_path: Path, score: Score, moved: Path
) -> None:
    def save_moved(folder: Path) -> None:
        shutil.copytree(moved, folder, dirs_exist_ok=True)

    # On two busy cores vLLM sometimes sends its first tokens when it has sampled the last: that reply is not a case.
    for old in range(1, 2 * NUM_TRIES, 2):
        opened = await node.client.open_session()
        await weights.push(save_as_it_is, old)
        await stream_reply(opened, after_20_tokens=partial(weights.push, save_moved, old + 1))
        assert await weights.lost(old + 1) == []
        assert [one.version for one in await weights.lost(old + 2)] == [old + 1]
        result = await node.client.finalize(opened.session_id, completions=True)
        (completion,) = result.completions
        spans = completion.certificate.version_spans
        if len(spans) > 1:
            break
    new = tmp_path / "weights" / f"v{old + 1}"
    assert [span.version for span in spans] == [old, old + 1]
    assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, NUM_TOKENS)
    assert len(completion.sampled_ids) == NUM_TOKENS
    assert result.trajectory is not None
    assert audit(result.trajectory, result.completions).ok
    by_old = compare_logprobs([result.trajectory], score, version=old)
    assert by_old.not_comparable == {"another policy version": len(completion.sampled_ids) - spans[0].end}
    assert by_old.stats()["first"].num_tokens == spans[0].end
    assert by_old.stats()["first"].mean < 1e-3
    # Tokens of version 2 attend to what version 1 computed of their prefix (`keep`), so no model gives them again.
    by_new = compare_logprobs([result.trajectory], load_score(str(new)), version=old + 1)
    assert by_new.stats()["first"].num_tokens == NUM_TOKENS - spans[0].end
